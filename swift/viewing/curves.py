"""logging.jsonl by metric, as it grows, and what is marked beside its curves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from swift.observability.curves import ALERTS, LOGGING
from swift.observability.jsonl import read_jsonl, read_log
from swift.observability.run_dir import ATTEMPTS
from swift.viewing.tail import Tail

POINTS = 1500
"""More points of a curve are thinned out: of each interval those with the least and the greatest value stay."""


class Log:
    """The rows of logging.jsonl; `refresh` reads what is new.

    Of a step that a later attempt logged again, that attempt's rows count, as in `read_log`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tail = Tail(folder / LOGGING)
        self._lock = threading.Lock()
        self._empty()

    def _empty(self) -> None:
        self._steps: list[int] = []
        self._attempts: list[int] = []
        self._values: dict[str, tuple[list[int], list[float]]] = {}
        self.newest: dict[int, int] = {}
        self.unreadable = 0

    def refresh(self) -> Iterator[None]:
        """Read what is new, a block of lines a step."""
        if self.tail.replaced():
            self._empty()
        for _, data in self.tail.blocks():
            with self._lock:
                for line in data.splitlines():
                    self._add(line)
            yield

    def _add(self, line: bytes) -> None:
        try:
            row = msgspec.json.decode(line)
            step, attempt = int(row["step"]), int(row["attempt"])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            self.unreadable += bool(line.strip())
            return
        number = len(self._steps)
        for key, value in row.items():
            if isinstance(value, int | float) and key not in ("step", "attempt", "max_steps"):
                rows, values = self._values.setdefault(key, ([], []))
                values.append(float(value))
                rows.append(number)
        self.newest[step] = max(attempt, self.newest.get(step, 0))
        self._attempts.append(attempt)
        self._steps.append(step)

    @property
    def keys(self) -> list[str]:
        """The metrics that were logged."""
        return list(self._values)

    @property
    def last_step(self) -> int | None:
        """The greatest step."""
        return max(self.newest, default=None)

    def series(self, key: str, first: float = -np.inf, last: float = np.inf) -> tuple[list[int], list[float]]:
        """Steps and values of a metric from the step `first` to `last`, ascending; [] where there are none."""
        with self._lock:
            rows, values = self._values.get(key, ([], []))
            steps = [self._steps[row] for row in rows]
            counts = [self._attempts[row] == self.newest[step] for row, step in zip(rows, steps, strict=True)]
            points = [
                (step, value)
                for step, value, current in zip(steps, values, counts, strict=True)
                if current and first <= step <= last
            ]
        points.sort(key=lambda point: point[0])
        return _thinned([step for step, _ in points], [value for _, value in points])

    def marks(self) -> list[dict[str, Any]]:
        """Starts after the first, checkpoints and alerts, each with its `kind`, `step` and `text`, by step."""
        found = [
            {"kind": "restart", "step": row["start_step"], "text": _started(row)}
            for row in read_jsonl(self.folder / ATTEMPTS)
            if row["attempt"] > 1
        ]
        names = (path.name.partition("-")[2] for path in self.folder.glob("checkpoint-*"))
        found += [{"kind": "checkpoint", "step": int(name), "text": "saved"} for name in names if name.isdecimal()]
        found += [
            {"kind": "alert", "step": row["step"], "text": f"{row['rule']}: {row['sentence']}"}
            for row in read_log(self.folder / ALERTS)
        ]
        return sorted(found, key=lambda mark: mark["step"])


def _started(row: dict[str, Any]) -> str:
    changed = ", ".join(f"{name} {then} -> {now}" for name, (then, now) in row.get("changed", {}).items())
    return f"attempt {row['attempt']}{': ' if changed else ''}{changed}"


def _thinned(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """At most about `POINTS` points: of each interval those with the least and the greatest value."""
    if len(steps) <= POINTS:
        return steps, values
    array = np.array(values)
    bounds = np.linspace(0, len(steps), POINTS // 2 + 1).astype(int)
    kept: Sequence[int] = sorted(
        {int(a + find(array[a:b])) for a, b in itertools.pairwise(bounds) for find in (np.argmin, np.argmax)}
        | {0, len(steps) - 1}
    )
    return [steps[number] for number in kept], [values[number] for number in kept]
