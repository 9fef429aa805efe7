"""Generated pages and tables of docs/: `python -m swift.arguments.docs --write`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from swift.arguments import absent
from swift.arguments.common import GROUPS
from swift.arguments.help import default_text, type_text
from swift.arguments.modes import MODES
from swift.arguments.plugins import settings_class
from swift.arguments.presets import table
from swift.flags import Flag, flags_of, help_texts
from swift.plugin.registry import methods

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"
ALGORITHMS = PAGE.with_name("algorithms.md")
MIGRATION = PAGE.with_name("migration.md")
NOT_SUPPORTED = PAGE.with_name("not_supported.md")
_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}

_HEAD = """# Arguments

This page is generated: `python -m swift.arguments.docs --write`. [Command line](cli.md) explains the grammar, config
files and precedence, [algorithms](algorithms.md) the choices of the objective. A default that is a rule follows from
other settings or from the machine.

"""
FAMILIES = {
    "training": ("rlhf", "ebft", "ebft_strided", "sft", "seq_cls", "pt", *methods),
    "preferences": tuple(methods),
}
"""Families of modes, as the page names them."""

_MODES = f"""*preferences* are {", ".join(methods)}; *training* is these, rlhf, ebft, ebft_strided, sft, seq_cls and pt.
"""


def markdown() -> str:
    """The page: one list per group, one item per setting."""
    return "\n".join([_HEAD + _MODES, *(_section(group) for group in GROUPS if _settings(group))])


def with_presets(text: str) -> str:
    """The page of the algorithms with the table of presets as it is now."""
    return _with_table(text, "presets", table())


def with_names(text: str) -> str:
    """The page on migration with the table of names as it is now: what Axolotl and TRL call settings of ours."""
    from swift.arguments.imports import axolotl, trl
    from swift.arguments.imports.draft import Renamed

    tables = {
        project: {key: rule.name for key, rule in rules.items() if isinstance(rule, Renamed) and key != rule.name}
        for project, rules in (("Axolotl", axolotl.RULES), ("TRL", trl.RULES))
    }
    names = sorted({name for table in tables.values() for name in table.values()})
    cells = [
        [", ".join(f"`{key}`" for key, ours in table.items() if ours == name) for table in tables.values()]
        for name in names
    ]
    rows = [f"|`{name}`|{'|'.join(row)}|" for name, row in zip(names, cells, strict=True)]
    return _with_table(text, "names", "\n".join([f"|swift|{'|'.join(tables)}|", "|---|---|---|", *rows, ""]))


def _with_table(text: str, name: str, table: str) -> str:
    """A page with a table between its two marks."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- end of {name} -->\n"
    head, rest = text.split(begin)
    return head + begin + table + end + rest.split(end)[1]


def _section(group: str) -> str:
    settings = _settings(group)
    usual = Counter(tuple(modes) for _, _, modes in settings).most_common(1)[0][0]
    items = [_item(flag, cls, "" if tuple(modes) == usual else _names(modes)) for flag, cls, modes in settings]
    return "\n".join([f"## {group}", "", f"Modes, where none are named: {_names(usual)}.", "", *items, ""])


def _names(modes: Sequence[str]) -> str:
    """The modes, those of a family by its name."""
    rest, names = set(modes), []
    if rest == set(MODES):
        return "all"
    for name, family in FAMILIES.items():
        if rest >= set(family):
            names.append(name)
            rest -= set(family)
    return ", ".join([*names, *(mode for mode in MODES if mode in rest)])


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


def _item(flag: Flag, cls: type, modes: str) -> str:
    spellings = ", ".join(f"`--{spelling}`" for spelling in flag.spellings)
    kind = ", ".join(map(str, flag.choices)) or type_text(flag) + _range(flag)
    text = flag.help if flag.details.lists else help_texts(flag.owner)[flag.name]
    meaning = text + (f" Needs `{flag.needs_text}`." if flag.needs_text else "")
    of = f" ({modes})" if modes else ""
    default = default_text(flag, cls)
    return f"* {spellings}: {kind}; {default if default == 'required' else f'default: {default}'}{of}<br>{meaning}"


def _range(flag: Flag) -> str:
    bounds = [f"{_SIGNS[name]}{bound:.10g}" for name, bound in flag.details.bounds.items()]
    return f" {', '.join(bounds)}" if bounds else ""


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(markdown(), encoding="utf-8")
        ALGORITHMS.write_text(with_presets(ALGORITHMS.read_text(encoding="utf-8")), encoding="utf-8")
        NOT_SUPPORTED.write_text(absent.page(), encoding="utf-8")
        MIGRATION.write_text(with_names(MIGRATION.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written: {PAGE}, {ALGORITHMS}, {MIGRATION}")
    else:
        print(markdown(), end="")
