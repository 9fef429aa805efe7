"""Replay buffer: groups of high scores, kept for a while to stand in for zero-variance groups.

What is stored is what was sampled: token ids, the sampler's log-probs, the versions of the weights, and the advantages
as trained on. Everything that depends on the policy of now (old and reference log-probs, correction weights, token
counts) is computed anew when an entry is used.

    score of a group = sum_i |A_i| * sum_k s_k        s_k: standard deviation of reward function k in the group

The buffer keeps the entries of the highest scores (of equal ones the newest). Entries are drawn in proportion to their
scores, without replacement, and forgotten `max_age` optimizer steps after they were stored: that bounds how often one
can be used. A group is never drawn for the batch that stored it, because a batch draws before it stores.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swift.rollout.samples import TrainSample


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    """A group as it was trained on. number: counts the entries of the run; step: optimizer steps done when stored."""

    number: int
    group_id: str
    step: int
    score: float
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class ReplayState:
    """What a checkpoint holds of a buffer: its entries, and how many were ever stored and drawn."""

    entries: list[ReplayEntry]
    stored: int
    draws: int


class ReplayBuffer:
    """At most `size` groups, each for `max_age` optimizer steps.

    Draws depend on `seed` and on the number of the draw only. recompute: whether old log-probs are computed anew;
    otherwise the sampler's stand in for them, so that the ratio spans the whole age of the sample.
    """

    def __init__(self, size: int, *, max_age: int, seed: int, recompute: bool = True) -> None:
        self.size, self.max_age, self.seed, self.recompute = size, max_age, seed, recompute
        self._entries: list[ReplayEntry] = []
        self._stored = 0
        self._draws = 0

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, group_id: str, step: int, score: float, samples: Sequence[TrainSample]) -> None:
        """Keep a group if its score is among the highest; one without a positive score never is."""
        if not score > 0:
            return
        kept = tuple(replace(one, old_logprobs=None, ref_logprobs=None) for one in samples)
        self._entries.append(ReplayEntry(self._stored, group_id, step, score, kept))
        self._stored += 1
        if len(self._entries) > self.size:
            self._entries.remove(min(self._entries, key=lambda one: (one.score, one.number)))

    def draw(self, count: int, step: int, *, without: Collection[str] = ()) -> list[ReplayEntry]:
        """Up to `count` entries, none of them older than `max_age` at `step` or of a group in `without`."""
        self._entries = [one for one in self._entries if step - one.step <= self.max_age]
        candidates = [one for one in self._entries if one.group_id not in without]
        count = min(count, len(candidates))
        if not count:
            return []
        scores = np.array([one.score for one in candidates], dtype=np.float64)
        generator = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, self._draws]))
        self._draws += 1
        # exponential race: the smallest arrival times of rates `score` are a draw without replacement
        arrivals = np.log(generator.exponential(size=len(candidates))) - np.log(scores)
        return [candidates[i] for i in np.argsort(arrivals, kind="stable")[:count]]

    def samples_of(self, entry: ReplayEntry, group: int) -> list[TrainSample]:
        """Copies of an entry's samples, to be trained on as group number `group` of a rollout batch."""
        old = [None if self.recompute else one.sampler_logprobs for one in entry.samples]
        return [
            replace(one, group=group, old_logprobs=logprobs, versions=list(one.versions))
            for one, logprobs in zip(entry.samples, old, strict=True)
        ]

    def state(self) -> ReplayState:
        return ReplayState(list(self._entries), self._stored, self._draws)

    def load(self, state: ReplayState) -> None:
        """Continue after `state`; of more entries than fit now the best stay."""
        self._stored, self._draws = state.stored, state.draws
        best = sorted(state.entries, key=lambda one: (one.score, one.number), reverse=True)[: self.size]
        self._entries = sorted(best, key=lambda one: one.number)
