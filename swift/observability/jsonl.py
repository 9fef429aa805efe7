"""Files of one JSON object per line that survive a kill at any moment.

A row reaches the file in a single write at its end, so a kill tears at most the last line. The writer removes a torn
last line before it appends; the reader skips it. Floats are written with as many digits as it takes to
read the same float back; NaN and infinities, which JSON lacks, become null.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, parse_json
from swift.observability.files import writing

MAX_LINE_BYTES = 2**30
"""Longer lines are refused: swift writes none."""


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line: JSON in UTF-8, ended by a newline.

    Values that JSON does not have are converted: a number with `.item()` to the number, a set to a sorted list,
    anything else (a date, a path, a decimal) to its text.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(row), ensure_ascii=False, default=_plain)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: escaped it can be written
        return json.dumps(_finite(row), default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "item"):
        return _finite(value.item())
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def repair(path: Path) -> int:
    """Remove a last line that a kill has torn; returns the number of bytes removed, 0 if there is none."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            size = keep = len(content)
            while keep:
                start = content.rfind(b"\n", 0, keep - 1) + 1
                if _is_row(content[start:keep]):
                    break
                keep = start
        if keep < size:
            file.truncate(keep)
            os.fsync(file.fileno())
    return size - keep


def _is_row(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:  # also a UnicodeDecodeError
        return False
    return line.endswith(b"\n")


@dataclass(eq=False)
class JsonlWriter:
    """Appends rows to `path`; nothing exists on disk before the first row."""

    path: Path
    _descriptor: int | None = field(default=None, init=False)

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Append rows in one write; a full disk is a ResourceError."""
        data = b"".join(encode_row(row) for row in rows)
        with writing(self.path):
            if self._descriptor is None:
                repair(self.path)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o644)
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os.close(self._descriptor)
                self._descriptor = None  # the next write cuts off what arrived of this one
                raise

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        if self._descriptor is not None:
            with writing(self.path):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close; a later `write` opens the file again."""
        if self._descriptor is None:
            return
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            self._descriptor = None


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; none if it does not exist. A torn last line is skipped, any other is a ConfigError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if len(line) == MAX_LINE_BYTES:
                raise ConfigError(f"{path}:{number}: a line of over {MAX_LINE_BYTES} bytes; remove it")
            if not line.endswith(b"\n"):
                return  # torn, even where what is left is JSON: the writer cuts it off too
            if not line.strip():
                continue
            try:
                yield parse_json(line.decode())
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: {line[:60]!r}: not JSON; remove the line") from error


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a logging.jsonl or completions.jsonl that count: of each step, those of its highest attempt.

    Rows of a step keep their order; steps ascend.
    """
    rows = list(read_jsonl(path))
    newest = {row["step"]: row["attempt"] for row in sorted(rows, key=lambda row: row["attempt"])}
    return sorted((row for row in rows if row["attempt"] == newest[row["step"]]), key=lambda row: row["step"])


def series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one key, where it is a finite number."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in points], [float(value) for _, value in points]
