"""Writes the generated tables of the docs from benchmarks/results: `python benchmarks/page.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import tables
from harness.record import RESULTS, ROOT

PAGES = {
    "run": ROOT / "benchmarks" / "README.md",
    "dynamic_sampling": ROOT / "benchmarks" / "README.md",
    "algorithms": ROOT / "benchmarks" / "algorithms.md",
}
NOTHING = "Nothing is recorded yet; `python benchmarks/{script}.py --record` does it."


def main() -> int:
    """Write all tables."""
    for name, text in contents().items():
        tables.replace_inside(PAGES[name], name, text)
    return 0


def contents(results: Path = RESULTS) -> dict[str, str]:
    """The text between each pair of marks."""
    import algorithms
    import dynamic_sampling

    shown = {"run": tables, "dynamic_sampling": dynamic_sampling, "algorithms": algorithms}
    found = {script: sorted(results.glob(f"{script}-*.json")) for script in shown}
    return {
        script: "\n\n".join(_table(path, shown[script]) for path in paths) or NOTHING.format(script=script)
        for script, paths in found.items()
    }


def _table(path: Path, shown: Any) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [shown.cells(row) for row in content["rows"]]
    return f"{said_of(path, content)}\n\n{tables.markdown(shown.HEADER, rows)}"


def said_of(path: Path, content: dict[str, Any]) -> str:
    """Where and when a file's rows were measured."""
    machine, versions = content["machine"], dict(content["versions"])
    if "ms_swift" in content:
        versions["ms-swift"] = content["ms_swift"]
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"`benchmarks/results/{path.name}`, {content['utc']}: {machine['processor']} ({machine['family']}), "
        f"{machine['cores']} cores; {known}."
    )


if __name__ == "__main__":
    sys.exit(main())
