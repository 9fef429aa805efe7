"""The codec of a run's state: JSON, and tensors for its arrays; what checkpoints hold beside weights and optimizer.

`pack` turns dataclasses and msgspec structs into plain JSON; every array in them (token ids, log-probs, masks) becomes
part of a tensor, one per data type, and leaves (type, first element, count) behind. `unpack` is the inverse, checked
against the type it is asked for. Both are exact to the last bit, NaN included.

Columns of a prompt reach reward functions again when it is re-rolled, so they must come back as they were. They are
saved as JSON with tags for what JSON lacks (bytes, dates, tuples, decimals, arrays); a row with anything else is
refused when it is drawn (`require_plain`). Nothing here is pickled: a checkpoint from elsewhere runs no code.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
import numpy as np

from swift.errors import ConfigError
from swift.types import Completion, FinishReason, GroupScores, Prompt, RolloutGroup

FORMAT = 2
"""1 had arrays as JSON lists and pickled columns."""
NO_TOKEN = -1
"""Stands for a token of which only the number was saved; no vocabulary has it."""
T = TypeVar("T")


# --- arrays --------------------------------------------------------------------------------------------------------


def pack(state: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A state as JSON-safe values and the tensors that they refer to."""
    arrays: dict[str, list[np.ndarray]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)

    def put(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.ndim != 1:
            raise NotImplementedError(f"{type(value).__name__} in a state")
        name = value.dtype.name
        arrays[name].append(value)
        counts[name] += value.size
        return [name, counts[name] - value.size, value.size]

    content = msgspec.to_builtins({"format": FORMAT, "state": state}, enc_hook=put, str_keys=True)
    return content, {name: np.concatenate(parts) for name, parts in arrays.items()}


def unpack(content: Any, tensors: dict[str, np.ndarray], kind: type[T]) -> T:
    """The inverse of `pack`.

    Raises:
        ValueError: it is something else.
    """

    def get(_: Any, value: Any) -> np.ndarray:
        name, start, count = value
        return tensors[name][start : start + count].copy()

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("another format")
    return msgspec.convert(content["state"], kind, dec_hook=get)


# --- prompts, completions, groups -----------------------------------------------------------------------------------


class SavedPrompt(msgspec.Struct):
    """A prompt; messages and columns are the text of `plain_text`."""

    prompt_id: str
    messages: str
    token_ids: np.ndarray
    columns: str


class SavedCompletion(msgspec.Struct):
    """A completion; columns are the text of `plain_text`."""

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    text: str
    versions: list[tuple[int, int, int]]
    columns: str
    log_mass: np.ndarray | None = None


class SavedGroup(msgspec.Struct):
    """A group. sizes: of a group kept for the logs alone, tokens of the prompt and of each completion."""

    group_id: str
    launch_index: int
    launch: int
    prompt: SavedPrompt
    completions: list[SavedCompletion]
    scores: GroupScores | None
    sizes: list[int] | None = None


def saved_prompt(prompt: Prompt) -> SavedPrompt:
    """A copy to save."""
    ids = np.asarray(prompt.token_ids, dtype=np.int64)
    return SavedPrompt(prompt.prompt_id, plain_text(prompt.messages), ids, plain_text(prompt.columns))


def restored_prompt(saved: SavedPrompt) -> Prompt:
    """The inverse of `saved_prompt`."""
    messages, columns = from_plain_text(saved.messages), from_plain_text(saved.columns)
    return Prompt(saved.prompt_id, messages, saved.token_ids.tolist(), columns)


def saved_completion(one: Completion) -> SavedCompletion:
    """A copy to save or send."""
    ids, logprobs = np.asarray(one.token_ids, dtype=np.int64), np.asarray(one.logprobs, dtype=np.float64)
    text = one.text.encode("utf-8", "replace").decode()
    versions = [(int(a), int(b), int(c)) for a, b, c in one.versions]
    mass = np.asarray(one.log_mass, dtype=np.float64) if one.log_mass else None
    columns = plain_text(one.columns)
    return SavedCompletion(one.request_id, ids, logprobs, one.finish_reason, text, versions, columns, mass)


def restored_completion(saved: SavedCompletion) -> Completion:
    """The inverse of `saved_completion`."""
    return Completion(
        saved.request_id,
        saved.token_ids.tolist(),
        saved.logprobs.tolist(),
        saved.finish_reason,
        saved.text,
        saved.versions,
        from_plain_text(saved.columns),
        saved.log_mass.tolist() if saved.log_mass is not None else [],
    )


def saved_group(group: RolloutGroup) -> SavedGroup:
    """A copy to save."""
    scores = GroupScores(**asdict(group.scores)) if group.scores is not None else None
    completions = [saved_completion(one) for one in group.completions]
    return SavedGroup(group.group_id, group.launch_index, group.launch, saved_prompt(group.prompt), completions, scores)


def saved_for_logs(group: RolloutGroup) -> SavedGroup:
    """A copy of a group that nobody trains on: texts, columns, scores and counts, without tokens and log-probs."""
    saved = saved_group(group)
    saved.sizes = [len(group.prompt.token_ids), *(len(one.token_ids) for one in group.completions)]
    saved.prompt.token_ids = saved.prompt.token_ids[:0]
    for one in saved.completions:
        one.token_ids, one.logprobs, one.versions = one.token_ids[:0], one.logprobs[:0], one.versions[:1]
        one.log_mass = None
    return saved


def restored_group(saved: SavedGroup) -> RolloutGroup:
    """The inverse of `saved_group`; after `saved_for_logs` each token is `NO_TOKEN`."""
    prompt = restored_prompt(saved.prompt)
    completions = [restored_completion(one) for one in saved.completions]
    if saved.sizes is not None:
        prompt.token_ids = [NO_TOKEN] * saved.sizes[0]
        for one, size in zip(completions, saved.sizes[1:], strict=True):
            one.token_ids = [NO_TOKEN] * size
    return RolloutGroup(saved.group_id, saved.launch_index, saved.launch, prompt, completions, saved.scores)


# --- plain data -----------------------------------------------------------------------------------------------------

TAG = "@"
"""Only key of an object that stands for a value JSON lacks: [name of its type, content]."""
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


def plain_text(value: Any) -> str:
    """A value as text; raises TypeError for what `require_plain` refuses."""
    return json.dumps(_tagged(value))


def from_plain_text(text: str) -> Any:
    """The inverse of `plain_text`."""
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_tagged(one) for one in value]
    if kind is dict and all(type(key) is str for key in value) and set(value) != {TAG}:
        return {key: _tagged(one) for key, one in value.items()}
    return {TAG: _tag(kind, value)}


