"""A run ends of which too many samples take no part in training."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from swift.errors import EngineError
from swift.types import RolloutGroup

BATCHES = 20
"""Rollout batches over which the share counts."""
FIRST_SAMPLES = 32
"""If so many samples are excluded before any other, the run ends."""
SHOWN = 3
"""Reasons in the message."""


def reasons_of(groups: Sequence[RolloutGroup]) -> Counter[str]:
    """How many samples are excluded for each reason, without what tells one environment from another."""
    excluded = (reason for group in groups if group.scores is not None for reason in group.scores.excluded)
    return Counter(reason.removeprefix("environment: ") for reason in excluded if reason is not None)


def exclusion_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`health/excluded_samples`, and `health/excluded/<reason>` for each reason there is."""
    reasons = reasons_of(groups)
    metrics = {"health/excluded_samples": float(reasons.total())}
    return metrics | {f"health/excluded/{reason.replace(': ', '/')}": float(count) for reason, count in reasons.items()}


class ExclusionLimit:
    """Ends a run of which too many samples are excluded.

    All of the first `FIRST_SAMPLES`, or more than a share of those of the last `BATCHES` rollout batches. A share of 1
    ends none.

    The count begins anew when a run is resumed.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._batches: deque[tuple[int, Counter[str]]] = deque(maxlen=BATCHES)
        self._worked = most >= 1  # a sample was not excluded

    def add(self, num_samples: int, reasons: Mapping[str, int]) -> None:
        """Count a rollout batch, with the groups that dynamic sampling dropped.

        Raises EngineError, with the most frequent reasons.
        """
        self._batches.append((num_samples, Counter(reasons)))
        total = sum(count for count, _ in self._batches)
        excluded = sum((found for _, found in self._batches), Counter[str]())
        self._worked = self._worked or excluded.total() < total
        if not self._worked and total >= FIRST_SAMPLES:
            which = f"all of the first {total} samples"
        elif len(self._batches) == BATCHES and excluded.total() > self.most * total:
            which = f"{excluded.total()} of {total} samples of the last {BATCHES} rollout batches"
        else:
            return
        shown = ", ".join(f"{reason} ({count})" for reason, count in excluded.most_common(SHOWN))
        raise EngineError(
            f"--max_excluded_frac: {self.most:g}: {which} are excluded, mostly: {shown}; correct the cause, or raise it"
        )
