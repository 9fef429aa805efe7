"""Whether swift has lost ground: measured ratios against recorded ones.

Ratios are recorded, not seconds: both sides of one ran on the same machine in the same minutes, so that it says
something on another machine as well. What is recorded stands in a JSON file beside the benchmarks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

TOLERANCE = 0.15
"""How far a ratio may fall below the recorded one."""


def regressions(
    recorded: Mapping[str, float], measured: Mapping[str, float], *, tolerance: float = TOLERANCE
) -> list[str]:
    """One line for each ratio that fell more than `tolerance` below the recorded one.

    Args:
        recorded: ratio by name, above 1 where swift is better.
        measured: the same of now. What is missing on either side is not compared; see `unrecorded`.
        tolerance: share of the recorded ratio.
    """
    return [
        f"{name}: {measured[name]:.2f}, recorded {ratio:.2f}: {1 - measured[name] / ratio:.0%} below"
        for name, ratio in recorded.items()
        if name in measured and measured[name] < ratio * (1 - tolerance)
    ]


def unrecorded(recorded: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """Names that nothing was recorded for, so that they were not compared."""
    return [name for name in measured if name not in recorded]


def read(path: Path) -> dict[str, float]:
    """The recorded ratios.

    Raises:
        ValueError: the file holds something else.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    ratios = content.get("ratios") if isinstance(content, dict) else None
    if not isinstance(ratios, dict) or not all(
        isinstance(value, int | float) and value > 0 for value in ratios.values()
    ):
        raise ValueError('is not {"ratios": {<name>: <positive number>, ...}}')
    return {name: float(value) for name, value in ratios.items()}


def record(path: Path, measured: Mapping[str, float]) -> None:
    """Write the ratios of now; those of rows that were not measured stay."""
    ratios = {**(read(path) if path.exists() else {}), **measured}
    rounded = {name: round(ratios[name], 3) for name in sorted(ratios)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tolerance": TOLERANCE, "ratios": rounded}, indent=1) + "\n", encoding="utf-8")
