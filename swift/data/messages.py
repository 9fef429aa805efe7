"""What a chat is: a list of `{"role", "content"}`, a system turn only in front, texts only."""

from __future__ import annotations

import json
from typing import Any

from swift.data.records import RowError
from swift.errors import suggest

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")


def read_messages(value: Any, column: str = "messages") -> list[Message]:
    """A checked copy of a row's chat; a cell of a csv file may hold it as JSON text.

    Further keys of a turn (`name`, `tool_calls`) are kept for the template, null ones dropped.

    Raises:
        RowError: with the number of the turn that is wrong.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"{column} is text that is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, list):
        raise RowError(f"{column} must be a list of {{role, content}}, not {_kind(value)}")
    if not value:
        raise RowError(f"{column} is empty")
    return [_turn(turn, number, column) for number, turn in enumerate(value, start=1)]


def prompt_of(messages: list[Message]) -> list[Message]:
    """The chat without its final assistant turn: what a completion is sampled for.

    Raises:
        RowError: nothing is left to answer.
    """
    prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not any(turn["role"] in ("user", "tool") for turn in prompt):
        raise RowError("messages have no user turn to answer")
    if prompt[-1]["role"] not in ("user", "tool"):
        raise RowError(f"messages end with a {prompt[-1]['role']} turn; the prompt must end with a user turn")
    return prompt


def chat_of(messages: list[Message]) -> list[Message]:
    """The chat as it is learnt from: it ends with an assistant turn.

    Raises:
        RowError: it does not, or it holds nothing but that.
    """
    if messages[-1]["role"] != "assistant":
        raise RowError(f"messages end with a {messages[-1]['role']} turn; there is no final assistant turn to learn")
    prompt_of(messages)
    return messages


def with_system(messages: list[Message], row_system: str | None, flag_system: str | None) -> list[Message]:
    """The chat with its system turn: that of the row, else that of `--system`, else none (the template's).

    Raises:
        RowError: the row has two different ones.
    """
    own = messages[0]["content"] if messages[0]["role"] == "system" else None
    if own is not None:
        if row_system and row_system != own:
            raise RowError("a system turn in messages and a different system column; keep one of them")
        return messages
    system = row_system or flag_system
    return [{"role": "system", "content": system}, *messages] if system else messages


def encodable(text: str) -> bool:
    """Whether a tokenizer can read the text: JSON escapes can smuggle in half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _turn(turn: Any, number: int, column: str) -> Message:
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise RowError(f"{column}, turn {number}: must be an object with role and content, not {_kind(turn)}")
    role, content = turn["role"], turn["content"]
    if role not in ROLES:
        raise RowError(f"{column}, turn {number}: unknown role {role!r}; {suggest(str(role), ROLES)}")
    if role == "system" and number > 1:
        raise RowError(f"{column}, turn {number}: a system turn must be the first")
    if not isinstance(content, str):
        raise RowError(f"{column}, turn {number}: content must be text, not {_kind(content)}")
    if not encodable(content):
        raise RowError(f"{column}, turn {number}: content is not valid Unicode text")
    extra = {key: item for key, item in turn.items() if key not in ("role", "content") and item is not None}
    return {"role": role, "content": content, **extra}


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value)) or 'nothing'}"
    if value is None:
        return "null"
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
