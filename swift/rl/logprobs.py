"""Log-probs and entropies of chosen tokens from logits, without a second [N, V] matrix in fp32.

N rows (positions), V vocabulary. The rows are upcast in chunks, which the backward pass makes again. The arithmetic is
fp32 for bf16, fp16 and fp32 logits and float64 for float64 logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CPU_CHUNK_ELEMENTS = 2**20
"""Elements of a chunk on the CPU (4 MiB in fp32, which a cache holds); 2^18..2^22 measure alike."""

DEVICE_CHUNK_ELEMENTS = 2**26
"""Elements of a chunk elsewhere (256 MiB in fp32): kernel launches hardly count then."""


def selected_logprobs(
    logits_NV: Tensor, ids_N: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """`log_softmax(logits / temperature)` at the given ids, and the entropy of that distribution in nats, both [N].

    Args:
        logits_NV: logits, any floating dtype; -inf is a token without probability.
        ids_N: token ids in [0, V), long.
        temperature: sampling temperature, > 0.
        chunk_rows: rows handled at once; None takes what suits the device.

    Returns:
        fp32 (float64 for float64 logits), with gradient to the logits.
    """
    elements = CPU_CHUNK_ELEMENTS if logits_NV.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    rows = chunk_rows or max(1, elements // max(1, logits_NV.shape[1]))
    parts = [
        checkpoint(_of_chunk, logits, ids, temperature, use_reentrant=False, preserve_rng_state=False)
        for logits, ids in zip(logits_NV.split(rows), ids_N.split(rows), strict=True)
    ]
    logprobs_N, entropy_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs_N, entropy_N


def _of_chunk(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = torch.log_softmax(logits.to(dtype) / temperature, dim=1)
    information = -logprobs.masked_fill(logprobs.isneginf(), 0.0)
    return logprobs.gather(1, ids.unsqueeze(1)).squeeze(1), (logprobs.exp() * information).sum(dim=1)
