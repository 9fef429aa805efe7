"""Warnings about rewards that fail, and the limit at which failures end a run.

Each kind of failure is logged once per function, with an example, and counted from then on. A function that fails on
every sample of `MAX_FAILED_BATCHES` generation batches in a row ends the run. `diagnosis` describes what the functions
returned since rewards last varied inside a group.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swift.errors import RewardError, join_problems
from swift.types import Completion, GroupScores, Prompt, RolloutGroup

logger = logging.getLogger("swift.rewards")

MAX_FAILED_BATCHES = 3


class Failure(NamedTuple):
    """A sample without a value of the function `name`."""

    sample: int
    name: str
    kind: str
    detail: str


@dataclass
class GroupRecord:
    """Scores, failures and measurements of one group; kept until its metrics are read.

    `seconds` of calls per function name. `counters` are those of the functions (ground truths). `columns` (per
    sample) and `metrics` are what they logged.
    """

    scores: GroupScores
    failures: list[Failure] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counters: Counter[str] = field(default_factory=Counter)
    columns: defaultdict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class _ReturnedValues:
    """Range of what one function returned since rewards last varied."""

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
    """Counts, warns and stops. names: of functions and models, in the order of the score columns."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._logged: set[tuple[str, str]] = set()
        self._failed_batches = dict.fromkeys(names, 0)
        self._returned = {name: _ReturnedValues() for name in names}
        self._counters: Counter[str] = Counter()

    def group_done(self, group: RolloutGroup, record: GroupRecord) -> None:
        """Warns of each new kind of failure, and of ground truths that are missing or cannot be parsed."""
        prompt = group.prompt
        for sample, name, kind, detail in record.failures:
            if self._is_new(name, f"{kind} {detail.split(':')[0]}" if kind == "exception" else kind):
                logger.warning(
                    "warning: reward function %s: %s: %s; excluded %d of %d completions of prompt_id %s, the first: %s "
                    "(this kind is counted from now on: health/reward_failed/%s)",
                    name,
                    kind,
                    detail,
                    sum(failure.name == name for failure in record.failures),
                    len(record.scores.values),
                    prompt.prompt_id,
                    _shown(prompt, group.completions[sample]),
                    name,
                )
        for counter in record.counters:
            if self._is_new(counter, ""):
                logger.warning(
                    "warning: %s: prompt_id %s: solution %r: %s (counted in health/%s)",
                    counter.replace("gold_", "ground truth "),
                    prompt.prompt_id,
                    str(prompt.columns.get("solution"))[:200],
                    "compared as a string" if counter == "gold_unparsed" else "scored 0.0",
                    counter,
                )

    def _is_new(self, subject: str, kind: str) -> bool:
        new = (subject, kind) not in self._logged
        self._logged.add((subject, kind))
        return new

    def end_batch(self, records: Sequence[GroupRecord]) -> None:
        """Checks one generation batch.

        Raises:
            RewardError: functions failed on all samples of the last `MAX_FAILED_BATCHES` batches; names them.
        """
        rows = [row for record in records for row in record.scores.values]
        if not rows:
            return
        problems = []
        for name in self._names:
            failures = [failure for record in records for failure in record.failures if failure.name == name]
            self._failed_batches[name] = self._failed_batches[name] + 1 if len(failures) == len(rows) else 0
            if self._failed_batches[name] >= MAX_FAILED_BATCHES:
                problems.append(
                    f"--reward_funcs: {name}: failed on every sample of {MAX_FAILED_BATCHES} generation batches in a "
                    f"row, in the end with {failures[-1].kind}: {failures[-1].detail}; all are in logs/ of the run"
                )
        distinct = [
            {tuple(row) for row, reason in zip(scores.values, scores.excluded, strict=True) if reason is None}
            for scores in (record.scores for record in records)
        ]
        if any(len(values) > 1 for values in distinct):  # rewards vary inside a group
            self._returned = {name: _ReturnedValues() for name in self._names}
            self._counters.clear()
        else:
            for column, name in enumerate(self._names):
                self._returned[name].add([row[column] for row in rows])
            for record in records:
                self._counters.update(record.counters)
        join_problems(problems, RewardError)

    def diagnosis(self) -> list[str]:
        """One line per function, and the counters of ground truths, since rewards last varied inside a group."""
        lines = [self._returned[name].describe(name) for name in self._names]
        return lines + [f"{counter} {count}" for counter, count in sorted(self._counters.items())]


def _shown(prompt: Prompt, completion: Completion) -> str:
    """The arguments of a call, in one line."""
    values = {"completion": completion.text, **prompt.columns, **completion.columns, **completion.logged}
    return ", ".join(f"{name} {value!r:.100}" for name, value in values.items())[:400]
