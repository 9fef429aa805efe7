"""docs/arguments.md and the presets of docs/algorithms.md, generated: `python -m swift.arguments.docs --write`."""

from __future__ import annotations

import sys
from pathlib import Path

from swift.arguments.help import default_text, type_text
from swift.arguments.modes import GROUPS, MODES
from swift.arguments.plugins import settings_class
from swift.arguments.presets import table
from swift.flags import Flag, flags_of

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"
ALGORITHMS = PAGE.with_name("algorithms.md")
PRESETS_BEGIN, PRESETS_END = "<!-- presets: generated -->\n", "<!-- end of presets -->\n"

_HEAD = """# Arguments

This page is generated from the dataclasses by `python -m swift.arguments.docs --write`; a test keeps it current.

[Command line](cli.md) explains the grammar, config files and precedence. A default that is a rule follows from other
settings or from the machine. A setting without modes is one of `swift rlhf` alone.
"""


def markdown() -> str:
    """The page: one table per group, one row per setting."""
    return "\n".join([_HEAD, *(_section(group) for group in GROUPS if _settings(group))])


def with_presets(text: str) -> str:
    """The page of the algorithms with the table of presets as it is now."""
    head, rest = text.split(PRESETS_BEGIN)
    return head + PRESETS_BEGIN + table() + PRESETS_END + rest.split(PRESETS_END)[1]


def _section(group: str) -> str:
    rows = [f"|{'|'.join(_cells(flag, cls, modes))}|" for flag, cls, modes in _settings(group)]
    return "\n".join([f"## {group}", "", "|flag|type|default|modes|meaning|", "|---|---|---|---|---|", *rows]) + "\n"


def _settings(group: str) -> list[tuple[Flag, type, list[str]]]:
    """The settings of a group; those that differ between modes have a row each."""
    rows: dict[tuple[str, str, str], tuple[Flag, type, list[str]]] = {}
    for mode in MODES:
        cls = settings_class(mode)
        for flag in flags_of(cls).values():
            if flag.group == group:
                key = (flag.name, flag.help, default_text(flag, cls))
                rows.setdefault(key, (flag, cls, []))[2].append(mode)
    return list(rows.values())


def _cells(flag: Flag, cls: type, modes: list[str]) -> list[str]:
    names = f"`--{flag.name}`" + "".join(f"<br>`--{alias}`" for alias in flag.details.aliases)
    meaning = flag.help + (f" Needs `{flag.needs_text}`." if flag.needs_text else "")
    kind = ", ".join(map(str, flag.choices)) or type_text(flag) + (f" {flag.valid}" if flag.valid else "")
    where = "" if modes == ["rlhf"] else "all" if modes == list(MODES) else ", ".join(modes)
    return [cell.replace("|", "\\|") for cell in (names, kind, default_text(flag, cls), where, meaning)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(markdown(), encoding="utf-8")
        ALGORITHMS.write_text(with_presets(ALGORITHMS.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written: {PAGE}, {ALGORITHMS}")
    else:
        print(markdown(), end="")
