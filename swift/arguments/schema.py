"""The settings as a JSON schema, for editors and programs that write config files."""

from __future__ import annotations

from typing import Any

from swift.arguments.help import default_text
from swift.arguments.modes import MODES
from swift.errors import ConfigError, suggest
from swift.flags import Flag, flags_of

_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "dict": "object"}


def json_schema(mode: str) -> dict[str, Any]:
    """The JSON schema (2020-12) of a mode's config file; aliases refer to their canonical names.

    Raises:
        ConfigError: an unknown mode.
    """
    if mode not in MODES:
        raise ConfigError(f"mode: {mode}: unknown mode; {suggest(mode, list(MODES))}")
    cls = MODES[mode]
    properties: dict[str, Any] = {}
    for flag in flags_of(cls).values():
        properties[flag.name] = _property(flag, cls)
        for alias in flag.details.aliases:
            properties[alias] = {"$ref": f"#/properties/{flag.name}"}
    properties["ENV"] = {
        "type": "object",
        "description": "Environment variables, set where they are not set already.",
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"swift {mode}",
        "description": (cls.__doc__ or "").strip(),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(flag: Flag, cls: type) -> dict[str, Any]:
    item = _single(flag)
    schema: dict[str, Any] = {"type": "array", "items": item} if flag.is_list else item
    if flag.optional:
        schema = {"anyOf": [schema, {"type": "null"}]}
    schema["description"] = flag.help
    schema["default"] = flag.default
    if flag.default is None:
        schema["description"] += f" Default: {default_text(flag, cls)}."
    return schema


def _single(flag: Flag) -> dict[str, Any]:
    if flag.choices:
        spelled = [_native(alias) for alias in flag.details.values]
        return {"enum": [*flag.choices, *spelled]}
    bounds = flag.details.range
    limits = {
        "exclusiveMinimum": bounds.above,
        "minimum": bounds.at_least,
        "exclusiveMaximum": bounds.below,
        "maximum": bounds.at_most,
    }
    return {"type": _TYPES[flag.kind], **{name: limit for name, limit in limits.items() if limit is not None}}


def _native(text: str) -> Any:
    return {"true": True, "false": False}.get(text, text)
