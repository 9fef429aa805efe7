"""Rows of results as text: for a terminal, and for a page between two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HEADER = ["row", "swift", "others", "other/swift [95 %]", "processor", "tok/s", "peak MiB", "start s", "cosine"]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A line of the table of `run.py`; the sides' figures in the order swift : others."""
    sides, ratios = row["sides"], row["ratios"]
    unit = (1e6, "us/token") if row["per_token"] else (1.0, "s")
    return [
        row["row"],
        _main(row, sides["swift"], unit),
        _join([f"{name} {_main(row, side, unit)}" for name, side in sides.items() if name != "swift"]),
        _join([_ratio(one[row["compared"]]) for one in ratios.values()]),
        _join([f"{one['processor']['value']:.2f}" for one in ratios.values() if "processor" in one]),
        " : ".join(f"{median(side['tokens_per_s']):.0f}" for side in sides.values() if "tokens_per_s" in side) or "-",
        " : ".join(f"{max(side['peak_mib']):.0f}" for side in sides.values()),
        " : ".join(f"{median(side['start_s']):.1f}" for side in sides.values()),
        _cosine(row),
    ]


def _main(row: Mapping[str, Any], side: Mapping[str, Any], unit: tuple[float, str]) -> str:
    if row["compared"] == "start":
        return f"{median(side['start_s']):.2f} s"
    return f"{median(side['seconds']) * unit[0]:.3f} {unit[1]}"


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _cosine(row: Mapping[str, Any]) -> str:
    if "agreement" not in row:
        return "-"
    return f"{row['agreement']['cosine']:.7f}" + (" VOID" if row["void"] else "")


def _join(values: list[str]) -> str:
    return ", ".join(values) or "-"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with blanks."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


def marks(name: str) -> tuple[str, str]:
    """The lines around generated text."""
    return f"<!-- {name}: generated -->", f"<!-- end of {name} -->"


def inside(page: Path, name: str) -> str:
    """What stands between the marks.

    Raises:
        ValueError: the page has no such marks.
    """
    start, end = marks(name)
    text = page.read_text(encoding="utf-8")
    if start not in text or end not in text:
        raise ValueError(f"{page}: has no {start} and {end}")
    return text.partition(start)[2].partition(end)[0].strip()


def replace_inside(page: Path, name: str, content: str) -> None:
    """Replace what stands between the marks."""
    start, end = marks(name)
    inside(page, name)
    text = page.read_text(encoding="utf-8")
    before, after = text.partition(start)[0], text.partition(end)[2]
    page.write_text(f"{before}{start}\n{content}\n{end}{after}", encoding="utf-8")
