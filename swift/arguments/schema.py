"""The settings as a JSON schema, for editors and programs that write config files."""

from __future__ import annotations

from typing import Any

from swift.arguments.help import default_text
from swift.arguments.plugins import settings_class
from swift.arguments.values import adapter
from swift.flags import Flag, flags_of

_ENV = {
    "type": "object",
    "description": "Environment variables, set where they are not set already.",
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}


def json_schema(mode: str) -> dict[str, Any]:
    """The JSON schema (2020-12) of a mode's config file; aliases refer to their canonical names.

    Raises:
        ConfigError: an unknown mode.
    """
    cls = settings_class(mode)
    properties: dict[str, Any] = {}
    for flag in flags_of(cls).values():
        properties[flag.name] = _property(flag, cls)
        properties |= {alias: {"$ref": f"#/properties/{flag.name}"} for alias in flag.details.aliases}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"swift {mode}",
        "description": (cls.__doc__ or "").strip(),
        "type": "object",
        "properties": {**properties, "ENV": _ENV},
        "additionalProperties": False,
    }


def _property(flag: Flag, cls: type) -> dict[str, Any]:
    """A setting as pydantic describes it, with the other words for its values."""
    words = [{"true": True, "false": False}.get(word, word) for word in flag.details.values]
    schema = {"type": "object"} if flag.kind == "dict" else adapter(flag, (*flag.choices, *words)).json_schema()
    if flag.kind == "dict" and flag.optional:
        schema = {"anyOf": [schema, {"type": "null"}]}
    default = f" Default: {default_text(flag, cls)}." if flag.default is None else ""
    return {**schema, "description": flag.help + default, "default": flag.default}
