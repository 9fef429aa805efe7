"""The codec of a run's state and of messages between ranks: msgpack of declared types, exact to the last bit.

Dataclasses and msgspec structs go in as they are, arrays as their type and bytes. Decoding checks types and runs no
code, so a checkpoint or a message from elsewhere is only data.

Columns of a prompt reach reward functions again after a resume, so they must come back as they were: what msgpack
lacks (dates, tuples, decimals, arrays) gets a tag. A row with anything else is refused when it is drawn.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from swift.errors import ConfigError
from swift.types import Completion, Prompt, RolloutGroup

FORMAT = 3
"""Of a checkpoint's state; 1 and 2 were JSON."""
NO_TOKEN = -1
"""Stands for a token of which only the number was saved; no vocabulary has it."""
T = TypeVar("T")


def encode(value: Any) -> bytes:
    """A value of dataclasses, structs and one-dimensional arrays as bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_from_array)


def decode(content: bytes, kind: type[T]) -> T:
    """The inverse of `encode`.

    Raises:
        ValueError: it is something else.
    """
    return msgspec.msgpack.decode(content, type=kind, dec_hook=_to_array)


def _from_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return [value.dtype.str, value.tobytes()]
    raise NotImplementedError(f"{type(value).__name__} in a state")


def _to_array(_: Any, value: Any) -> np.ndarray:
    kind, content = value
    return np.frombuffer(content, dtype=np.dtype(kind)).copy()


# --- prompts, completions, groups -----------------------------------------------------------------------------------


def saved_prompt(prompt: Prompt) -> Prompt:
    """A copy for `encode`, its messages and columns tagged."""
    return replace(prompt, messages=_tagged(prompt.messages), columns=_tagged(prompt.columns))


def restored_prompt(saved: Prompt) -> Prompt:
    """The inverse of `saved_prompt`."""
    return replace(saved, messages=_untagged(saved.messages), columns=_untagged(saved.columns))


def saved_completion(one: Completion) -> Completion:
    """A copy for `encode`, its columns tagged."""
    return replace(one, text=one.text.encode("utf-8", "replace").decode(), columns=_tagged(one.columns))


def restored_completion(saved: Completion) -> Completion:
    """The inverse of `saved_completion`."""
    return replace(saved, columns=_untagged(saved.columns))


def saved_group(group: RolloutGroup) -> RolloutGroup:
    """A copy for `encode`."""
    completions = [saved_completion(one) for one in group.completions]
    return replace(group, prompt=saved_prompt(group.prompt), completions=completions)


def restored_group(saved: RolloutGroup) -> RolloutGroup:
    """The inverse of `saved_group`."""
    completions = [restored_completion(one) for one in saved.completions]
    return replace(saved, prompt=restored_prompt(saved.prompt), completions=completions)


def saved_for_logs(group: RolloutGroup) -> RolloutGroup:
    """A copy for `encode` of a group that nobody trains on: each token is `NO_TOKEN`, without log-probs."""
    saved = saved_group(group)
    saved.prompt.token_ids = [NO_TOKEN] * len(saved.prompt.token_ids)
    for one in saved.completions:
        one.token_ids = [NO_TOKEN] * len(one.token_ids)
        one.logprobs, one.log_mass, one.versions = [], [], one.versions[:1]
    return saved


# --- plain data -----------------------------------------------------------------------------------------------------

TAG = "@"
"""Only key of a dict that stands for a value msgpack lacks: [name of its type, content]."""
_DATES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}


def require_plain(prompt: Prompt) -> None:
    """Refuse a row that a checkpoint could not hold.

    Raises:
        ConfigError: naming the column and the type.
    """
    for name, value in prompt.columns.items():
        try:
            _tagged(value)
        except TypeError as error:
            raise ConfigError(
                f"--dataset: column {name!r} of prompt {prompt.prompt_id}: {error}: checkpoints of this run hold "
                "columns, as plain data only; convert it to text, numbers, lists or bytes, or drop the column"
            ) from error


def _tagged(value: Any) -> Any:
    kind = type(value)
    if kind in (bool, float, bytes, type(None)) or (kind in (int, str) and _is_msgpack(value)):
        return value
    if kind is list:
        return [_tagged(one) for one in value]
    if kind is dict and all(type(key) is str and _is_msgpack(key) for key in value) and set(value) != {TAG}:
        return {key: _tagged(one) for key, one in value.items()}
    return {TAG: _tag(kind, value)}


def _is_msgpack(value: int | str) -> bool:
    """Whether a number fits 64 bits, or a text has no lone surrogate."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return value.isascii() or value.encode("utf-8", "replace").decode() == value


def _tag(kind: type, value: Any) -> list[Any]:
    """The name of the type, and what makes the value again."""
    content: Any
    if kind is dict:
        content = [[_tagged(key), _tagged(one)] for key, one in value.items()]
    elif kind is tuple:
        content = [_tagged(one) for one in value]
    elif kind is str:
        content = value.encode("utf-8", "surrogatepass")
    elif kind in (int, decimal.Decimal):
        content = str(value)
    elif _DATES.get(kind.__name__) is kind and _has_plain_zone(value):
        content = value.isoformat()
    elif kind is datetime.timedelta:
        content = [value.days, value.seconds, value.microseconds]
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return ["array", [value.dtype.str, list(value.shape), value.tobytes()]]
    else:
        raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__}")
    return [kind.__name__, content]


def _has_plain_zone(value: Any) -> bool:
    """Whether a date has no time zone or a fixed offset; others would lose their name."""
    zone = getattr(value, "tzinfo", None)
    return zone is None or type(zone) is datetime.timezone


def _restored_array(content: Any) -> Any:
    kind, shape, data = content
    array = np.frombuffer(data, dtype=kind).reshape(shape).copy()
    return array if shape else array[()]


_RESTORERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "str": lambda content: content.decode("utf-8", "surrogatepass"),
    "int": int,
    "timedelta": lambda content: datetime.timedelta(*content),
    "Decimal": decimal.Decimal,
    "array": _restored_array,
    **{name: kind.fromisoformat for name, kind in _DATES.items()},  # type: ignore[attr-defined]
}


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(one) for one in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {TAG}:
        return {key: _untagged(one) for key, one in value.items()}
    name, content = value[TAG]
    return _RESTORERS[name](_untagged(content))
