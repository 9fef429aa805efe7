"""The settings in words: help of a mode, help of one flag. Plain text from the fields' own descriptions."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from swift.arguments.derived import rule_texts
from swift.arguments.later import waits_for
from swift.arguments.layers import normalise
from swift.arguments.modes import GROUPS, MODES
from swift.arguments.presets import PRESETS
from swift.arguments.vocabulary import known_flag
from swift.errors import ConfigError, suggest
from swift.flags import Flag, flags_of, spellings_of

WIDTH = 110
_INDENT = 34


def render(mode: str, everyday: bool = True) -> str:
    """The help of a mode: its settings by group, those of every day or all of them.

    Raises:
        ConfigError: an unknown mode.
    """
    cls = _mode(mode)
    flags = [flag for flag in flags_of(cls).values() if not everyday or is_everyday(flag)]
    lines = [_purpose(cls), "", f"usage: swift {mode} [config.yaml] [--flag value ...]"]
    for group in GROUPS:
        members = [flag for flag in flags if flag.group == group]
        if members:
            lines += ["", group, *(line for flag in members for line in _entry(flag, cls))]
    lines += [
        "",
        f"swift {mode} --help-all lists every flag, swift {mode} --help <flag> explains one."
        if everyday
        else f"swift {mode} --help <flag> explains a flag.",
    ]
    return "\n".join(lines) + "\n"


def render_flag(mode: str, flag: str) -> str:
    """All about one flag of a mode; `flag` is any of its spellings, with or without dashes.

    Raises:
        ConfigError: an unknown mode or flag.
    """
    cls = _mode(mode)
    spellings, name = spellings_of(cls), normalise(flag.lstrip("-"))
    if name not in spellings:
        known = known_flag(name)
        if known is not None:
            return f"--{name}: known, not implemented in this version (comes with: {known.part})\n"
        raise ConfigError(f"--help: {flag}: unknown flag; {suggest(name, list(spellings))}")
    item = flags_of(cls)[spellings[name]]
    facts = {
        "type": type_text(item),
        "default": default_text(item, cls),
        "valid": ", ".join(map(str, item.choices)) or str(item.details.range),
        "aliases": ", ".join(f"--{alias}" for alias in item.details.aliases),
        "also": ", ".join(f"{alias} = {value}" for alias, value in item.details.values.items()),
        "acts with": item.needs_text,
        "comes with": f"the {waits_for(item)} part of swift" if waits_for(item) else "",
        "group": item.group,
    }
    lines = [f"--{item.name} {metavar(item)}", "", *textwrap.wrap(item.help, WIDTH - 2), ""]
    lines += [f"{fact + ':':<12}{text}" for fact, text in facts.items() if text]
    if item.name == "preset":
        lines += ["", *_presets()]
    return "\n".join(lines) + "\n"


def is_everyday(flag: Flag) -> bool:
    """Whether the short help shows a setting: one that is often used and does something in this version."""
    return flag.details.everyday and waits_for(flag) is None


def metavar(flag: Flag) -> str:
    """What follows the flag on the command line."""
    if flag.choices and len(flag.choices) <= 4:
        one = "|".join(map(str, flag.choices))
    else:
        one = {"bool": "true|false", "int": "INT", "float": "FLOAT", "dict": "JSON"}.get(flag.kind, "TEXT")
    return f"{one} ..." if flag.is_list else one


def type_text(flag: Flag) -> str:
    """The type in words."""
    kind = {"bool": "true or false", "int": "int", "float": "float", "str": "text", "dict": "JSON map"}[flag.kind]
    return f"list of {kind}" if flag.is_list else kind


def default_text(flag: Flag, cls: type) -> str:
    """The default in words: the rules it is derived by, else what being unset means, else its value."""
    rules = rule_texts(flag.name, exporting=hasattr(cls, "merge_lora")) if flag.default is None else []
    if rules:
        return "; ".join(rules)
    if flag.default in (None, []) and flag.details.unset:
        return flag.details.unset
    return value_text(flag.default)


def value_text(value: Any) -> str:
    """A value as it would be typed."""
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _mode(mode: str) -> type:
    if mode not in MODES:
        raise ConfigError(f"mode: {mode}: unknown mode; {suggest(mode, list(MODES))}")
    return MODES[mode]


def _purpose(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0].replace("`", "")


def _presets() -> list[str]:
    """The values of each preset, as they could be typed."""
    lines = []
    for name, preset in PRESETS.items():
        values = " ".join(f"--{setting} {item.shown}" for setting, item in preset.values.items())
        lines += [
            f"{name}: {preset.title}, {preset.paper}",
            *textwrap.wrap(values, WIDTH - 4, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False),
        ]
    return lines


def _entry(flag: Flag, cls: type) -> list[str]:
    head = f"  --{flag.name} {metavar(flag)}"
    part = waits_for(flag)
    text = f"{flag.summary} [{default_text(flag, cls)}]" + (f" (with the {part} part)" if part else "")
    body = textwrap.wrap(text, WIDTH - _INDENT)
    if len(head) < _INDENT:
        return [f"{head:<{_INDENT}}{body[0]}", *(" " * _INDENT + line for line in body[1:])]
    return [head, *(" " * _INDENT + line for line in body)]
