"""The input of one forward/backward pass: a packed stream and the per-token numbers of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from swift.models.forward import TokenBatch, TokenSequence, pack
from swift.models.transfer import to_device
from swift.models.vision import Vision
from swift.rl.segments import Segments
from swift.rollout.samples import FROZEN, FrozenName, TrainSample


@dataclass(slots=True)
class MicroBatch:
    """S completions with N completion tokens in all, packed.

    sequences: the token ids, one entry per sample. advantages_N: of each token. weights_N: the loss weight of each
    token (0 outside of the data mask); the loss of the global batch is the sum of weight * objective. mask_N: the data
    mask. segments: the samples' tokens with that mask. old_logprobs_N: NaN where a sample has none yet. frozen_N:
    log-probs of the frozen models that every sample has. teacher_top: ids and log-probs of the teacher's likeliest
    tokens, [N, K], if every sample has them. filler: whether another rank trains on the samples.
    """

    samples: list[TrainSample]
    sequences: list[TokenSequence]
    tokens: TokenBatch
    advantages_N: Tensor
    weights_N: Tensor
    mask_N: Tensor
    segments: Segments
    sampler_logprobs_N: Tensor
    old_logprobs_N: Tensor
    frozen_N: dict[FrozenName, Tensor]
    teacher_top: tuple[Tensor, Tensor] | None = None
    filler: bool = False


def collate(
    samples: Sequence[TrainSample],
    weights_S: Sequence[float],
    *,
    device: torch.device | str,
    filler: bool = False,
    vision: Vision | None = None,
) -> MicroBatch:
    """Pack S samples, those of a group next to each other, and concatenate their per-token numbers.

    weights_S: the loss weight of each trained token of a sample. filler: no token is trained. vision: of the policy.
    """

    def join(parts: Sequence[np.ndarray]) -> Tensor:
        return to_device(np.concatenate(parts), device)

    sequences = [TokenSequence(sample.prompt_ids.tolist(), sample.token_ids.tolist()) for sample in samples]
    unknown = (np.full(sample.token_ids.size, np.nan, dtype=np.float32) for sample in samples)
    old = [none if s.old_logprobs is None else s.old_logprobs for s, none in zip(samples, unknown, strict=True)]
    frozen = {name: [getattr(sample, name) for sample in samples] for name in FROZEN}
    advantages = [np.float32(s.advantage) if s.token_advantages is None else s.token_advantages for s in samples]
    top = [(s.teacher_ids, s.teacher_top) for s in samples if s.teacher_ids is not None and s.teacher_top is not None]
    lengths = torch.tensor([sample.token_ids.size for sample in samples])
    index_N = to_device(torch.arange(len(samples)).repeat_interleave(lengths), device)
    mask_N = join([sample.trained & (not filler) for sample in samples])
    weights_N = to_device(list(weights_S), device, dtype=torch.float32)[index_N]
    return MicroBatch(
        samples=list(samples),
        sequences=sequences,
        tokens=pack(sequences, device=device, vision=vision),
        advantages_N=join([np.broadcast_to(a, s.token_ids.shape) for a, s in zip(advantages, samples, strict=True)]),
        weights_N=weights_N * mask_N,
        mask_N=mask_N,
        segments=Segments(mask_N, index_N, len(samples)),
        sampler_logprobs_N=join([sample.sampler_logprobs for sample in samples]),
        old_logprobs_N=join(old),
        frozen_N={name: join(parts) for name, parts in frozen.items() if all(part is not None for part in parts)},
        teacher_top=(join([i for i, _ in top]).long(), join([p for _, p in top])) if len(top) == len(samples) else None,
        filler=filler,
    )


def seen_by_teacher(batch: MicroBatch, *, vision: Vision | None = None) -> MicroBatch:
    """The micro-batch with the prompts that the teacher gets, where samples have such ones."""
    samples, device = batch.samples, batch.mask_N.device
    if all(sample.teacher_prompt_ids is None for sample in samples):
        return batch
    prompts = [s.prompt_ids if s.teacher_prompt_ids is None else s.teacher_prompt_ids for s in samples]
    sequences = [TokenSequence(p.tolist(), s.completion_ids) for p, s in zip(prompts, batch.sequences, strict=True)]
    return replace(batch, sequences=sequences, tokens=pack(sequences, device=device, vision=vision))


def split_by_sample(values_N: Tensor, samples: Sequence[TrainSample]) -> list[np.ndarray]:
    """Cut a per-token tensor into one float32 array per sample."""
    flat = values_N.detach().float().cpu().numpy()
    return np.split(flat, np.cumsum([sample.token_ids.size for sample in samples])[:-1])
