"""The settings as a JSON schema, for editors and programs that write config files.

A value is checked as its text, whatever type YAML gives it: `1e-5` is a text in YAML 1.1 and `no` a boolean, and a
list of one value may be written without brackets. The schema accepts each such form; it does not check the range of a
number written as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from swift.arguments.derived import load_plugins
from swift.arguments.help import default_text
from swift.arguments.layers import BLOCKS
from swift.arguments.modes import command_of
from swift.arguments.plugins import settings_class
from swift.arguments.values import BOOLEAN_WORDS
from swift.flags import Flag, flags_of

_ENV = {
    "type": "object",
    "description": "Environment variables, set where they are not set already.",
    "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
}
_PROVENANCE = {"description": "Where a run's args.json has its values from; ignored."}

_DIGITS = "[0-9]+(_[0-9]+)*"
_NUMBERS = {
    "int": rf"^\s*[-+]?{_DIGITS}(\.[0-9]+)?([eE][-+]?[0-9]+)?\s*$",
    "float": rf"^\s*[-+]?({_DIGITS}\.?({_DIGITS})?|\.{_DIGITS})([eE][-+]?{_DIGITS})?\s*$",
}
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
_BOOLEANS = ("true", "false", *BOOLEAN_WORDS, "t", "f", "y", "n", "1", "0")


def json_schema(mode: str, external_plugins: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON schema (2020-12) of a mode's config file; other spellings refer to canonical names."""
    load_plugins(external_plugins)
    cls = settings_class(mode)
    properties: dict[str, Any] = {}
    for flag in flags_of(cls).values():
        properties[flag.name] = _property(flag, cls)
        same = {"$ref": f"#/properties/{flag.name}"}
        properties |= dict.fromkeys(flag.details.aliases, same)
        properties |= {name.replace("_", "-"): {**same, "deprecated": True} for name in flag.spellings if "_" in name}
    for block in BLOCKS:
        inner = {
            name.removeprefix(f"{block}_"): one for name, one in properties.items() if name.startswith(f"{block}_")
        }
        if inner:
            properties[block] = {"type": "object", "properties": inner, "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"swift {command_of(mode)}",
        "description": (cls.__doc__ or "").strip(),
        "type": "object",
        "properties": {**properties, "ENV": _ENV, "_provenance": _PROVENANCE},
        "additionalProperties": False,
    }


def _property(flag: Flag, cls: type) -> dict[str, Any]:
    forms = _forms(flag)
    if flag.is_list:
        forms = [{"type": "array", "items": {"anyOf": forms}}, *forms]
    if flag.is_list or flag.optional:
        forms.append({"type": "null"})
    if flag.optional and "none" not in (*flag.choices, *flag.details.values):
        forms.append(_any_case(("none", "null")))
    default = f" Default: {default_text(flag, cls)}." if flag.default is None else ""
    return {"anyOf": forms, "description": flag.help + default, "default": flag.default}


def _forms(flag: Flag) -> list[dict[str, Any]]:
    """What one value of the setting may look like."""
    if flag.choices:
        words = flag.details.values
        booleans = [value for word, value in (("true", True), ("false", False)) if word in words]
        texts = [text for text in map(str, flag.choices) if text not in flag.choices]
        others = (*words, *(word for word, boolean in BOOLEAN_WORDS.items() if boolean in words))
        return [{"enum": [*flag.choices, *texts, *booleans]}, *([_any_case(others)] if others else [])]
    match flag.kind:
        case "bool":
            return [{"type": "boolean"}, {"enum": [0, 1]}, _any_case(_BOOLEANS)]
        case "int" | "float":
            bounds = {_BOUNDS[name]: bound for name, bound in flag.details.bounds.items()}
            native = {"type": "integer" if flag.kind == "int" else "number", **bounds}
            return [native, {"type": "string", "pattern": _NUMBERS[flag.kind]}]
        case "dict":
            return [{"type": "object"}, {"type": "string", "pattern": r"^\s*\{"}]
        case _:
            return [{"type": ["string", "number", "boolean"]}]


def _any_case(words: Iterable[str]) -> dict[str, Any]:
    """These words in any mixture of cases; patterns have no flag for that."""
    letters = ("".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else re.escape(c) for c in word) for word in words)
    return {"type": "string", "pattern": f"^({'|'.join(letters)})$"}
