"""What one forward/backward pass consumes: a packed stream and the per-token numbers of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swift.models.forward import TokenBatch, TokenSequence, pack
from swift.rl.segments import Segments
from swift.rollout.samples import TrainSample


@dataclass(slots=True)
class MicroBatch:
    """S completions with N completion tokens in all, packed.

    advantages_N: of each token. weights_N: the loss weight of each token (0 outside of the data mask); the loss of the
    global batch is the sum of weight * objective. mask_N: the data mask. index_N: the sample of each token.
    old_logprobs_N: NaN where none is known yet. ref_logprobs_N: None unless every sample has them.
    """

    samples: list[TrainSample]
    tokens: TokenBatch
    advantages_N: Tensor
    weights_N: Tensor
    mask_N: Tensor
    index_N: Tensor
    sampler_logprobs_N: Tensor
    old_logprobs_N: Tensor
    ref_logprobs_N: Tensor | None

    def old_or(self, policy_logprobs_N: Tensor) -> Tensor:
        """The old log-probs; where none is known the policy's own, because then this is its first visit."""
        old_N = self.old_logprobs_N.to(policy_logprobs_N.dtype)
        return torch.where(old_N.isnan(), policy_logprobs_N.detach(), old_N)

    @property
    def segments(self) -> Segments:
        """The samples' tokens, and which of them are trained."""
        return Segments(self.mask_N, self.index_N, len(self.samples))

    def sequences(self) -> list[TokenSequence]:
        """The token ids, one entry per sample."""
        return _sequences(self.samples)


def collate(samples: Sequence[TrainSample], weights_S: Sequence[float], *, device: torch.device | str) -> MicroBatch:
    """Pack S samples, those of a group next to each other, and lay their numbers out token by token.

    `weights_S` is the loss weight of each trained token of a sample.
    """

    def join(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    unknown = (np.full(sample.token_ids.size, np.nan, dtype=np.float32) for sample in samples)
    old = [none if one.old_logprobs is None else one.old_logprobs for one, none in zip(samples, unknown, strict=True)]
    references = [sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None]
    mask_N = join([sample.trained for sample in samples])
    own = [np.float32(one.advantage) if one.token_advantages is None else one.token_advantages for one in samples]
    lengths = torch.tensor([sample.token_ids.size for sample in samples])
    index_N = torch.arange(len(samples)).repeat_interleave(lengths).to(device)
    weights_N = torch.tensor(list(weights_S), dtype=torch.float32, device=device)[index_N]
    return MicroBatch(
        samples=list(samples),
        tokens=pack(_sequences(samples), device=device),
        advantages_N=join([np.broadcast_to(a, s.token_ids.shape) for a, s in zip(own, samples, strict=True)]),
        weights_N=weights_N * mask_N,
        mask_N=mask_N,
        index_N=index_N,
        sampler_logprobs_N=join([sample.sampler_logprobs for sample in samples]),
        old_logprobs_N=join(old),
        ref_logprobs_N=join(references) if len(references) == len(samples) else None,
    )


def _sequences(samples: Sequence[TrainSample]) -> list[TokenSequence]:
    return [TokenSequence(sample.prompt_ids.tolist(), sample.token_ids.tolist()) for sample in samples]


def split_by_sample(values_N: Tensor, samples: Sequence[TrainSample]) -> list[np.ndarray]:
    """Cut a per-token tensor into one float32 array per sample."""
    flat = values_N.detach().float().cpu().numpy()
    return np.split(flat, np.cumsum([sample.token_ids.size for sample in samples])[:-1])
