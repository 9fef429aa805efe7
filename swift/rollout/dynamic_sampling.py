"""Dynamic sampling (DAPO, arXiv:2503.14476): which groups of a batch are sampled, replaced, trained on, carried over.

A batch wants Q informative groups. It begins with the groups that the batch before carried over and launches enough new
ones to fill the rest, by the share of groups that were informative lately:

    first launches   ceil(W / rate + 1.5 * sqrt(W * (1 - rate)) / rate),   W = Q - carried
    rate             an average kept within [1/2, 1] and frozen for the batch

W / rate launches suffice on average only; in nearly every second batch they would fall short, and one late replacement
costs as long as the longest completion. The second term is one and a half standard deviations of the launches needed,
so shortage becomes rare. Surplus groups are not lost: they are carried, and fewer are launched next time. More
deviations mean shorter rounds and older groups.

A zero-variance group is dropped as soon as it is scored, and a new prompt takes its place at once while
kept + in flight < Q - carried and the budget of Q * (1 + max_resample_times) launches lasts. When nothing is in flight
the kept groups are sorted by launch index: the first ones are trained, the rest is carried over. If the budget is
spent, zero-variance groups fill the gap, in launch order.

The filter looks at the launch index and the reward variance only, never at arrival, length or age. So the result does
not depend on the order in which groups finish, and there is no length bias. As the rate is at least 1/2, hardly ever
more than Q groups are carried, and each waits one batch (two at most, when nearly all groups suddenly are informative).
Pure: no engine, clock or thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RATE_FLOOR = 0.5
"""Below this, launching ahead would carry more than a batch over."""
MARGIN = 1.5
"""Standard deviations of the launches needed that are launched beyond their mean."""
RATE_MEMORY = 0.8
"""Weight of the past in the moving average of the informative share."""


def updated_rate(rate: float, informative: int, launched: int) -> float:
    """The moving average of the informative share after a batch; one that launched nothing changes nothing."""
    return RATE_MEMORY * rate + (1 - RATE_MEMORY) * informative / launched if launched else rate


@dataclass(frozen=True, slots=True)
class Selection:
    """How the launches of a batch ended; launch indexes in ascending order, each in exactly one list.

    trained: kept and wanted. filled: zero-variance groups trained because the budget is spent. carried: kept, for the
    next batch. dropped: zero-variance groups.
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
        """Whether the batch ends short of informative groups."""
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
        """How it ended."""
        assert self.complete, f"{self.in_flight} groups in flight, {self.due()} due"
        kept, dropped = sorted(self._kept), sorted(self._zero_variance)
        gap = max(0, self.wanted - len(kept))
        return Selection(
            trained=tuple(kept[: self.wanted]),
            filled=tuple(dropped[:gap]),
            carried=tuple(kept[self.wanted :]),
            dropped=tuple(dropped[gap:]),
        )
