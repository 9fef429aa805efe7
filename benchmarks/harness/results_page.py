"""Puts results of `swift bench` into docs/benchmarks.md.

`python benchmarks/harness/results_page.py RESULTS.json...`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from swift.bench.table import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
NAME = "bench"


def main() -> None:
    """See the module."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from harness import page

    paths = [Path(word) for word in sys.argv[1:]]
    page.write(PAGE, NAME, text(paths), ", ".join(path.name for path in paths))


def text(paths: Sequence[Path]) -> str:
    """A table for each file, under the machine that it was measured on."""
    parts = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        machine = content["machine"]
        known = {**content["versions"], **content.get("peers", {})}
        versions = ", ".join(f"{name} {version}" for name, version in known.items())
        peers = list(dict.fromkeys(side for row in content["rows"] for side in row["sides"] if side != "swift"))
        rates = [row["gemm_flops_per_s"] / 1e9 for row in content["rows"] if "gemm_flops_per_s" in row]
        family = f" ({machine['processor_family']})" if "processor_family" in machine else ""
        parts += [
            f"{content['utc']}: {machine['processor']}{family}, {machine['usable_cores']} cores, "
            + (f"matrix products at {min(rates):.0f} to {max(rates):.0f} GFLOP/s; " if rates else "")
            + f"{versions}",
            markdown(content["rows"], peers),
        ]
    return "\n\n".join(part.rstrip("\n") for part in parts)


if __name__ == "__main__":
    main()
