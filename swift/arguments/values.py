"""From text to typed values: pydantic checks types, choices and ranges, wherever the text comes from.

A raw value is a text, a list of texts, a map, or None for YAML's null. An invalid value raises
`ValueError("<what is wrong>; <fix>")`; the caller adds the setting and its place.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from swift.errors import counted, suggest
from swift.flags import Flag

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Raw = str | list[Any] | dict[str, Any] | None

_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict}
_WANTED = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text", "dict": "JSON"}
_JSON = "write it like '{\"name\": 1}'"
BOOLEAN_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
"""What YAML 1.1 reads as booleans, besides `true` and `false`."""
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?[eE][-+]?[0-9]+")
"""A number as 1e3: whole, but not to pydantic."""
_PROBLEMS = {
    "bool_parsing": "not a boolean; valid: true, false",
    "int_parsing": "not a whole number; give one such as 8",
    "float_parsing": "not a number; give one such as 0.5 or 1e-6",
    "finite_number": "not a finite number; give one such as 0.5 or 1e-6",
    "dict_type": f"JSON, but not a map; {_JSON}",
}
"""Pydantic's types of errors -> the problem and the fix."""


def convert(flag: Flag, raw: Raw) -> Any:
    """The value of `flag` that `raw` stands for; raises a ValueError with the problem and the fix."""
    from pydantic import ValidationError

    value = _prepared(flag, raw)
    try:
        return adapter(flag, flag.choices).validate_python(value)
    except ValidationError as error:
        found = error.errors()[0]
        text, kind, context = found["input"], found["type"], found.get("ctx", {})
        if kind == "json_invalid":
            raise ValueError(f"not JSON ({context['error']}); {_JSON}") from None
        if kind == "literal_error":
            choices = [str(choice) for choice in flag.choices]
            fix = "valid: " + ", ".join(choices) if len(choices) <= 4 else suggest(str(text), choices)
            raise ValueError(f"not a choice; {fix}") from None
        if kind in _PROBLEMS:
            raise ValueError(_PROBLEMS[kind]) from None
        if kind.startswith(("greater_than", "less_than")):
            raise ValueError(f"out of range; valid: {flag.valid}") from None
        seen = "nothing" if text is None else "a map" if isinstance(text, dict) else "a list"
        raise ValueError(f"{seen} where {_WANTED[flag.kind]} is expected; give {_WANTED[flag.kind]}") from None


@functools.cache
def adapter(flag: Flag, choices: tuple[Any, ...]) -> TypeAdapter[Any]:
    """The reader of a flag by pydantic, with these choices."""
    from pydantic import Field, Json, TypeAdapter

    kind: Any = Literal[choices] if choices else _TYPES[flag.kind]
    if not choices and flag.kind in ("int", "float"):
        limits: dict[str, Any] = {**flag.details.bounds, **({"allow_inf_nan": False} if flag.kind == "float" else {})}
        kind = Annotated[kind, Field(**limits)]
    if flag.kind == "dict":
        kind = Json[dict[Any, Any]] | dict[Any, Any]
        kind = Annotated[kind, Field(union_mode="left_to_right")]
    if flag.is_list:
        kind = list[kind]
    return TypeAdapter(kind | None if flag.optional else kind)


def show(raw: Raw) -> str:
    """A raw value as it appears in an error line."""
    if isinstance(raw, list):
        return " ".join(show(item) for item in raw) or "none"
    if isinstance(raw, dict):
        return json.dumps(raw, default=str)
    return "null" if raw is None else raw


def _prepared(flag: Flag, raw: Raw) -> Any:
    """A raw value as pydantic takes it: lists for list flags, no other words for values, None where one is meant."""
    if flag.is_list:
        items = raw if isinstance(raw, list) else [] if raw is None else [raw]
        return [_word(flag, item) for item in (_json_list(items) if flag.kind == "dict" else items)]
    if isinstance(raw, list):
        raise ValueError(
            f"a list of {counted(len(raw), 'value')} where one is expected; give one, in quotes if it contains spaces"
        )
    text = isinstance(raw, str) and raw.lower()
    if flag.optional and text in ("none", "null") and "none" not in (*flag.choices, *flag.details.values):
        return None
    return _word(flag, raw)


def _json_list(items: list[Any]) -> list[Any]:
    """The maps of a list that is written as one JSON text."""
    if len(items) != 1 or not isinstance(items[0], str) or not items[0].lstrip().startswith("["):
        return items
    try:
        return list(json.loads(items[0]))
    except ValueError:
        return items


def _word(flag: Flag, raw: Any) -> Any:
    """A scalar with the canonical word for a choice, and a number where the choices are numbers."""
    if not isinstance(raw, str):
        return raw
    words, text = flag.details.values, raw.lower()
    word = words.get(text) or words.get(BOOLEAN_WORDS.get(text, ""), raw)
    if flag.kind == "int" and _EXPONENT.fullmatch(word) and float(word).is_integer():
        return int(float(word))
    return next((choice for choice in flag.choices if str(choice) == word), word)
