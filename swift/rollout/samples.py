"""What is trained on: the samples of a rollout batch, and which of them a global batch (one optimizer step) holds.

A rollout batch holds all samples of one round, in launch order, the same on every rank. It feeds `num_global_batches`
global batches, `num_iterations` times each:

    rollout batch   [ g0 g0 g0 g0 | g1 g1 g1 g1 | g2 ... ]        samples in launch order
    global batch    consecutive samples

`swift.trainers.micro_batches` cuts a global batch over the ranks and into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from swift.types import RolloutGroup


@dataclass(slots=True)
class TrainSample:
    """One completion as the trainer sees it.

    token_ids: int32 [T]. sampler_logprobs: float32 [T]. trained: bool [T], the data mask m: what may carry loss.
    versions: of the weights that sampled the tokens, run-length coded as (version, start, end).
    `old_logprobs` and `ref_logprobs`, float32 [T], are None until a forward pass has produced them.
    token_advantages: float32 [T] where tokens have advantages of their own; `advantage` is their mean then.
    """

    group: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    sampler_logprobs: np.ndarray
    trained: np.ndarray
    advantage: float
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    token_advantages: np.ndarray | None = None

    @property
    def has_advantage(self) -> bool:
        if self.token_advantages is None:
            return self.advantage != 0.0
        return bool(self.token_advantages[self.trained].any())

    @property
    def num_trained(self) -> int:
        """T_i of the papers: tokens under the data mask."""
        return int(self.trained.sum())


@dataclass(frozen=True, slots=True)
class Arrival:
    """Samples of a rollout batch that have arrived, as indexes; `last` of them all."""

    samples: range
    last: bool


@dataclass(slots=True)
class RolloutBatch:
    """The samples of one round and how far training has come with them.

    `position` counts the optimizer steps taken on it, of `num_global_batches * num_iterations`. A batch that is trained
    on while it is sampled hands out its samples by `arriving`, an iterator of `Arrival` that adds them to `samples`;
    until its end it holds a part of its samples only. It is used up in the first step, before any checkpoint.
    `references` are answers whose cross-entropy is part of the loss.
    """

    samples: list[TrainSample]
    num_global_batches: int
    num_iterations: int
    position: int = 0
    arriving: Any = None
    references: list[TrainSample] = field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        return self.position >= self.updates_per_rollout

    @property
    def global_batch_index(self) -> int:
        """Which global batch the next step trains on."""
        return self.position % self.num_global_batches

    @property
    def updates_per_rollout(self) -> int:
        """U: optimizer steps that it feeds."""
        return self.num_global_batches * self.num_iterations

    def global_batch(self, index: int) -> range:
        size = len(self.samples) // self.num_global_batches
        return range(index * size, (index + 1) * size)


class TrainerScores(Protocol):
    """What scores groups with passes of the trainer's own models, after reward functions have."""

    def score(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Add to their scores; collective. Returns metrics."""
        ...

    def reference_samples(self, groups: Sequence[RolloutGroup]) -> list[TrainSample]:
        """`RolloutBatch.references`."""
        ...
