"""From text to typed values: the flag's type decides, wherever the text comes from.

A raw value is what a layer holds: a text, a list of texts, a map, or None for YAML's null. What is wrong
travels as `ValueError("<what is wrong>; <fix>")`; the caller knows who said it and where.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from swift.errors import suggest
from swift.flags import Flag
from swift.observability.secrets import MASK, is_secret, mask_text

Raw = str | list[Any] | dict[str, Any] | None

BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""Spellings of a boolean, in lower case."""


def convert(flag: Flag, raw: Raw) -> Any:
    """The value of `flag` that `raw` stands for.

    Raises:
        ValueError: it is not of the flag's type, not one of its choices, or out of its range.
    """
    if raw is None and flag.is_list:
        return []
    if flag.optional and _means_none(flag, raw):
        return None
    if flag.is_list:
        return [_scalar(flag, item) for item in (raw if isinstance(raw, list) else [raw])]
    if isinstance(raw, list):
        raise ValueError(f"{len(raw)} values where one is expected; give one, in quotes if it contains spaces")
    return _map(raw) if flag.kind == "dict" else _scalar(flag, raw)


def show(raw: Raw) -> str:
    """A raw value as it appears in an error line."""
    if isinstance(raw, list):
        return " ".join(show(item) for item in raw) or "none"
    if isinstance(raw, dict):
        return json.dumps(raw, default=str)
    return "null" if raw is None else raw


def mask(name: str, value: Any) -> Any:
    """`value` with secrets replaced by `***`: all of it under a secret's name, passwords in URLs anywhere."""
    if isinstance(value, dict):
        return {key: mask(str(key), item) for key, item in value.items()}
    if isinstance(value, list):
        return [mask(name, item) for item in value]
    if isinstance(value, str):
        return MASK if is_secret(name) else mask_text(value)
    return value


def _means_none(flag: Flag, raw: Raw) -> bool:
    if isinstance(raw, str):
        return raw.lower() in ("none", "null") and "none" not in (*flag.choices, *flag.details.values)
    return raw is None


def _scalar(flag: Flag, raw: Any) -> Any:
    if not isinstance(raw, str):
        kind = "nothing" if raw is None else "a map" if isinstance(raw, dict) else "a list"
        raise ValueError(f"{kind} where {_wanted(flag)} is expected; give {_wanted(flag)}")
    text = flag.details.values.get(raw.lower(), raw)
    value = _READERS[flag.kind](text)
    if flag.choices and value not in flag.choices:
        choices = [str(choice) for choice in flag.choices]
        fix = "valid: " + ", ".join(choices) if len(choices) <= 4 else suggest(text, choices)
        raise ValueError(f"not a choice; {fix}")
    if flag.kind in ("int", "float") and not flag.details.range.holds(value):
        raise ValueError(f"out of range; valid: {flag.details.range}")
    return value


def _wanted(flag: Flag) -> str:
    return {"bool": "true or false", "int": "a whole number", "float": "a number"}.get(flag.kind, "a text")


def _bool(text: str) -> bool:
    try:
        return BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError("not a boolean; valid: true, false") from None


def _int(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text):
        raise ValueError("not a whole number; give one such as 8")
    return int(text)


def _float(text: str) -> float:
    try:
        number = float(text.replace("_", "x"))  # Python would read 1_0 as 10
    except ValueError:
        raise ValueError("not a number; give one such as 0.5 or 1e-6") from None
    if not math.isfinite(number):
        raise ValueError("not a finite number; give one such as 0.5 or 1e-6")
    return number


def _map(raw: Any) -> dict[str, Any]:
    if isinstance(raw, dict):
        return raw
    try:
        value = json.loads(raw or "")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error.msg} at character {error.pos + 1}); write it like '{{\"name\": 1}}'"
        ) from None
    if not isinstance(value, dict):
        raise ValueError("JSON, but not a map; write it like '{\"name\": 1}'")
    return value


_READERS: dict[str, Callable[[str], Any]] = {"bool": _bool, "int": _int, "float": _float, "str": str}
