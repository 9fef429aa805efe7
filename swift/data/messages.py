"""Chats: a list of `{"role", "content"}`, a system turn only at the start, with texts only, unless the model sees
images (`swift.data.media`): then a content may be a list of parts. Video and audio are refused, as parts and as columns
beside the chat.

Turns of the role `developer` are instructions, too; a chat template without that role gets them as system turns.

Other formats are converted: ShareGPT's `{"from", "value"}`, OpenAI's text parts and tool calls (`content` null,
arguments as JSON text), and the roles `tool_call` and `tool_response`, whose content is the call or its result. `loss`
of an assistant turn is whether it is trained on; OpenAI's `weight`, 0 or 1, has the same effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swift.data.records import RowError
from swift.errors import parse_json, suggest

Message = dict[str, Any]

INSTRUCTIONS = ("system", "developer")
ROLES = (*INSTRUCTIONS, "user", "assistant", "tool")
ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "tool_call",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Roles of other formats."""

MEDIA = {name: tag for tag in ("image", "video", "audio") for name in (tag, f"{tag}s")}
"""Columns of files that belong to a row's texts, and the tag `<image>` that stands for one there."""

TEXTS_ONLY = "images, video and audio are not supported; use texts only"

_KEYS = {"role", "from"}


def read_messages(value: Any, column: str = "messages", *, images: bool = False) -> list[Message]:
    """A checked copy of a row's chat; a cell of a csv file may hold it as JSON text.

    Further keys of a turn (`name`, `tool_calls`) are kept for the template, null ones dropped. images: a content that
    is a list of parts stays as it is.

    Raises:
        RowError: here and below: the value is not a valid chat.
    """
    value = parsed(value, column)
    if not isinstance(value, list):
        raise RowError(f"{column} must be a list of {{role, content}}, not {_kind(value)}")
    if not value:
        raise RowError(f"{column} is empty")
    turns: list[Message] = []
    for number, given in enumerate(value, start=1):
        turn = _turn(given, number, column, images=images)
        if turn["role"] == "system" and any(earlier["role"] != "developer" for earlier in turns):
            raise RowError(f"{column}, turn {number}: a system turn must be the first")
        if turn["role"] != "tool_call":
            turns.append(turn)
            continue
        called = {"role": "assistant", "content": "", "tool_calls": [_call(turn, number, column)]}
        if turns and turns[-1].get("tool_calls") and isinstance(given, dict) and _is_call(value[number - 2]):
            turns[-1]["tool_calls"] += called["tool_calls"]  # calls that follow each other are made at once
        else:
            turns.append(called | {key: turn[key] for key in ("loss",) if key in turn})
    return turns


def is_chat(value: Any) -> bool:
    """Whether a value looks like a chat, whatever its column is called."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and _KEYS & turn.keys() for turn in value)
    )


def chat_in(value: Any) -> Any:
    """The chat in a cell that holds one as JSON text, else the value itself: a plain text may begin with `[{`."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    try:
        chat = parse_json(value)
    except json.JSONDecodeError:
        return value
    return chat if is_chat(chat) else value


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Functions for the chat template: a list of JSON schemas, as a list or as JSON text."""
    value = parsed(value, "tools")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("tools must be a list of function schemas, or JSON text of one")
    return value


def read_history(value: Any) -> list[Message]:
    """Earlier exchanges beside a query: a list of `[query, response]`, as a list or as JSON text."""
    value = parsed(value, "history")
    if not isinstance(value, list):
        raise RowError(f"history must be a list of [query, response], not {_kind(value)}")
    turns: list[Message] = []
    for number, pair in enumerate(value, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError(f"history, exchange {number}: must be [query, response], two texts")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def parsed(value: Any, column: str, opening: str = "[") -> Any:
    """The list (or with `{` the object) in a cell that holds it as JSON text, else the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        return parse_json(value)
    except json.JSONDecodeError as error:
        raise RowError(f"{column} is text that is not JSON: {error.msg} at column {error.colno}") from error


def prompt_of(messages: list[Message]) -> list[Message]:
    """The chat without its final assistant turn: the prompt of a completion."""
    prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not any(turn["role"] in ("user", "tool") for turn in prompt):
        raise RowError("messages have no user turn to answer")
    if prompt[-1]["role"] not in ("user", "tool"):
        raise RowError(f"messages end with a {prompt[-1]['role']} turn; the prompt must end with a user turn")
    return prompt


def chat_of(messages: list[Message]) -> list[Message]:
    """The chat as it is trained on: it ends with an assistant turn, and has a prompt before it."""
    if messages[-1]["role"] != "assistant":
        raise RowError(f"messages end with a {messages[-1]['role']} turn; there is no final assistant turn to learn")
    prompt_of(messages)
    return messages


def with_system(messages: list[Message], row_system: Any, flag_system: str | None) -> list[Message]:
    """The chat with its system turn: that of the row, else that of `--system`, else none (the template's).

    row_system: the cell of the column `system`, if there is one.
    """
    system = text_of(row_system, "system") if row_system else None
    own = messages[0]["content"] if messages[0]["role"] in INSTRUCTIONS else None
    if own is not None:
        if system and system != own:
            raise RowError("a system turn in messages and a different system column; keep one of them")
        return messages
    system = system or flag_system
    return [{"role": "system", "content": system}, *messages] if system else messages


