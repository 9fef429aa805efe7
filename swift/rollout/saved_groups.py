"""Prompts and groups as a checkpoint holds them: JSON, exact to the last bit.

Columns reach reward functions again when a prompt is tried another time, so they must come back as they were. What JSON
would change (bytes, dates, tuples, arrays) is pickled; a checkpoint is trusted as its optimizer state is.

A group that nobody trains on any more is kept for the logs alone (`seen_to_json`): what its tokens were takes most of
the room, and the logs say how many there were.
"""

from __future__ import annotations

import base64
import pickle
from dataclasses import asdict, replace
from typing import Any

from swift.types import Completion, GroupScores, Prompt, RolloutGroup

PICKLED = "pickled"
NO_TOKEN = -1
"""Stands for a token of which only the number was saved; no vocabulary has it."""


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    """A JSON-safe copy."""
    return {
        "prompt_id": prompt.prompt_id,
        "messages": _to_json(prompt.messages),
        "token_ids": [int(token) for token in prompt.token_ids],
        "columns": _to_json(prompt.columns),
    }


def prompt_from_json(state: dict[str, Any]) -> Prompt:
    """The inverse of `prompt_to_json`."""
    return Prompt(
        state["prompt_id"], _from_json(state["messages"]), list(state["token_ids"]), _from_json(state["columns"])
    )


def group_to_json(group: RolloutGroup) -> dict[str, Any]:
    """A JSON-safe copy of a group with its completions and scores."""
    return {
        "group_id": group.group_id,
        "launch_index": group.launch_index,
        "launch": group.launch,
        "prompt": prompt_to_json(group.prompt),
        "completions": [asdict(one) for one in group.completions],
        "scores": asdict(group.scores) if group.scores is not None else None,
    }


def group_from_json(state: dict[str, Any]) -> RolloutGroup:
    """The inverse of `group_to_json`."""
    return RolloutGroup(
        state["group_id"],
        state["launch_index"],
        state["launch"],
        prompt_from_json(state["prompt"]),
        [Completion(**{**one, "versions": [tuple(v) for v in one["versions"]]}) for one in state["completions"]],
        GroupScores(**state["scores"]) if state["scores"] is not None else None,
    )


def seen_to_json(group: RolloutGroup) -> dict[str, Any]:
    """What logs say of a group: texts, columns, scores and counts, without tokens and their log-probs."""
    bare = [
        replace(one, token_ids=[], logprobs=[], log_mass=[], versions=one.versions[:1]) for one in group.completions
    ]
    completions = [
        {**asdict(one), "token_ids": len(whole.token_ids)} for one, whole in zip(bare, group.completions, strict=True)
    ]
    prompt = {**prompt_to_json(group.prompt), "token_ids": len(group.prompt.token_ids)}
    return {**group_to_json(replace(group, completions=[])), "prompt": prompt, "completions": completions}


def seen_from_json(state: dict[str, Any]) -> RolloutGroup:
    """The inverse of `seen_to_json`: as many tokens as there were, each `NO_TOKEN`, and no log-probs."""

    def tokens(one: dict[str, Any]) -> list[int]:
        return [NO_TOKEN] * one["token_ids"]

    completions = [{**one, "token_ids": tokens(one)} for one in state["completions"]]
    prompt = {**state["prompt"], "token_ids": tokens(state["prompt"])}
    return group_from_json({**state, "prompt": prompt, "completions": completions})


def _to_json(value: Any) -> Any:
    """The value itself where JSON gives it back unchanged, types included."""
    return value if _survives(value) else {PICKLED: base64.b64encode(pickle.dumps(value)).decode()}


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {PICKLED} and isinstance(value[PICKLED], str):
        return pickle.loads(base64.b64decode(value[PICKLED]))
    return value


def _survives(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _survives(one) for key, one in value.items()) and set(value) != {PICKLED}
    if type(value) is list:
        return all(map(_survives, value))
    return value is None or type(value) in (bool, int, float) or (type(value) is str and _encodes(value))


def _encodes(text: str) -> bool:
    """Whether a text can be written as UTF-8; lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


__all__ = [
    "NO_TOKEN", "group_from_json", "group_to_json", "prompt_from_json", "prompt_to_json", "seen_from_json",
    "seen_to_json",
]  # fmt: skip
