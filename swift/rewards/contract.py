"""The contract of reward functions: how a registry entry is called, what it needs and what it may return.

Pure functions of signatures, without processes. The trainer uses them to reject a wrong configuration before any model
loads; the workers use them to build the entries and to call them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift.data.columns import RESERVED
from swift.data.image_store import images_in
from swift.errors import ConfigError, counted, nearest
from swift.plugin.numbers import as_number
from swift.plugin.registry import BUILT_IN, IMPORTED, ORM, SESSION
from swift.rewards.payload import Outcome, is_ordered
from swift.rewards.trl_convention import TRL_KEYWORDS, TURNS, Logged, trl_keywords, turns_of
from swift.types import RolloutGroup

PRIVATE_KEYWORDS = ("prompt_opens_think", "environment_reward", "turn_rewards", TURNS)
"""Passed only to functions with a parameter of that name: `**kwargs` does not receive them."""

SCOPES = ("sample", "group", "batch")

_SYNONYMS = ("solution", "answer", "gold", "ground_truth", "label", "target", "output", "response")


class ContractBroken(Exception):
    """A reward function returned something that is not one number or None per completion."""


@dataclass(frozen=True)
class Signature:
    """How an entry is called.

    `where` is "file.py:12". `without_self` marks a class whose `__call__` lacks `self`: it is called like a static
    method. `accepted` are keywords that can be passed by name, `required` those of them without a default; `open` is
    whether the function takes any keyword (`**kwargs`). `counts_ground_truths`: whether its counters hold the number of
    ground truths that cannot be parsed. `is_trl`: whether it is called as TRL's trainer does
    (`swift.rewards.trl_convention`).
    """

    name: str
    where: str
    scope: str
    is_async: bool
    without_self: bool
    accepted: frozenset[str]
    required: tuple[str, ...]
    open: bool
    is_built_in: bool
    counts_ground_truths: bool
    is_trl: bool


def signature_of(name: str, entry: Any, *, origin: str = SESSION) -> Signature:
    """Reads the signature of a registry entry, which `origin` registered, without building it."""
    function, skip, without_self = _call_target(name, entry)
    where = location(entry)
    scope = getattr(entry, "scope", "sample")
    if scope not in SCOPES:
        raise ConfigError(f"reward function {name}: scope {scope!r} ({where}): valid: {', '.join(SCOPES)}")
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    is_trl = (
        origin == IMPORTED and not isinstance(entry, ORM) and not (inspect.isclass(entry) and issubclass(entry, ORM))
    )
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if not parameters or (not is_trl and parameters[0].kind in by_keyword):
        raise ConfigError(f"reward function {name}: {where}: takes no completions; define (completions, **kwargs)")
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    rest = [item for item in parameters[0 if is_trl else 1 :] if item.kind in named]
    return Signature(
        name=name,
        where=where,
        scope=scope,
        is_async=inspect.iscoroutinefunction(inspect.unwrap(function)),
        without_self=without_self,
        accepted=frozenset(item.name for item in rest),
        required=tuple(item.name for item in rest if item.default is inspect.Parameter.empty),
        open=any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters),
        is_built_in=origin == BUILT_IN,
        counts_ground_truths=getattr(entry, "counts_ground_truths", False),
        is_trl=is_trl,
    )


def _call_target(name: str, entry: Any) -> tuple[Callable[..., Any], int, bool]:
    """The function behind an entry, how many leading parameters are bound, and whether `self` is missing."""
    if inspect.isfunction(entry) or inspect.ismethod(entry) or inspect.isbuiltin(entry):
        return entry, 0, False
    owner = entry if inspect.isclass(entry) else type(entry)
    call = next((base.__dict__["__call__"] for base in owner.__mro__ if "__call__" in base.__dict__), None)
    if call is None:
        raise ConfigError(
            f"reward function {name}: {location(entry)}: {owner.__name__} cannot be called; define __call__"
        )
    if isinstance(call, staticmethod | classmethod):
        return call.__func__, int(isinstance(call, classmethod)), False
    if not inspect.isfunction(call):
        return entry, 0, False
    first = next(iter(inspect.signature(call).parameters), None)
    without_self = first == "completions"
    return call, 0 if without_self else 1, without_self


def location(entry: Any) -> str:
    """Where an entry is defined: "file.py:12", or its type's name when it has no source."""
    target = entry if inspect.isclass(entry) or inspect.isfunction(entry) else type(entry)
    try:
        file, line = inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (OSError, TypeError):
        return getattr(target, "__qualname__", str(target))
    return f"{file}:{line}"


