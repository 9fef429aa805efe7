"""Results of these scripts as files; `swift.bench.record` does it, the folder is this one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.bench import record
from swift.bench.record import facts, table

__all__ = ["facts", "table", "write"]

RESULTS = Path(__file__).resolve().parent.parent / "results"


def write(name: str, rows: list[dict[str, Any]], folder: Path | None = None, **more: Any) -> Path:
    """See `swift.bench.record.write`; without a folder that is benchmarks/results."""
    return record.write(name, rows, folder or RESULTS, **more)