def _tag(kind: type, value: Any) -> list[Any]:
    """A value that JSON lacks, as the name of its type and JSON."""
    content: Any
    if kind is dict:
        content = [[_tagged(key), _tagged(one)] for key, one in value.items()]
    elif kind is tuple:
        content = [_tagged(one) for one in value]
    elif kind is bytes:
        content = base64.b64encode(value).decode()
    elif _DATES.get(kind.__name__) is kind and _has_plain_zone(value):
        content = value.isoformat()
    elif kind is datetime.timedelta:
        content = [value.days, value.seconds, value.microseconds]
    elif kind is decimal.Decimal:
        content = str(value)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return ["array", [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]]
    else:
        raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__}")
    return [kind.__name__, content]


def _has_plain_zone(value: Any) -> bool:
    """Whether a date has no time zone or a fixed offset; others would lose their name."""
    zone = getattr(value, "tzinfo", None)
    return zone is None or type(zone) is datetime.timezone


def _restored_array(content: Any) -> Any:
    kind, shape, data = content
    array = np.frombuffer(base64.b64decode(data), dtype=kind).reshape(shape).copy()
    return array if shape else array[()]


_RESTORERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "bytes": base64.b64decode,
    "timedelta": lambda content: datetime.timedelta(*content),
    "Decimal": decimal.Decimal,
    "array": _restored_array,
    **{name: kind.fromisoformat for name, kind in _DATES.items()},  # type: ignore[attr-defined]
}


def _untagged(value: dict[str, Any]) -> Any:
    if set(value) != {TAG}:
        return value
    name, content = value[TAG]
    return _RESTORERS[name](content)
