"""Replay buffer: groups of high scores that replace zero-variance groups of later batches.

An entry has the sampled data: token ids, sampler log-probs, policy versions, and the advantages as trained on. Data
that depends on the current policy (old and reference log-probs, correction weights, token counts) is recomputed when an
entry is used.

    score of a group = sum_i |A_i| * sum_k s_k        s_k: standard deviation of reward function k in the group

The buffer keeps the entries of the highest scores (of equal ones the newest). Entries are drawn in proportion to their
scores, without replacement, and removed `max_age` optimizer steps after they were stored, which bounds the number of
uses. A batch draws before it stores, so that it never draws its own groups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swift.rollout.samples import TrainSample


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    """A group as it was trained on. number: index of the entry in the run. step: optimizer steps done when stored."""

    number: int
    group_id: str
    step: int
    score: float
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class ReplayState:
    """State of a buffer in a checkpoint. stored, draws: number of entries stored, and of draws, since the start."""

    entries: list[ReplayEntry]
    stored: int
    draws: int


class ReplayBuffer:
    """At most `size` groups, each for `max_age` optimizer steps.

    Draws depend on `seed` and on the number of the draw only. recompute: whether old log-probs are recomputed; if not,
    the sampler's are used, so that the ratio compares with the policy that sampled the entry.
    """

    def __init__(self, size: int, *, max_age: int, seed: int, recompute: bool = True) -> None:
        self.size, self.max_age, self.seed, self.recompute = size, max_age, seed, recompute
        self._entries: list[ReplayEntry] = []
        self._stored = 0
        self._draws = 0

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, group_id: str, step: int, score: float, samples: Sequence[TrainSample]) -> None:
        """Keep a group if its score is positive and among the highest."""
        if not score > 0:
            return
        kept = tuple(replace(sample, old_logprobs=None, ref_logprobs=None) for sample in samples)
        self._entries.append(ReplayEntry(self._stored, group_id, step, score, kept))
        self._stored += 1
        if len(self._entries) > self.size:
            self._entries.remove(min(self._entries, key=lambda entry: (entry.score, entry.number)))

    def draw(self, count: int, step: int, *, without: Collection[str] = ()) -> list[ReplayEntry]:
        """Up to `count` entries, none of them older than `max_age` at `step` or of a group in `without`."""
        self._entries = [entry for entry in self._entries if step - entry.step <= self.max_age]
        candidates = [entry for entry in self._entries if entry.group_id not in without]
        count = min(count, len(candidates))
        if not count:
            return []
        scores = np.array([entry.score for entry in candidates], dtype=np.float64)
        generator = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, self._draws]))
        self._draws += 1
        # exponential race: the smallest arrival times of rates `score` are a draw without replacement
        arrivals = np.log(generator.exponential(size=len(candidates))) - np.log(scores)
        return [candidates[i] for i in np.argsort(arrivals, kind="stable")[:count]]

    def samples_of(self, entry: ReplayEntry, group: int) -> list[TrainSample]:
        """Copies of an entry's samples for training, as group number `group` of a rollout batch."""
        old = [None if self.recompute else sample.sampler_logprobs for sample in entry.samples]
        return [
            replace(sample, group=group, old_logprobs=logprobs, versions=list(sample.versions))
            for sample, logprobs in zip(entry.samples, old, strict=True)
        ]

    def state(self) -> ReplayState:
        return ReplayState(list(self._entries), self._stored, self._draws)

    def load(self, state: ReplayState) -> None:
        """Continue after `state`; if the buffer is smaller now, the entries of the highest scores stay."""
        self._stored, self._draws = state.stored, state.draws
        best = sorted(state.entries, key=lambda entry: (entry.score, entry.number), reverse=True)[: self.size]
        self._entries = sorted(best, key=lambda entry: entry.number)
