"""From scored groups to optimizer windows: the samples of a unit, and which of them a window holds.

A unit holds all samples of one round of generation, in launch order, the same on every rank. It feeds
`num_windows` optimizer windows, `num_iterations` times each:

    unit     [ g0 g0 g0 g0 | g1 g1 g1 g1 | g2 ... ]        samples in launch order
    window   consecutive samples

`swift.rollout.micro_batches` cuts a window over the ranks and into forward/backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class TrainSample:
    """One completion as the trainer sees it.

    token_ids: int32 [T]. sampler_logprobs: float32 [T], over the whole vocabulary where the engine knows them
    (`Completion.full_logprobs`). trained: bool [T], the data mask m: what may carry loss.
    versions: of the weights that sampled the tokens, run-length coded as (version, start, end).
    `old_logprobs` and `ref_logprobs`, float32 [T], are None until a forward pass has produced them.
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

    @property
    def num_trained(self) -> int:
        """T_i of the papers: tokens under the data mask."""
        return int(self.trained.sum())

    def tokens_of_versions(self) -> list[tuple[int, int]]:
        """(version, number of tokens that it sampled), in order."""
        return [(version, end - start) for version, start, end in self.versions]

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe copy; float32 survives the text exactly."""
        arrays = ("prompt_ids", "token_ids", "sampler_logprobs", "trained", "old_logprobs", "ref_logprobs")
        state: dict[str, Any] = {"group": self.group, "advantage": self.advantage, "versions": self.versions}
        for name in arrays:
            value = getattr(self, name)
            state[name] = None if value is None else value.tolist()
        return state

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> TrainSample:
        """The inverse of `to_json`."""

        def array(name: str, kind: type) -> Any:
            return None if state[name] is None else np.asarray(state[name], dtype=kind)

        return cls(
            group=state["group"],
            prompt_ids=array("prompt_ids", np.int32),
            token_ids=array("token_ids", np.int32),
            sampler_logprobs=array("sampler_logprobs", np.float32),
            trained=array("trained", np.bool_),
            advantage=state["advantage"],
            versions=[(version, start, end) for version, start, end in state["versions"]],
            old_logprobs=array("old_logprobs", np.float32),
            ref_logprobs=array("ref_logprobs", np.float32),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of a unit that have arrived, as indexes; `last` of them all."""

    samples: range
    last: bool


@dataclass(slots=True)
class TrainUnit:
    """The samples of one round of generation and how far training has come with them.

    `position` counts the optimizer steps taken on the unit, of `num_windows * num_iterations`. A unit that is trained
    on while it is sampled hands out its samples by `arriving`, which adds them to `samples`; until its end the unit
    holds a part of its samples only. It is used up in the first step, before any checkpoint.
    """

    samples: list[TrainSample]
    num_windows: int
    num_iterations: int
    position: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    arriving: Iterator[Part] | None = None

    @property
    def exhausted(self) -> bool:
        """Whether all steps of this unit have been taken."""
        return self.position >= self.num_windows * self.num_iterations

    @property
    def window_index(self) -> int:
        """Which window the next step trains on."""
        return self.position % self.num_windows

    @property
    def updates_per_rollout(self) -> int:
        """U: optimizer steps that this unit feeds."""
        return self.num_windows * self.num_iterations

    def window(self, index: int) -> range:
        """Sample indices of a window."""
        size = len(self.samples) // self.num_windows
        return range(index * size, (index + 1) * size)

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe copy."""
        return {
            "samples": [sample.to_json() for sample in self.samples],
            "num_windows": self.num_windows,
            "num_iterations": self.num_iterations,
            "position": self.position,
            "metrics": self.metrics,
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> TrainUnit:
        """The inverse of `to_json`."""
        return cls(**{**state, "samples": [TrainSample.from_json(sample) for sample in state["samples"]]})


def rank_slice(total: int, rank: int, world_size: int) -> range:
    """The consecutive part of `total` items that `rank` works on; parts differ by at most one item."""
    base, extra = divmod(total, world_size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (1 if rank < extra else 0))
