"""The codec of a run's state and of messages between ranks: msgpack of declared types, exact to the last bit.

Dataclasses and msgspec structs are encoded field by field, arrays as dtype and bytes. Decoding checks types and runs no
code, so checkpoints and messages from elsewhere are only data.

Reward functions get the columns of a prompt again after a resume, with equal values: types that msgpack lacks (dates,
tuples, decimals, arrays) are tagged. A row with other types is refused when it is drawn.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from swift.errors import ConfigError
from swift.types import Completion, Episode, Prompt, RolloutGroup

FORMAT = 4
"""Format version of a checkpoint's state; 1 and 2 were JSON."""
NO_TOKEN = -1
"""Placeholder of tokens that are not saved; no vocabulary has this id."""
T = TypeVar("T")


def encode(value: Any) -> bytes:
    """Encode a value of dataclasses, structs and arrays of at least one dimension."""
    return msgspec.msgpack.encode(_with_columns(value, _tagged), enc_hook=_from_array)


def decode(content: bytes, kind: type[T]) -> T:
    """The inverse of `encode`. Raises ValueError: the content is not of this type."""
    value: T = msgspec.msgpack.decode(content, type=kind, dec_hook=_to_array)
    return _with_columns(value, _untagged)


def _with_columns(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a state in which `change` is applied to columns and messages of all prompts and completions."""
    if isinstance(value, list) and value and _is_record(value[0]):
        return [_with_columns(entry, change) for entry in value]
    if isinstance(value, dict) and any(map(_is_record, value.values())):
        return {key: _with_columns(entry, change) for key, entry in value.items()}
    if not _is_record(value):
        return value
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else value.__dataclass_fields__
    fields = {name: _with_columns(getattr(value, name), change) for name in names}
    if isinstance(value, Prompt | Episode):
        fields["messages"] = change(value.messages)
    if isinstance(value, Completion):
        fields["text"] = value.text.encode("utf-8", "replace").decode()
        fields["logged"] = change(value.logged)
    if isinstance(value, Prompt | Completion):
        fields["columns"] = change(value.columns)
    return type(value)(**fields)


def _is_record(value: Any) -> bool:
    return isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value)


def _from_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes(), *value.shape[1:]]
    raise NotImplementedError(f"{type(value).__name__} in a state")


def _to_array(_: Any, value: Any) -> np.ndarray:
    kind, content, *rest = value
    return np.frombuffer(content, dtype=np.dtype(kind)).reshape(-1, *rest).copy()


def without_tokens(completion: Completion) -> Completion:
    """A copy of a completion without anything that belongs to one token, but for its mask."""
    episode = completion.episode
    return replace(
        completion,
        episode=episode and replace(episode, ref_logprobs=[], advantages=[]),
        token_ids=[],
        logprobs=[],
        log_mass=[],
        top_logprobs=[],
        versions=[],
        routes=None,
        prompt_scores=None,
        teacher_scores=None,
        teacher_prompt_ids=[],
    )


LOST = "@lost"
"""The only column of an encoded completion whose own columns or messages no state can hold: the reason."""


def beside_tokens(completion: Completion) -> bytes | None:
    """What an environment, a function or an answer of the data adds to the tokens, encoded; None: nothing."""
    if completion.episode is None and not completion.columns and not completion.mask:
        return None
    bare = replace(without_tokens(completion), logged={})
    try:
        return encode(bare)
    except TypeError as error:
        episode = bare.episode
        if episode is not None:
            episode = replace(episode, messages=json.loads(json.dumps(episode.messages, default=str)))
        return encode(replace(bare, columns={LOST: str(error)}, episode=episode))


def for_logs(group: RolloutGroup) -> RolloutGroup:
    """A copy of a group for logs only: each token is `NO_TOKEN`, without log-probs."""
    completions = [
        replace(without_tokens(c), token_ids=[NO_TOKEN] * len(c.token_ids), versions=c.versions[:1])
        for c in group.completions
    ]
    prompt = replace(group.prompt, token_ids=[NO_TOKEN] * len(group.prompt.token_ids))
    return replace(group, prompt=prompt, completions=completions)


TAG = "@"
"""The only key of a dict that encodes a value of a type that msgpack lacks: [name of the type, content]."""
_DATES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}


def require_plain(prompt: Prompt) -> None:
    """Check that a checkpoint can hold a row. Raises ConfigError with the column and the type."""
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
        return [_tagged(entry) for entry in value]
    if kind is dict and all(type(key) is str and _is_msgpack(key) for key in value) and set(value) != {TAG}:
        return {key: _tagged(entry) for key, entry in value.items()}
    return {TAG: _tag(kind, value)}


def _is_msgpack(value: int | str) -> bool:
    """Whether a number fits 64 bits, or a text has no lone surrogate."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return value.isascii() or value.encode("utf-8", "replace").decode() == value


def _tag(kind: type, value: Any) -> list[Any]:
    """The name of the type, and the content that restores the value."""
    content: Any
    if kind is dict:
        content = [[_tagged(key), _tagged(entry)] for key, entry in value.items()]
    elif kind is tuple:
        content = [_tagged(entry) for entry in value]
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
    """Whether a date has no time zone or a fixed offset; the name of others would be lost."""
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
        return [_untagged(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {TAG}:
        return {key: _untagged(entry) for key, entry in value.items()}
    name, content = value[TAG]
    if name not in _RESTORERS:
        raise ValueError(f"a value of type {name}")
    return _RESTORERS[name](_untagged(content))
