"""A window laid out as TRL does, in padded rows, and what a loss makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH, MAX_COMPLETION_LENGTH = 6, 8


@dataclass(frozen=True, eq=False)
class Window:
    """Padded float64 tensors [S, LENGTH] of S sequences, and their advantages [S].

    `sampler` holds NaN where the engine could not score a token.
    """

    policy: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    entropies: Tensor
    advantages: Tensor
    completion_mask: Tensor
    tool_mask: Tensor

    @property
    def mask(self) -> Tensor:
        """What is trained."""
        return self.completion_mask * self.tool_mask

    @property
    def trained(self) -> list[int]:
        """T_i."""
        return self.mask.sum(1).tolist()

    def __len__(self) -> int:
        return len(self.advantages)

    def rows(self, part: slice) -> Window:
        """Some of the sequences."""
        return Window(**{name: getattr(self, name)[part] for name in Window.__dataclass_fields__})


def make_window(seed: int, filtered: list[int], *, sequences: int = 6, unscored: bool = False) -> Window:
    """Random tensors; `filtered` sequences have no trained token, `unscored` leaves some sampler log-probs out."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LENGTH + 1, (sequences,), generator=generator)
    lengths[0] = LENGTH
    completion_mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    tool_mask = (torch.rand(sequences, LENGTH, generator=generator, dtype=torch.float64) < 0.8).long()
    tool_mask[:, 0] = 1
    tool_mask[filtered] = 0
    policy = -random(sequences, LENGTH).abs() - 0.05
    random(sequences, LENGTH)  # the windows stay those that reach every branch
    old = policy + 0.3 * random(sequences, LENGTH)
    ref = policy + 0.3 * random(sequences, LENGTH)
    advantages = random(sequences)
    sampler = old - 0.5 * random(sequences, LENGTH)
    if unscored:
        sampler[torch.rand(sequences, LENGTH, generator=generator) < 0.15] = math.nan
    return Window(
        policy=policy,
        old=old,
        ref=ref,
        sampler=sampler,
        # in fp32, as TRL takes the quantile of entropies in fp32
        entropies=random(sequences, LENGTH).abs().float().double(),
        advantages=advantages,
        completion_mask=completion_mask,
        tool_mask=tool_mask,
    )


@dataclass(frozen=True)
class Outcome:
    """Loss of a window, its gradients [S, LENGTH] by log-probs and entropies, and metrics of each micro-batch."""

    loss: float
    gradient: Tensor
    entropy_gradient: Tensor
    metrics: dict[str, list[float]]
