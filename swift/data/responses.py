"""Items of OpenAI's Responses API as a chat, and its tools as chat templates show them: rows, replies of NeMo Gym."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swift.data.messages import Message, read_messages
from swift.data.records import RowError

COLUMN = "responses_create_params"
"""Column of a row that holds the request: `input`, `tools`, sampling parameters."""
JOINTS = {"assistant": "", "system": "\n\n"}
"""Roles whose consecutive items are joined to one turn, and the separator of their texts."""


def prompt_from(params: Any) -> list[Message]:
    """The chat of a row's `input`, with every message; it must end before an assistant turn."""
    content = params.get("input") if isinstance(params, Mapping) else None
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not isinstance(items, list) or not items or not all(isinstance(item, Mapping) for item in items):
        raise RowError(f"{COLUMN} needs `input`: a text or a list of messages")
    messages = read_messages(chat_of_items(items), "input")
    if messages[-1]["role"] == "assistant":
        raise RowError(f"{COLUMN}.input ends with an assistant turn; the policy is to answer a user or a tool")
    return messages


def tools_from(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions of a request, each under the key `function` as chat templates read it."""
    tools = []
    for tool in params.get("tools") or []:
        if not isinstance(tool, Mapping):
            raise RowError(f"{COLUMN}.tools must be a list of function schemas")
        function = {name: value for name, value in tool.items() if name not in ("type", "strict") and value is not None}
        tools.append(dict(tool) if "function" in tool else {"type": "function", "function": function})
    return tools


def chat_of_items(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages, calls and their results as a chat; consecutive texts and calls of an assistant are one turn."""
    chat: list[Message] = []
    for message in (message for item in items for message in _message(item)):
        last, joint = chat[-1] if chat else {}, JOINTS.get(str(message["role"]))
        texts = last.get("content"), message["content"]
        if joint is not None and last.get("role") == message["role"] and all(isinstance(text, str) for text in texts):
            chat[-1] = {**last, "content": joint.join(filter(None, texts))}
            if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
                chat[-1]["tool_calls"] = calls
        else:
            chat.append(message)
    return chat


def _message(item: Mapping[str, Any]) -> list[Message]:
    """One item: a message, a call or its result; nothing for others, such as reasoning."""
    kind = item.get("type") or "message"
    if kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        return [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}]
    if kind == "function_call_output":
        return [{"role": "tool", "content": str(item.get("output") or "")}]
    return [{"role": item.get("role"), "content": _text(item.get("content"))}] if kind == "message" else []


def without_nulls(value: Any) -> Any:
    """A copy without keys that hold None at any depth: merged schemas of several environments fill them in."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _text(content: Any) -> Any:
    """The text of a message, whose parts may be `{"type": "input_text", "text": ...}`."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else content
