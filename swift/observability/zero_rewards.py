"""Reward functions that are 0 from the start: two completions, their columns and what was read from them, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.errors import counted
from swift.observability.completions_log import shortened
from swift.plugin.registry import judging
from swift.types import EXTRACTED

ENOUGH = 64
"""Training completions after which the functions are judged, once in a run."""

SHOWN = 2
COLUMN_CHARS, TEXT_CHARS = 100, 300


class ZeroRewards:
    """Counts the training completions of this start, until `ENOUGH` have a value of some function.

    path: completions.jsonl of the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: Counter[str] = Counter()
        self._rewarded: set[str] = judging("penalty")
        self._read: Counter[str] = Counter()  # completions from which a function has read an answer
        self._rows = self._cut = 0
        self._ended = False

    def update(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The lines to print after a round, with rows of completions.jsonl; most often none."""
        if self._ended:
            return []
        for row in rows:
            self._values.update(name for name, value in row["rewards"].items() if value is not None)
            self._rewarded.update(name for name, value in row["rewards"].items() if value)
            self._read.update(name for name, value in row["columns"].items() if value and name.endswith(EXTRACTED))
            self._rows, self._cut = self._rows + 1, self._cut + (row["finish_reason"] == "length")
        self._ended = any(count >= ENOUGH for count in self._values.values())
        names = [name for name in self._values if name not in self._rewarded] if self._ended else []
        return list(self._report(names, rows)) if names else []

    def _report(self, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        cut = f"; {self._cut} of them end at --max_completion_length" if self._cut else ""
        yield f"{' and '.join(names)}: 0 for each of the first {counted(self._rows, 'completion')}{cut}. Two of them:"
        whole = sorted(rows, key=lambda row: row["finish_reason"] == "length")  # stable: as sampled
        one_a_prompt = {row["prompt_id"]: row for row in reversed(whole)}
        for row in [row for row in whole if row is one_a_prompt[row["prompt_id"]]][:SHOWN]:
            columns = {name: value for name, value in row["columns"].items() if not name.endswith(EXTRACTED)}
            yield f"  prompt     {shortened(row['prompt'], TEXT_CHARS)!r}"
            yield f"  completion {shortened(row['completion'], TEXT_CHARS)!r}"
            shown = (f"{name} {shortened(str(value), COLUMN_CHARS)!r}" for name, value in columns.items())
            yield f"  columns    {', '.join(shown) or 'none'}"
            for name in names:
                if (column := f"{name}{EXTRACTED}") in row["columns"]:
                    answer = row["columns"][column]
                    of = f"{self._read[column]} of {self._rows} completions have an answer for it"
                    yield f"  {name} read {'nothing' if answer is None else repr(answer)}; {of}"
        tested = f"swift reward-test --reward_funcs {' '.join(names)} --completions {self._path}"
        yield f"  `{tested}` scores the completions again"
