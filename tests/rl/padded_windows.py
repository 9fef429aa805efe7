"""A window laid out as TRL does, in padded rows, and what a loss makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swift.rl.objective import LossOutput

LENGTH, MAX_COMPLETION_LENGTH = 6, 8


@dataclass(frozen=True, eq=False)
class Window:
    """Padded tensors [S, LENGTH] of S sequences, and their advantages [S].

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

    def real(self, values: Tensor) -> list[float]:
        """Those of the tokens that are no padding, sequence after sequence."""
        return values[self.completion_mask.bool()].tolist()

    def single(self) -> Window:
        """The same in fp32."""
        return Window(
            **{name: value.float() if value.is_floating_point() else value for name, value in vars(self).items()}
        )


def window_of(*, policy: list, old: list, advantages: list, ref: list | None = None) -> Window:
    """A window of written numbers, ragged lists of one value for each token, all of which are trained."""
    lengths = torch.tensor([len(row) for row in policy])

    def padded(rows: list) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True
        )

    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    old_T = padded(old)
    return Window(
        policy=padded(policy),
        old=old_T,
        ref=padded(ref or policy),
        sampler=old_T,
        entropies=torch.zeros_like(old_T),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        completion_mask=mask,
        tool_mask=torch.ones_like(mask),
    )


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
    outputs: list[LossOutput] = field(default_factory=list)
