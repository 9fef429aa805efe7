"""Log-probs and entropies of chosen tokens from logits, without a second [N, V] matrix in fp32.

N rows (positions), V vocabulary. Both functions go over the rows in chunks of `chunk_rows`; a chunk is
upcast into one reusable [chunk, V] buffer (two when the entropy takes part), and the backward recomputes
the softmax from the saved row normaliser instead of storing it. What lives for long is the logits that the
caller holds anyway and, in the backward, their gradient in their own dtype.

The arithmetic is fp32 for bf16, fp16 and fp32 logits and float64 for float64 logits. The temperature acts
as the sampler's: `log_softmax(z / temperature)` over the full vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_CHUNK_ELEMENTS = 2**20
"""Elements of a chunk's buffer on the CPU (4 MiB in fp32, which a cache holds); 2^18..2^22 measure alike."""

DEVICE_CHUNK_ELEMENTS = 2**26
"""Elements of a chunk's buffer elsewhere (256 MiB in fp32): kernel launches hardly count then."""


def selected_logprobs(
    logits_NV: Tensor, ids_N: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None
) -> Tensor:
    """`log_softmax(logits / temperature)` at the given ids, [N].

    Args:
        logits_NV: logits, any floating dtype.
        ids_N: token ids in [0, V), long.
        temperature: sampling temperature, > 0.
        chunk_rows: rows handled at once; None takes what fits in the buffer of the device.

    Returns:
        Log-probs in fp32 (float64 for float64 logits), with gradient to the logits.

    Raises:
        ValueError: shapes disagree or the temperature is not positive.
    """
    _check(logits_NV, ids_N, temperature)
    rows = chunk_rows or _default_rows(logits_NV)
    logprobs_N, _ = _TokenStatistics.apply(logits_NV, ids_N, temperature, rows, False)
    return logprobs_N


def selected_logprobs_and_entropy(
    logits_NV: Tensor, ids_N: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs as `selected_logprobs`, and the entropy of `softmax(logits / temperature)` in nats, both [N].

    Both carry gradient: `dH/dz_j = -p_j (log p_j + H) / temperature`.
    """
    _check(logits_NV, ids_N, temperature)
    rows = chunk_rows or _default_rows(logits_NV)
    logprobs_N, entropy_N = _TokenStatistics.apply(logits_NV, ids_N, temperature, rows, True)
    return logprobs_N, entropy_N


def entropy(logits_NV: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None) -> Tensor:
    """Entropy of `softmax(logits / temperature)` in nats, [N], with gradient."""
    ids_N = torch.zeros(logits_NV.shape[0], dtype=torch.long, device=logits_NV.device)
    return selected_logprobs_and_entropy(logits_NV, ids_N, temperature=temperature, chunk_rows=chunk_rows)[1]


class _TokenStatistics(torch.autograd.Function):
    """(logits, ids) -> (log-prob of ids, entropy or an empty tensor), chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, ids_N: Tensor, temperature: float, rows: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(logits_NV)
        num_rows = logits_NV.shape[0]
        logprobs_N = torch.empty(num_rows, dtype=dtype, device=logits_NV.device)
        normaliser_N = torch.empty_like(logprobs_N)
        entropy_N = torch.empty_like(logprobs_N) if with_entropy else logprobs_N.new_empty(0)
        for span, scaled in _scaled_chunks(logits_NV, temperature, rows):
            selected = scaled.gather(1, ids_N[span].unsqueeze(1)).squeeze(1)
            highest = scaled.amax(dim=1)
            scaled.sub_(highest.unsqueeze(1))
            exponentials = scaled.exp() if with_entropy else scaled.exp_()
            total = exponentials.sum(dim=1)
            log_total = total.log()
            normaliser_N[span] = highest + log_total
            logprobs_N[span] = selected - normaliser_N[span]
            if with_entropy:  # H = log Z - sum p (z - max); e^-inf * -inf is a token without probability
                expectation = exponentials.mul_(scaled.nan_to_num_(neginf=0.0)).sum(dim=1) / total
                entropy_N[span] = log_total - expectation
        ctx.save_for_backward(logits_NV, ids_N, normaliser_N, entropy_N)
        ctx.temperature, ctx.rows, ctx.with_entropy = temperature, rows, with_entropy
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        logits_NV, ids_N, normaliser_N, entropy_N = ctx.saved_tensors
        logprob_grad_N, entropy_grad_N = grads
        if not ctx.with_entropy:
            entropy_grad_N = None
        if logprob_grad_N is None and entropy_grad_N is None:
            return None, None, None, None, None
        logits_grad_NV = torch.empty_like(logits_NV)
        for span, scaled in _scaled_chunks(logits_NV, ctx.temperature, ctx.rows, into_NV=logits_grad_NV):
            logprobs = scaled.sub_(normaliser_N[span].unsqueeze(1))
            entropy_part = None
            if entropy_grad_N is not None:  # -p (log p + H) g
                shifted = (logprobs + entropy_N[span].unsqueeze(1)).nan_to_num_(neginf=0.0)
                factor = entropy_grad_N[span].unsqueeze(1)
                entropy_part = shifted.mul_(logprobs.exp()).mul_(-factor)
            grad = logprobs.exp_()
            if logprob_grad_N is None:
                grad.zero_()
            else:  # (onehot - p) g
                factor = logprob_grad_N[span].unsqueeze(1)
                grad.mul_(-factor).scatter_add_(1, ids_N[span].unsqueeze(1), factor)
            if entropy_part is not None:
                grad.add_(entropy_part)
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            if grad.data_ptr() != logits_grad_NV[span].data_ptr():
                logits_grad_NV[span] = grad
        return logits_grad_NV, None, None, None, None


def _scaled_chunks(
    logits_NV: Tensor, temperature: float, rows: int, *, into_NV: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Row ranges with `logits / temperature` in the compute dtype.

    They stand in `into_NV` itself where its dtype allows, else in one buffer that is reused.
    """
    num_rows, vocabulary = logits_NV.shape
    dtype = _compute_dtype(logits_NV)
    in_place = into_NV is not None and into_NV.dtype == dtype
    buffer = torch.empty(0 if in_place else min(rows, num_rows), vocabulary, dtype=dtype, device=logits_NV.device)
    for start in range(0, num_rows, rows):
        span = slice(start, min(start + rows, num_rows))
        chunk = into_NV[span] if in_place and into_NV is not None else buffer[: span.stop - span.start]
        chunk.copy_(logits_NV[span])
        if temperature != 1.0:
            chunk.div_(temperature)
        yield span, chunk


def _compute_dtype(logits_NV: Tensor) -> torch.dtype:
    return torch.float64 if logits_NV.dtype == torch.float64 else torch.float32


def _default_rows(logits_NV: Tensor) -> int:
    elements = CPU_CHUNK_ELEMENTS if logits_NV.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(1, elements // max(1, logits_NV.shape[1]))


def _check(logits_NV: Tensor, ids_N: Tensor, temperature: float) -> None:
    if logits_NV.dim() != 2 or ids_N.shape != logits_NV.shape[:1]:
        raise ValueError(f"logits {tuple(logits_NV.shape)} and ids {tuple(ids_N.shape)} are not [N, V] and [N]")
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature}: must be positive; 0 is greedy and has no log-probs")
