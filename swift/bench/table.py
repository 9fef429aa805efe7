"""Rows of results as text: aligned for a terminal, Markdown for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.bench.record import table as aligned

VOID = "VOID"


def plain(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> str:
    """The table of all rows, and what was profiled."""
    if not rows:
        return "no row was measured"
    return "\n".join([aligned(header(peers), [cells(row, peers) for row in rows]), *_notes(rows)])


def markdown(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> str:
    """The same for a page."""
    lines = [header(peers), ["---"] * len(header(peers)), *(cells(row, peers) for row in rows)]
    return "\n".join([*(f"| {' | '.join(one)} |" for one in lines), "", *_notes(rows)]) + "\n"


def line(row: dict[str, Any], peers: Sequence[str]) -> str:
    """One row, while others are still measured."""
    pairs = zip(header(peers)[1:], cells(row, peers)[1:], strict=True)
    return f"{row['row']}: " + "; ".join(f"{name} {value}" for name, value in pairs if value != "-")


def header(peers: Sequence[str]) -> list[str]:
    """Names of the columns."""
    return [
        "row", "swift s", *(f"{peer} s" for peer in peers), *(f"{peer}/swift [95 %]" for peer in peers),
        *(f"{peer}/swift processor" for peer in peers), "tok/s", "peak MiB", "of the floor", "cosine", "at least, aim",
    ]  # fmt: skip


def cells(row: dict[str, Any], peers: Sequence[str]) -> list[str]:
    """One row; "-" where there is nothing."""
    sides = {side: row["sides"].get(side) for side in ("swift", *peers)}
    return [
        row["row"],
        *(_seconds(figures) for figures in sides.values()),
        *(_ratio(row["ratios"].get(peer, {}).get("seconds")) for peer in peers),
        *(_value(row["ratios"].get(peer, {}).get("processor_s")) for peer in peers),
        _each(sides, "tokens_per_s"),
        _each(sides, "peak_mib"),
        f"{row['floor_share']:.0%}" if "floor_share" in row else "-",
        _cosine(row),
        _targets(row),
    ]


def _seconds(figures: dict[str, Any] | None) -> str:
    return "-" if figures is None else f"{figures['seconds']['median']:.3f}"


def _ratio(ratio: dict[str, float] | None) -> str:
    return "-" if ratio is None else f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _value(ratio: dict[str, float] | None) -> str:
    return "-" if ratio is None else f"{ratio['value']:.2f}"


def _each(sides: dict[str, dict[str, Any] | None], name: str) -> str:
    values = ["-" if figures is None or name not in figures else f"{figures[name]:.0f}" for figures in sides.values()]
    return "-" if set(values) == {"-"} else " : ".join(values)


def _cosine(row: dict[str, Any]) -> str:
    if "agreement" not in row:
        return "-"
    return f"{row['agreement']['cosine']:.7f}" + (f" {VOID}" if row["void"] else "")


def _targets(row: dict[str, Any]) -> str:
    """What the row should reach: a ratio to TRL, of memory where that is what it is about, or seconds for the start."""
    if row["at_least"] is None:
        return "-"
    unit = " s" if row["kind"] == "start" else "x"
    text = f"{row['at_least']:g}{unit}, {round(row['aim'], 1):g}{unit}"
    return f"memory {text}" if row["figure"] == "peak_mib" else text


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        for peer, reason in row["not_measured"].items():
            lines.append(f"{row['row']}: {peer}: {reason}")
        if "profile" in row:
            phases = row["profile"]["phases"].items()
            shares = ", ".join(f"{name} {value['share']:.0%}" for name, value in phases)
            operators = ", ".join(f"{one['name']} {one['share']:.0%}" for one in row["profile"]["operators"][:6])
            lines += [f"{row['row']}: phases: {shares}", f"{row['row']}: operators: {operators}"]
    return lines
