"""Dynamic sampling (DAPO, arXiv:2503.14476): groups of a batch that are sampled, replaced, trained on, carried over.

A batch needs Q informative groups. It begins with the groups carried over from the last batch, and launches enough new
ones for the rest, given the recent share of informative groups:

    first launches   ceil(W / rate + 1.5 * sqrt(W * (1 - rate)) / rate),   W = Q - carried
    rate             a moving average, clamped to [1/2, 1] and constant during the batch

W / rate launches suffice on average only: in nearly half of the batches they would not, and a late replacement takes as
long as the longest completion. The second term is 1.5 standard deviations of the launches needed, so that shortage is
rare. Surplus groups are carried over, and the next batch launches fewer. A larger margin gives shorter rounds and older
groups.

A zero-variance group is dropped as soon as it is scored. A new prompt replaces it at once, while kept + in flight < Q -
carried and within the budget of Q * (1 + max_resample_times) launches. When nothing is in flight the kept groups are
sorted by launch index: the first ones are trained on, the others carried over. If the budget is exhausted,
zero-variance groups fill the gap, in launch order.

The filter depends on launch index and reward variance only, not on arrival, length or age. So the result does not
depend on the order in which groups finish, and there is no length bias. As the rate is at least 1/2, more than Q groups
are rarely carried, over one batch as a rule (two at most, if nearly all groups become informative).
Pure: no engine, clock or thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RATE_FLOOR = 0.5
"""Minimum of the rate; with a lower one more than a batch could be carried over."""
MARGIN = 1.5
"""Launches beyond the mean number needed, in standard deviations."""
RATE_MEMORY = 0.8
"""Decay of the moving average of the informative share."""


def updated_rate(rate: float, informative: int, launched: int) -> float:
    """The moving average of the informative share after a batch; unchanged by a batch without launches."""
    return RATE_MEMORY * rate + (1 - RATE_MEMORY) * informative / launched if launched else rate


@dataclass(frozen=True, slots=True)
class Selection:
    """Result of the launches of a batch: launch indexes in ascending order, each in exactly one list.

    trained: informative groups of this batch. filled: zero-variance groups that are trained on because the budget is
    exhausted. carried: informative groups for the next batch. dropped: zero-variance groups.
    """

    trained: tuple[int, ...] = ()
    filled: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class GroupFilter:
    """One batch of dynamic sampling.

    Args:
        quota: Q, groups that the batch trains on.
        carried: groups of the batch before that it begins with, at most Q.
        max_resample_times: extra launches that may be spent, in multiples of Q.
        rate: expected share of informative groups, taken within [1/2, 1]; 1 launches no more than is wanted.

    Example, with informative groups 0, 2, 5, 6, 7, ... and Q = 4:
        rate 1 launches 4, then 3 for the zero-variance groups, and trains 0, 2, 5, 6; rate 1/2 launches 12 at once,
        trains the same and carries the others.
    """

    def __init__(self, *, quota: int, carried: int = 0, max_resample_times: int = 3, rate: float = 1.0) -> None:
        self.wanted = quota - carried
        self.budget = quota * (1 + max_resample_times)
        rate = min(1.0, max(RATE_FLOOR, rate))
        needed = self.wanted / rate + MARGIN * math.sqrt(self.wanted * (1 - rate)) / rate
        most = self.wanted + 2 * quota  # no more than two batches are ever carried
        self._first = min(self.budget, most, math.ceil(needed - 1e-9))
        self._launched: set[int] = set()
        self._kept: set[int] = set()
        self._zero_variance: set[int] = set()

    @property
    def launched(self) -> int:
        return len(self._launched)

    @property
    def informative(self) -> int:
        return len(self._kept)

    @property
    def in_flight(self) -> int:
        return self.launched - len(self._kept) - len(self._zero_variance)

    @property
    def budget_exhausted(self) -> bool:
        """Whether the batch has ended with too few informative groups."""
        return self.complete and len(self._kept) < self.wanted

    def due(self) -> int:
        if not self._launched:
            return self._first
        return max(0, min(self.wanted - len(self._kept) - self.in_flight, self.budget - self.launched))

    def launch(self, index: int) -> None:
        self._launched.add(index)

    def scored(self, index: int, *, informative: bool) -> None:
        (self._kept if informative else self._zero_variance).add(index)

    @property
    def complete(self) -> bool:
        """Whether nothing is in flight and nothing will be launched."""
        return not self.in_flight and not self.due()

    def selection(self) -> Selection:
        """Result of a complete batch."""
        assert self.complete, f"{self.in_flight} groups in flight, {self.due()} due"
        kept, dropped = sorted(self._kept), sorted(self._zero_variance)
        gap = max(0, self.wanted - len(kept))
        return Selection(
            trained=tuple(kept[: self.wanted]),
            filled=tuple(dropped[:gap]),
            carried=tuple(kept[self.wanted :]),
            dropped=tuple(dropped[gap:]),
        )