def text_of(value: Any, column: str) -> str:
    """The text in a cell."""
    if not isinstance(value, str):
        raise RowError(f"{column} must be text, not {type(value).__name__}")
    if not value.strip():
        raise RowError(f"{column} is empty")
    if not encodable(value):
        raise RowError(f"{column} is not valid Unicode text")
    return value


def check_media(row: Mapping[str, Any], messages: list[Message]) -> None:
    """Raises RowError if the row has files beside its texts, or a tag for one and a column of them."""
    texts = [str(turn["content"]) for turn in messages]
    for column, tag in MEDIA.items():
        if row.get(column):
            raise RowError(f"column {column}: {TEXTS_ONLY}, or rename it with --columns")
        if column in row and any(f"<{tag}>" in text for text in texts):
            raise RowError(f"<{tag}> beside the column {column}: {TEXTS_ONLY}")


def encodable(text: str) -> bool:
    """Whether a tokenizer can read the text: JSON escapes may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _turn(turn: Any, number: int, column: str, *, images: bool) -> Message:
    where = f"{column}, turn {number}"
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        turn = {"role": turn["from"], "content": turn["value"], **turn}
        turn = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if not isinstance(turn, dict) or "role" not in turn or not ("content" in turn or turn.get("tool_calls")):
        raise RowError(f"{where}: must be an object with role and content, not {_kind(turn)}")
    role, content = turn["role"], turn.get("content")
    role = ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES and role != "tool_call":
        raise RowError(f"{where}: unknown role {role!r}; {suggest(str(role), ROLES)}")
    extra = {key: item for key, item in turn.items() if key not in ("role", "content") and item is not None}
    if content is None and role == "assistant" and extra.get("tool_calls"):
        content = ""
    if role == "tool_call" and isinstance(content, dict):
        content = json.dumps(content)
    content = _content(content, where, images=images)
    if "tool_calls" in extra:
        extra["tool_calls"] = read_tool_calls(extra["tool_calls"], where)
    losses = {_loss(extra.pop(key), key, role, where) for key in ("loss", "weight") if key in extra}
    if len(losses) > 1:
        raise RowError(f"{where}: loss and weight contradict each other; keep one of them")
    if losses:
        extra["loss"] = losses.pop()
    return {"role": role, "content": content, **extra}


def _content(content: Any, where: str, *, images: bool) -> Any:
    """A content as text; with `images`, parts of other types stay a list."""
    parts = content if isinstance(content, list) and all(isinstance(part, dict) for part in content) else None
    if parts is not None and all(part.get("type") == "text" for part in parts):
        content = "".join(str(part.get("text", "")) for part in parts)
    elif not isinstance(content, str) and (parts is None or not images):
        raise RowError(f"{where}: {_content_problem(content)}")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content]
    if not all(encodable(text) for text in texts if isinstance(text, str)):
        raise RowError(f"{where}: content is not valid Unicode text")
    return content


def read_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as chat templates print them."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError(f"{where}: tool_calls must be a list of objects")
    read = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{where}: a tool call needs a function with a name")
        function = {**function, "arguments": _arguments(function.get("arguments", {}), where)}
        read.append({**call, "function": function} if "function" in call else function)
    return read


def _arguments(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value or "{}")
    except json.JSONDecodeError as error:
        raise RowError(f"{where}: arguments of a tool call are not JSON: {error.msg}") from error


def _call(turn: Message, number: int, column: str) -> dict[str, Any]:
    """The call that a turn of the role `tool_call` holds as JSON."""
    where = f"{column}, turn {number}"
    try:
        call = parse_json(turn["content"])
    except json.JSONDecodeError as error:
        raise RowError(f"{where}: a tool_call turn holds the call as JSON: {error.msg}") from error
    (function,) = read_tool_calls([call], where)
    return {"type": "function", "function": function.get("function", function)}


def _is_call(turn: Any) -> bool:
    role = str(turn.get("role", turn.get("from"))) if isinstance(turn, dict) else ""
    return ALIASES.get(role, role) == "tool_call"


def _loss(value: Any, key: str, role: str, where: str) -> bool:
    """Whether a turn is trained on: `loss` is true or false, `weight` 1 or 0."""
    if value not in (0, 1):
        shown = value if isinstance(value, float | int) else _kind(value)
        raise RowError(f"{where}: {key} must be {'true or false' if key == 'loss' else '0 or 1'}, not {shown}")
    if value and role not in ("assistant", "tool_call"):
        raise RowError(f"{where}: {key} is {str(value).lower()} in a {role} turn; only assistant turns are learnt from")
    return bool(value)


def _content_problem(content: Any) -> str:
    """The problem of a content that is not text."""
    parts = content if isinstance(content, list) else []
    kinds = [str(part["type"]) for part in parts if isinstance(part, dict) and part.get("type", "text") != "text"]
    return f"a part of type {kinds[0]}: {TEXTS_ONLY}" if kinds else f"content must be text, not {_kind(content)}"


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value)) or 'nothing'}"
    if value is None:
        return "null"
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
