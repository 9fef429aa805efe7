"""A run ends of which too many samples take no part in training."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from swift.errors import EngineError
from swift.types import RolloutGroup

BATCHES = 20
"""Rollout batches over which the share counts."""
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
    """Ends a run of which more than a share of the samples is excluded over the last `BATCHES` rollout batches.

    The count begins anew when a run is resumed.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._batches: deque[tuple[int, Counter[str]]] = deque(maxlen=BATCHES)

    def add(self, num_samples: int, reasons: Mapping[str, int]) -> None:
        """Count a rollout batch, with the groups that dynamic sampling dropped.

        Raises EngineError, with the most frequent reasons.
        """
        self._batches.append((num_samples, Counter(reasons)))
        total = sum(count for count, _ in self._batches)
        excluded = sum((found for _, found in self._batches), Counter[str]())
        if len(self._batches) < BATCHES or excluded.total() <= self.most * total:
            return
        shown = ", ".join(f"{reason} ({count})" for reason, count in excluded.most_common(SHOWN))
        raise EngineError(
            f"--max_excluded_frac: {self.most:g}: {excluded.total()} of {total} samples of the last {BATCHES} rollout "
            f"batches are excluded, mostly: {shown}; correct the cause, or raise it"
        )