def constructor_arguments(name: str, entry: type, available: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the constructor of a class, by parameter name, out of `available`: flags, `args`, `tokenizer`."""
    chosen: dict[str, Any] = {}
    for parameter in inspect.signature(entry).parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.name in available:
            chosen[parameter.name] = available[parameter.name]
        elif parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"reward function {name}: {entry.__name__} ({location(entry)}): parameter "
                f"{parameter.name!r} is no flag of this run and has no default; give it a default, or take args"
            )
    return chosen


def missing_columns(signature: Signature, columns: Collection[str]) -> list[str]:
    """One problem per required parameter that is neither a column nor a keyword."""
    seen = ", ".join(sorted(columns)) or "none"
    synonyms = [name for name in _SYNONYMS if name in columns]
    problems = []
    for name in signature.required:
        if name in {*columns, *RESERVED, *PRIVATE_KEYWORDS, *(TRL_KEYWORDS if signature.is_trl else ())}:
            continue
        near = nearest(name, columns)
        likely = [*synonyms, *near] if name in _SYNONYMS else [*near, *synonyms]
        problems.append(
            f"--reward_funcs: {signature.name}: needs the column {name!r} ({signature.where}), which the dataset "
            f"does not have; columns seen: {seen}; rename one with "
            f'--columns \'{{"{next(iter(likely), "<your column>")}":"{name}"}}\''
        )
    return problems


def keywords_for(signature: Signature, available: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `available` that the function accepts; TRL's keywords if it is called as TRL does.

    Where no row of the call has images, only a function that names `images` gets them, all empty.
    """
    if "images" not in signature.accepted and not any(available.get("images", ())):
        available = {name: value for name, value in available.items() if name != "images"}
    if signature.is_trl:
        available = trl_keywords(available, signature.accepted)
    return {
        name: value
        for name, value in available.items()
        if name in signature.accepted or (signature.open and name not in PRIVATE_KEYWORDS)
    }


def group_keywords(
    groups: Sequence[RolloutGroup], opens_think: Sequence[bool], *, with_turns: bool = False
) -> dict[str, Any]:
    """The keywords of a call on whole groups, one list entry per completion; see docs/rewards.md.

    A column that only some of the groups have is None for the others. with_turns: also the turns for `trl_keywords`.
    """
    rows = [
        (group, item, opened) for group, opened in zip(groups, opens_think, strict=True) for item in group.completions
    ]
    values = [{**group.prompt.columns, **item.columns} for group, item, _ in rows]  # a rollout function's override
    turn_rewards = [list(item.episode.rewards) if item.episode else [] for _, item, _ in rows]
    given_rewards = [[reward for reward in rewards if reward is not None] for rewards in turn_rewards]
    columns = {name: None for row in values for name in row}
    keywords: dict[str, Any] = {name: [row.get(name) for row in values] for name in columns}
    images = {group.group_id: images_in(group.prompt.messages) for group in groups}
    keywords["images"] = [images[group.group_id] for group, _, _ in rows]
    keywords["messages"] = [item.episode.messages if item.episode else group.prompt.messages for group, item, _ in rows]
    keywords["environment_reward"] = [sum(rewards) if rewards else None for rewards in given_rewards]
    keywords["turn_rewards"] = turn_rewards
    turns = [item.episode.num_turns if item.episode else 1 for _, item, _ in rows]
    infos = zip((item.columns for _, item, _ in rows), turns, strict=True)
    keywords["rollout_infos"] = [{**own, "num_turns": number} for own, number in infos]
    keywords["prompt_id"] = [group.prompt.prompt_id for group, _, _ in rows]
    keywords["group_id"] = [group.group_id for group, _, _ in rows]
    keywords["request_id"] = [item.request_id for _, item, _ in rows]
    keywords["finish_reason"] = [item.finish_reason for _, item, _ in rows]
    keywords["is_truncated"] = [item.finish_reason == "length" for _, item, _ in rows]
    keywords["response_token_ids"] = [list(item.token_ids) for _, item, _ in rows]
    keywords["prompt_opens_think"] = [opened for _, _, opened in rows]
    if with_turns:
        keywords[TURNS] = [turns_of(group.prompt, item) for group, item, _ in rows]
    return keywords


def trajectories(keywords: Mapping[str, Any], completions: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """`trajectory_inputs` of ms-swift: id of a completion -> its row, in a list; messages end with the answer."""
    found = {}
    names = keywords.keys() - {"trainer_state", "images", *PRIVATE_KEYWORDS}
    for index, text in enumerate(completions):
        row = {name: keywords[name][index] for name in names}
        if row["messages"][-1]["role"] != "assistant":
            row["messages"] = [*row["messages"], {"role": "assistant", "content": text}]
        found[row["request_id"]] = [row]
    return found


def read_values(result: Any, count: int) -> list[float | None]:
    """The returned values of `count` completions as floats; NaN and infinities stay as they are.

    result: a list, tuple, array or tensor of numbers, bools, 0-d arrays or tensors, or None.

    Raises:
        ContractBroken: anything else, or another length.
    """
    if not is_ordered(result):
        raise ContractBroken(f"returned {type(result).__name__}, not a list with one value per completion")
    if getattr(result, "shape", None) == ():
        raise ContractBroken(f"returned one value for {counted(count, 'completion')}")
    if len(result) != count:
        raise ContractBroken(f"returned {counted(len(result), 'value')} for {counted(count, 'completion')}")
    return [_read_value(item, index) for index, item in enumerate(result)]


def read_outcome(result: Any, count: int, logged: Logged) -> Outcome:
    """The outcome of a call that returned `result` and logged `logged`; see `read_values`."""
    values = read_values(result, count)
    for name, column in logged.columns.items():
        if len(column) != count:
            raise ContractBroken(
                f"log_extra({name!r}) got {counted(len(column), 'value')} for {counted(count, 'completion')}"
            )
    return Outcome("ok", values, columns=dict(logged.columns), metrics=dict(logged.metrics))


def _read_value(item: Any, index: int) -> float | None:
    try:
        return as_number(item)
    except TypeError as error:
        raise ContractBroken(f"entry {index} {error}") from None
