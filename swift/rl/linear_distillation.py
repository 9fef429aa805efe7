"""The divergence from a teacher, from hidden states and output layers, without an [N, V] matrix of both.

Rows are computed block by block. If the logits of all rows are more than `KEEP_BYTES`, the backward pass computes each
block again, so a step holds the logits of one block and, for each token, the hidden states of student and teacher.

N tokens, H hidden size, V vocabulary, K likeliest tokens of the teacher; n rows of a block.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from swift.rl.distillation import generalized_jsd, student_bins, tail_bound, teacher_bins
from swift.rl.linear_logprobs import KEEP_BYTES, PLAIN, LogitMap

BLOCK_ELEMENTS: dict[Literal["cpu", "device"], int] = {"cpu": 2**22, "device": 2**27}
"""Elements of a block of logits."""


@dataclass(frozen=True, slots=True)
class Head:
    """Hidden states and the output layer behind them.

    weight_VH: None: `hidden_NH` holds logits, [N, V].
    """

    hidden_NH: Tensor
    weight_VH: Tensor | None = None
    bias_V: Tensor | None = None
    logit_map: LogitMap = PLAIN

    @property
    def vocabulary(self) -> int:
        """V."""
        return (self.hidden_NH.shape[1] if self.weight_VH is None else self.weight_VH.shape[0]) or 1

    def logits(self, rows: slice) -> Tensor:
        """Logits at the temperature, [n, V], fp32 at least."""
        product = self.hidden_NH[rows]
        if self.weight_VH is not None:
            product = torch.nn.functional.linear(product, self.weight_VH, self.bias_V)
        logits, cap = product.to(torch.promote_types(product.dtype, torch.float32)), self.logit_map.softcap
        if cap is None:
            return logits * self.logit_map.slope
        return (logits * (self.logit_map.scale / cap)).tanh() * (cap / self.logit_map.temperature)

    def detached(self, *, copy: bool) -> Head:
        """The same without gradient; `copy`: of a weight that is gathered for this moment only."""
        tensors = (self.hidden_NH, self.weight_VH, self.bias_V)
        hidden_NH, weight_VH, bias_V = (None if t is None else t.detach() for t in tensors)
        if copy and weight_VH is not None:
            weight_VH, bias_V = weight_VH.clone(), None if bias_V is None else bias_V.clone()
        assert hidden_NH is not None
        return Head(hidden_NH, weight_VH, bias_V, self.logit_map)


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens of a teacher and their log-probs, both [N, K]."""

    ids_NK: Tensor
    logprobs_NK: Tensor


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison gives for each token.

    divergence_N: with gradient. logprobs_N: of the token that is there, with gradient. sampling_logprobs_N, entropy_N:
    at the temperature of sampling, without. bound_N: of the error of the divergence; None where it is exact or has no
    bound.
    """

    divergence_N: Tensor
    logprobs_N: Tensor
    sampling_logprobs_N: Tensor
    entropy_N: Tensor
    bound_N: Tensor | None = None


def compare(
    student: Head,
    ids_N: Tensor,
    *,
    teacher: Head | TopTokens,
    beta: float,
    top_k: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, ...]:
    """The fields of `Compared`, in a tuple, which wrappers of models pass on.

    Args:
        student: with gradient.
        ids_N: the tokens that are there.
        teacher: a local one, over all tokens that both know; or its likeliest tokens.
        beta: of the divergence.
        top_k: number of likeliest tokens of a local teacher that are told apart; None: all.
        temperature: of sampling.
    """
    told = functools.partial(_block, student, ids_N, teacher, beta=beta, top_k=top_k, temperature=temperature)
    elements = BLOCK_ELEMENTS["cpu" if student.hidden_NH.device.type == "cpu" else "device"]
    size, total = max(1, elements // student.vocabulary), ids_N.numel()
    again = total * student.vocabulary * 4 > KEEP_BYTES and torch.is_grad_enabled()
    parts = []
    for start in range(0, total, size):
        rows = slice(start, start + size)
        again_at = functools.partial(checkpoint, told, use_reentrant=False, preserve_rng_state=False)
        parts.append((again_at if again else told)(rows))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _block(
    student: Head,
    ids_N: Tensor,
    teacher: Head | TopTokens,
    rows: slice,
    *,
    beta: float,
    top_k: int | None,
    temperature: float,
) -> tuple[Tensor, ...]:
    """The fields of `Compared` for some rows; those that are None are left out."""
    logits, ids_n1 = student.logits(rows), ids_N[rows].unsqueeze(1)
    student_nV = logits.log_softmax(-1)
    sampling_nV = student_nV.detach() if temperature == 1 else (logits.detach() / temperature).log_softmax(-1)
    chosen = (logprobs_nV.gather(1, ids_n1)[:, 0] for logprobs_nV in (student_nV, sampling_nV))
    own = (*chosen, -(sampling_nV.exp() * sampling_nV).sum(1))
    if isinstance(teacher, Head):
        with torch.no_grad():
            known = min(student.vocabulary, teacher.vocabulary)  # rows beyond are padding
            teacher_nV = teacher.logits(rows)[:, :known].log_softmax(-1)
        if known < student.vocabulary:
            student_nV = logits[:, :known].log_softmax(-1)
        if top_k is None or top_k >= known:
            return generalized_jsd(student_nV, teacher_nV, beta), *own
        logprobs_nK, ids_nK = teacher_nV.topk(top_k)
    else:
        logprobs_nK, ids_nK = teacher.logprobs_NK[rows].to(student_nV.dtype), teacher.ids_NK[rows]
    student_nB, least_n = student_bins(student_nV, ids_nK)
    teacher_nB = teacher_bins(logprobs_nK)
    bound_n = tail_bound(student_nB, teacher_nB, least_n, beta)
    return generalized_jsd(student_nB, teacher_nB, beta), *own, *(() if bound_n is None else (bound_n,))
