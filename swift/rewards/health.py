"""What users are told about rewards that fail, and when a run must stop for them.

Every kind of failure is explained once per function, with an example, and counted ever after. A function
that fails on every sample of `MAX_FAILED_BATCHES` generation batches in a row ends the run; totals that
are equal for `CONSTANT_BATCHES` batches earn a warning with the cause.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from swift.errors import RewardError
from swift.types import GroupScores, RolloutGroup

logger = logging.getLogger("swift.rewards")

MAX_FAILED_BATCHES = 3
CONSTANT_BATCHES = 20


@dataclass
class GroupRecord:
    """What happened while a group was scored; kept until its metrics are read.

    Per function name: `failed` and `timed_out` samples, `seconds` of calls. `counters` holds what the
    functions counted (ground truths).
    """

    num_samples: int
    scores: GroupScores | None = None
    failed: dict[str, int] = field(default_factory=dict)
    timed_out: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class _Behaviour:
    """What one function returned since its values last varied."""

    low: float = math.inf
    high: float = -math.inf
    none: int = 0
    samples: int = 0

    def add(self, values: Sequence[float | None]) -> None:
        present = [value for value in values if value is not None]
        self.low = min([self.low, *present])
        self.high = max([self.high, *present])
        self.none += len(values) - len(present)
        self.samples += len(values)

    def describe(self, name: str) -> str:
        share = f"None on {self.none / max(self.samples, 1):.0%} of {self.samples} samples"
        if self.low > self.high:
            return f"{name}: no value at all, {share}"
        if self.low == self.high:
            return f"{name}: constant {self.low:g}, {share}"
        return f"{name}: between {self.low:g} and {self.high:g}, {share}"


class RewardHealth:
    """Counts, warns and stops; see the module's docstring.

    Args:
        names: of functions and models, in the order of the score columns.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._told: set[tuple[str, str]] = set()
        self._pending: list[tuple[str, str, str, str, int]] = []
        self._failed_batches = dict.fromkeys(names, 0)
        self._constant_batches = 0
        self._behaviour = {name: _Behaviour() for name in names}
        self._counters: dict[str, int] = {}

    def sample_failed(self, name: str, kind: str, detail: str, group: RolloutGroup, sample: int) -> None:
        """Notes a sample without a value; explained when its group is done, so that shares are known."""
        self._pending.append((name, kind, detail, group.group_id, sample))

    def group_done(self, group: RolloutGroup, record: GroupRecord) -> None:
        """Explains new kinds of failure of a finished group."""
        mine = [item for item in self._pending if item[3] == group.group_id]
        self._pending = [item for item in self._pending if item[3] != group.group_id]
        for name, kind, detail, _, _ in mine:
            key = (name, f"{kind} {detail.split(':')[0]}" if kind == "exception" else kind)
            if key in self._told:
                continue
            self._told.add(key)
            count = sum(1 for item in mine if item[0] == name)
            logger.warning(
                "warning: reward function %s: %s: %s; excluded %d of %d completions of prompt_id %s "
                "(this kind is counted from now on: health/reward_failed/%s)",
                name,
                kind,
                detail,
                count,
                record.num_samples,
                group.prompt.prompt_id,
                name,
            )

    def truth_problem(self, counter: str, group: RolloutGroup) -> None:
        """Warns once per kind about a ground truth that is missing or no mathematics."""
        if (counter, "") in self._told:
            return
        self._told.add((counter, ""))
        solution = str(group.prompt.columns.get("solution"))[:200]
        effect = "compared as a string" if counter == "gold_unparsed" else "scored 0.0"
        logger.warning(
            "warning: %s: prompt_id %s: solution %r: %s (counted in health/%s)",
            counter.replace("gold_", "ground truth "),
            group.prompt.prompt_id,
            solution,
            effect,
            counter,
        )

    def end_batch(self, records: Sequence[GroupRecord]) -> None:
        """Checks one generation batch.

        Raises:
            RewardError: naming every function that failed on all samples of the last batches.
        """
        samples = sum(record.num_samples for record in records)
        if samples == 0:
            return
        dead = []
        for name in self._names:
            failed = sum(record.failed.get(name, 0) for record in records)
            self._failed_batches[name] = self._failed_batches[name] + 1 if failed == samples else 0
            if self._failed_batches[name] >= MAX_FAILED_BATCHES:
                dead.append(name)
        self._watch_constant(records)
        if dead:
            raise RewardError(
                *(
                    f"--reward_funcs: {name}: failed on every sample of {MAX_FAILED_BATCHES} generation "
                    f"batches in a row; the exceptions are in logs/ of the run"
                    for name in dead
                )
            )

    def _watch_constant(self, records: Sequence[GroupRecord]) -> None:
        scores = [record.scores for record in records if record.scores is not None]
        if any(_has_signal(group) for group in scores):
            self._constant_batches = 0
            self._behaviour = {name: _Behaviour() for name in self._names}
            self._counters = {}
            return
        self._constant_batches += 1
        for column, name in enumerate(self._names):
            self._behaviour[name].add([row[column] for group in scores for row in group.values])
        for record in records:
            for counter, count in record.counters.items():
                self._counters[counter] = self._counters.get(counter, 0) + count
        if self._constant_batches == CONSTANT_BATCHES:
            logger.warning(
                "warning: all rewards of every group are equal since %d batches, so nothing is learned: %s",
                CONSTANT_BATCHES,
                "; ".join(self.diagnosis()),
            )

    def diagnosis(self) -> list[str]:
        """One line per function, and the counters of ground truths, since rewards last varied inside a group."""
        lines = [self._behaviour[name].describe(name) for name in self._names]
        return lines + [f"{counter} {count}" for counter, count in sorted(self._counters.items())]


def _has_signal(scores: GroupScores) -> bool:
    """Whether two samples that take part differ in any function."""
    rows = {tuple(row) for row, reason in zip(scores.values, scores.excluded, strict=True) if reason is None}
    return len(rows) > 1
