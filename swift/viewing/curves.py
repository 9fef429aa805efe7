"""logging.jsonl by metric, as it grows, and what is marked beside its curves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from swift.observability.curves import ALERTS, LOGGING
from swift.observability.jsonl import read_jsonl, read_log
from swift.observability.run_dir import ATTEMPTS
from swift.viewing.columns import Column, current
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
        self._steps, self._attempts = Column(np.int64), Column(np.int64)
        self._values: dict[str, Column] = {}
        self._count = self.unreadable = 0

    def refresh(self) -> Iterator[None]:
        """Read what is new, a block of lines a step."""
        if self.tail.replaced():
            self._empty()
        for _, data in self.tail.blocks():
            rows = [row for line in data.split(b"\n") if line.strip() and (row := self._read(line)) is not None]
            with self._lock:
                self._append(rows)
            yield

    def _read(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = msgspec.json.decode(line)
            if min(row["step"], row["attempt"]) >= 0:
                return dict(row)
        except (ValueError, KeyError, TypeError):  # no JSON, or not of swift
            pass
        self.unreadable += 1
        return None

    def _append(self, rows: list[dict[str, Any]]) -> None:
        self._steps.put(self._count, [row["step"] for row in rows])
        self._attempts.put(self._count, [row["attempt"] for row in rows])
        values: dict[str, tuple[list[int], list[float]]] = {}
        for number, row in enumerate(rows, start=self._count):
            for key, value in row.items():
                if isinstance(value, int | float) and key not in ("step", "attempt", "max_steps"):
                    places, numbers = values.setdefault(key, ([], []))
                    places.append(number)
                    numbers.append(value)
        self._count += len(rows)
        for key, (places, numbers) in values.items():
            self._values.setdefault(key, Column(np.float64, np.nan)).view(self._count)[places] = numbers

    @property
    def keys(self) -> list[str]:
        """The metrics that were logged."""
        return list(self._values)

    @property
    def last_step(self) -> int | None:
        """The greatest step."""
        return int(self._steps.view(self._count).max()) if self._count else None

    def series(self, key: str, first: float = -np.inf, last: float = np.inf) -> tuple[list[int], list[float]]:
        """Steps and values of a metric from the step `first` to `last`, ascending; [] where there are none."""
        if key not in self._values:
            return [], []
        with self._lock:
            steps, values = self._steps.view(self._count), self._values[key].view(self._count)
            attempts = self._attempts.view(self._count)
        wanted = ~np.isnan(values) & (steps >= first) & (steps <= last) & current(steps, attempts)
        rows = np.flatnonzero(wanted)
        return _thinned(*(column[rows[np.argsort(steps[rows], kind="stable")]] for column in (steps, values)))

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


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[list[int], list[float]]:
    """At most about `POINTS` points: the ends, and of each interval those with the least and the greatest value."""
    if len(steps) > POINTS:
        bounds = np.linspace(0, len(steps), POINTS // 2 + 1).astype(int)
        extremes = {a + find(values[a:b]) for a, b in itertools.pairwise(bounds) for find in (np.argmin, np.argmax)}
        kept = sorted(extremes | {0, len(steps) - 1})
        steps, values = steps[kept], values[kept]
    return steps.tolist(), values.tolist()
