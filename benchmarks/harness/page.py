"""Tables of results in the documentation, between marks that a test and the next run find again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def marks(name: str) -> tuple[str, str]:
    """The lines around the table of a benchmark."""
    return f"<!-- {name}: generated -->", f"<!-- end of {name} -->"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


def content(page: Path, name: str) -> str:
    """What stands between the marks."""
    start, end = marks(name)
    return page.read_text(encoding="utf-8").partition(start)[2].partition(end)[0]


def write(page: Path, name: str, text: str, source: str) -> None:
    """Replace what stands between the marks by a table and the name of its results.

    Raises:
        ValueError: the page has no such marks.
    """
    start, end = marks(name)
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page}: has no place for a table: {start} and {end}")
    page.write_text(f"{before}{start}\nFrom `benchmarks/results/{source}`.\n\n{text}\n{end}{after}", encoding="utf-8")
