"""Chats as clients of OpenAI's API write them, and answers as they read them: parts of texts, tools and their calls."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from swift.data.messages import Message, read_tool_calls
from swift.data.records import RowError
from swift.errors import ConfigError
from swift.models.template import Template
from swift.rollout.server.access import field_error
from swift.rollout.sources.multi_turn.tools import format_of, read_calls

TEXTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that are texts."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function that says nothing of its own."""


def read_chat(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as chat templates print them: texts whole, arguments of calls as objects.

    Raises Refused: a part that is no text, or a call that is none (422).
    """
    turns = []
    for number, message in enumerate(messages, start=1):
        turn = dict(message)
        if isinstance(turn.get("content"), list):
            turn["content"] = "".join(_text(part, number) for part in turn["content"])
        if turn.get("tool_calls"):
            try:
                turn["tool_calls"] = read_tool_calls(turn["tool_calls"], f"messages, turn {number}")
            except RowError as error:
                raise field_error(str(error)) from error
            turn["content"] = turn.get("content") or ""
        turns.append(turn)
    return turns


def _text(part: Any, number: int) -> str:
    if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
        raise field_error(f"messages, turn {number}: a part that is no text; leave it out")
    return str(part["text"])


def _calling(text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An answer with calls, and what it says before them."""
    made = [
        {
            "index": number,  # for streams
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {
                "name": one["name"],
                "arguments": json.dumps(one.get("arguments", {}), ensure_ascii=False),
            },
        }
        for number, one in enumerate(calls)
    ]
    return {"role": "assistant", "content": text or None, "tool_calls": made}


def call_schema(tools: Sequence[Any], wanted: str | None) -> dict[str, Any]:
    """Schema of one call that is the whole answer: of the tool of this name, or with None of any.

    Raises Refused: there is no such tool, or a part of one is missing (422).
    """
    functions: list[Mapping[str, Any]] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise field_error("tool_choice: a call is wanted, and one of the tools is no function with a name")
        if wanted in (None, function["name"]):
            functions.append(function)
    if not functions:
        raise field_error(f"tool_choice: {(wanted or 'required')[:80]}: there is no such tool; give it in tools")
    calls, parameters = [], {}
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"  # references within the parameters go on from there
        text = json.dumps(function.get("parameters") or NO_PARAMETERS).replace('"$ref": "#', f'"$ref": "{place}')
        parameters[str(number)] = json.loads(text)
        call = {"name": {"const": function["name"]}, "arguments": {"$ref": place}}
        calls.append({"type": "object", "properties": call, "required": list(call), "additionalProperties": False})
    return {"anyOf": calls, "$defs": parameters}


def forced_call(text: str) -> dict[str, Any]:
    """An answer that was held to `call_schema`; a text where it was cut off."""
    try:
        return _calling("", [json.loads(text)])
    except ValueError:
        return {"role": "assistant", "content": text}


class CallReader:
    """Reads the tool calls in answers, if the chat template writes them in a format that is known."""

    def __init__(self, template: Template) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._format: Mapping[str, Any] | None = format_of(template, None)
            self._fields = load_response_template(dict(self._format)).fields
        except ConfigError:
            self._format = None

    def message(
        self, text: str, raw: str, tools: Sequence[dict[str, Any]] | None, most: int | None = None
    ) -> dict[str, Any]:
        """An answer with its calls in `tool_calls`, or as it is where it has none that can be read.

        Args:
            text: of the answer, for a client without tools.
            raw: the same with its special tokens.
            tools: that the client offers.
            most: calls that the client takes; further ones are left out.
        """
        message = {"role": "assistant", "content": text}
        if not tools or self._format is None:
            return message
        try:
            calls = read_calls(raw, self._format, tools)
        except ValueError:  # the client sees the text
            return message
        if not calls or not all(isinstance(one.get("name"), str) for one in calls):
            return message
        return _calling(self._before_calls(raw), calls[:most])

    def _before_calls(self, raw: str) -> str:
        """What an answer says before its first call, thinking included."""
        thinking = self._fields.get("reasoning_content")
        end = thinking.close_re.search(raw) if thinking is not None and thinking.close_re is not None else None
        return raw[: self._fields["tool_calls"].open_re.search(raw, end.end() if end else 0).start()].rstrip()


call_reader = functools.lru_cache(maxsize=1)(CallReader)
"""The reader of a template, made once."""
