"""Excluded samples, and the limit on their share at which a run stops."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from swift.errors import EngineError
from swift.types import RolloutGroup

BATCHES = 20
"""Number of rollout batches over which the share is computed."""
FIRST_SAMPLES = 32
"""Number of samples at the start of a run that stop it if all are excluded."""
SHOWN = 3
"""Maximum number of reasons in the message."""


def reasons_of(groups: Sequence[RolloutGroup]) -> Counter[str]:
    """Number of excluded samples for each reason; the prefix "environment: " is removed."""
    excluded = (reason for group in groups if group.scores is not None for reason in group.scores.excluded)
    return Counter(reason.removeprefix("environment: ") for reason in excluded if reason is not None)


@dataclass(eq=False)
class ExclusionLimit:
    """Stops a run if too many samples are excluded.

    That is all of the first `FIRST_SAMPLES` samples, or more than a share `max_frac` of the samples of the last
    `BATCHES` rollout batches. A `max_frac` of 1 never stops a run. A resumed run starts counting from zero.
    """

    max_frac: float
    _batches: deque[tuple[int, Counter[str]]] = field(default_factory=partial(deque, maxlen=BATCHES))
    _any_trained: bool = False

    def add(self, num_samples: int, reasons: Mapping[str, int]) -> None:
        """Count a rollout batch, with the groups that dynamic sampling dropped.

        Raises EngineError, with the most frequent reasons.
        """
        if self.max_frac >= 1:
            return
        self._batches.append((num_samples, Counter(reasons)))
        total = sum(count for count, _ in self._batches)
        excluded = sum((found for _, found in self._batches), Counter[str]())
        self._any_trained = self._any_trained or excluded.total() < total
        if not self._any_trained and total >= FIRST_SAMPLES:
            samples = f"all of the first {total} samples"
        elif len(self._batches) == BATCHES and excluded.total() > self.max_frac * total:
            samples = f"{excluded.total()} of {total} samples of the last {BATCHES} rollout batches"
        else:
            return
        shown = ", ".join(f"{reason} ({count})" for reason, count in excluded.most_common(SHOWN))
        raise EngineError(
            f"--max_excluded_frac: {self.max_frac:g}: {samples} are excluded, mostly: {shown}; correct the cause, "
            "or raise it"
        )
