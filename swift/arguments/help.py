"""The settings in words: help of a mode, help of one flag. Plain text from the fields' own descriptions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from swift.arguments import known
from swift.arguments.common import GROUPS
from swift.arguments.derived import load_plugins, rule_texts
from swift.arguments.layers import read_command_line
from swift.arguments.modes import command_of
from swift.arguments.plugins import plugin_paths, settings_class
from swift.errors import ConfigError, suggest
from swift.flags import Flag, flags_of, spellings_of, typed
from swift.plugin.registry import presets

WIDTH = 110
_INDENT = 34


def render(mode: str, everyday: bool = True) -> str:
    """The help of a mode: its settings by group, those of every day or all of them."""
    cls, command = settings_class(mode), command_of(mode)
    flags = [flag for flag in flags_of(cls).values() if not everyday or flag.details.everyday]
    purpose = (cls.__doc__ or "").strip().splitlines()[0].replace("`", "")
    lines = [purpose, "", f"usage: swift {command} [config.yaml] [--flag value ...]"]
    for group in GROUPS:
        members = [flag for flag in flags if flag.group == group]
        if members:
            lines += ["", group, *(line for flag in members for line in _entry(flag, cls))]
    lines += [
        "",
        f"swift {command} --help-all lists every flag, swift {command} --help <flag> explains one."
        if everyday
        else f"swift {command} --help <flag> explains a flag.",
    ]
    return "\n".join(lines) + "\n"


def render_flag(mode: str, flag: str) -> str:
    """All about one flag of a mode; `flag` is its name or an alias, with or without dashes."""
    cls = settings_class(mode)
    spellings, name = spellings_of(cls), flag.lstrip("-").replace("-", "_")
    if name not in spellings:
        if known.is_known(name):
            return f"--{name}: {known.refusal(name)}\n"
        raise ConfigError(f"--help: {flag}: unknown flag; {suggest(name, list(spellings))}")
    item = flags_of(cls)[spellings[name]]
    facts = {
        "type": type_text(item),
        "default": default_text(item, cls),
        "valid": item.valid,
        "aliases": ", ".join(f"--{alias}" for alias in item.details.aliases),
        "also": ", ".join(f"{alias} = {value}" for alias, value in item.details.values.items()),
        "acts with": item.needs_text,
        "group": item.group,
    }
    lines = [f"--{item.name} {metavar(item)}", "", *textwrap.wrap(item.help, WIDTH - 2), ""]
    lines += [f"{fact + ':':<12}{text}" for fact, text in facts.items() if text]
    if item.name == "preset":
        lines += ["", *_presets()]
    return "\n".join(lines) + "\n"


def load_named_plugins(mode: str, words: Sequence[str]) -> None:
    """Loads the `--external_plugins` of a command line; raises ConfigError as `load_plugins` does."""
    load_plugins(plugin_paths([read_command_line(words).given], spellings_of(settings_class(mode))))


def metavar(flag: Flag) -> str:
    """What follows the flag on the command line."""
    if flag.choices and len(flag.choices) <= 4:
        value = "|".join(map(str, flag.choices))
    else:
        value = {"bool": "true|false", "int": "INT", "float": "FLOAT", "dict": "JSON"}.get(flag.kind, "TEXT")
    return f"{value} ..." if flag.is_list else value


def type_text(flag: Flag) -> str:
    """The type in words."""
    kind = {"bool": "bool", "int": "int", "float": "float", "str": "text", "dict": "JSON"}[flag.kind]
    return f"list[{kind}]" if flag.is_list else kind


def default_text(flag: Flag, cls: type) -> str:
    """The default in words: the rules it is derived by, else what being unset means, else its value."""
    rules = rule_texts(flag.name, exporting=hasattr(cls, "merge_lora")) if flag.default is None else []
    if rules:
        return "; ".join(rules)
    if flag.default in (None, []) and flag.details.unset:
        return flag.details.unset
    return typed(flag.default)


def _presets() -> list[str]:
    """The values of each preset, as they could be typed."""
    lines = []
    for name, preset in presets.items():
        values = " ".join(f"--{setting} {item.shown}" for setting, item in preset.values.items())
        lines += [
            f"{name}: {preset.title}, {preset.paper}",
            *textwrap.wrap(values, WIDTH - 4, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False),
        ]
    return lines


def _entry(flag: Flag, cls: type) -> list[str]:
    head = f"  --{flag.name} {metavar(flag)}"
    body = textwrap.wrap(f"{flag.summary} [{default_text(flag, cls)}]", WIDTH - _INDENT)
    if len(head) < _INDENT:
        return [f"{head:<{_INDENT}}{body[0]}", *(" " * _INDENT + line for line in body[1:])]
    return [head, *(" " * _INDENT + line for line in body)]
