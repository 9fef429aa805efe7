"""Whether swift has lost ground: measured ratios against recorded ones.

Ratios are recorded, not seconds: both sides of one ran on the same machine in the same minutes. They still depend on
the kind of processor: swift multiplies through oneDNN, TRL through MKL, and how far these are apart is a matter of the
processor's generation. So ratios are recorded for each family of processors in one JSON file beside the benchmarks, and
a family without any is compared with the lowest of the others.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

TOLERANCE = 0.15
"""How far a ratio may fall below the recorded one."""

Baseline = dict[str, dict[str, float]]
"""Ratio by name, by family of processors."""


def processor_family(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Maker and family of this machine's processor as its system says it, else its architecture.

    Args:
        cpuinfo: where Linux says it.
    """
    fields = processor_fields(cpuinfo)
    if "vendor_id" in fields and "cpu family" in fields:
        return f"{fields['vendor_id']} family {fields['cpu family']}"
    return platform.machine()


def processor_fields(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What Linux says of the first processor; nothing elsewhere."""
    fields: dict[str, str] = {}
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields


def expected(baseline: Baseline, family: str) -> dict[str, float]:
    """The ratios to compare with on a family of processors: its own, else the lowest of any."""
    names = {name for ratios in baseline.values() for name in ratios}
    lowest = {name: min(ratios[name] for ratios in baseline.values() if name in ratios) for name in sorted(names)}
    return baseline.get(family, lowest)


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


def read(path: Path) -> Baseline:
    """The recorded ratios.

    Raises:
        ValueError: the file holds something else.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    families = content.get("ratios") if isinstance(content, dict) else None
    if not isinstance(families, dict) or not all(map(_are_ratios, families.values())):
        raise ValueError('is not {"ratios": {<family of processors>: {<name>: <positive number>, ...}, ...}}')
    return {family: {name: float(value) for name, value in ratios.items()} for family, ratios in families.items()}


def _are_ratios(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(value, int | float) and value > 0 for value in found.values())


def record(path: Path, measured: Mapping[str, float], family: str) -> None:
    """Write the ratios of now; those of other families, and of rows that were not measured, stay."""
    baseline = read(path) if path.exists() else {}
    baseline[family] = {**baseline.get(family, {}), **measured}
    rounded = {one: {name: round(ratios[name], 3) for name in sorted(ratios)} for one, ratios in baseline.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tolerance": TOLERANCE, "ratios": rounded}, indent=1) + "\n", encoding="utf-8")
