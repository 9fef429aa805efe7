"""Messages in the formats of OpenAI's API: parts of text and images, tools and tool calls."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from swift.data.images import ImageSource, pixels_of
from swift.data.media import RowMedia, read_media
from swift.data.messages import Message, read_tool_calls
from swift.data.records import RowError
from swift.errors import ConfigError
from swift.models.template import Template
from swift.rollout.server.access import LIMITS, check_count, field_error
from swift.rollout.sources.multi_turn.tools import format_of, read_calls

TEXTS = ("text", "input_text", "output_text")
"""Types of the text parts of a message."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""JSON schema of a function without `parameters`."""


def _not_fetched(url: str, limit: int) -> bytes:
    raise RowError("URLs are not fetched; send the image as a data URL")


IMAGES = ImageSource(allow_urls=True, download=_not_fetched)
"""Images come in data URLs only."""


def read_chat(messages: Sequence[Mapping[str, Any]], *, sees: bool = False) -> RowMedia:
    """Convert messages to the form of chat templates: text parts joined, arguments of calls as objects.

    sees: whether there may be images, whose headers are checked.

    Raises Refused (422): a part that is not a text, an image that cannot be used, or an invalid call.
    """
    turns: list[Message] = []
    for number, message in enumerate(messages, start=1):
        turn = dict(message)
        if isinstance(turn.get("content"), list):
            parts = [_text(part, number, sees=sees) for part in turn["content"]]
            texts = [part for part in parts if isinstance(part, str)]
            turn["content"] = (
                "".join(texts)
                if len(texts) == len(parts)
                else [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
            )
        if turn.get("tool_calls"):
            try:
                turn["tool_calls"] = read_tool_calls(turn["tool_calls"], f"messages, turn {number}")
            except RowError as error:
                raise field_error(str(error)) from error
            turn["content"] = turn.get("content") or ""
        turns.append(turn)
    if not any(isinstance(turn.get("content"), list) for turn in turns):
        return RowMedia(turns)
    try:
        read = read_media({}, turns, IMAGES)
    except RowError as error:
        raise field_error(f"messages: {error}") from error
    check_count("images", len(read.images), LIMITS.images)
    check_count("pixels of the images", sum(map(pixels_of, read.images)), LIMITS.pixels)
    return read


def _text(part: Any, number: int, *, sees: bool) -> str | dict[str, Any]:
    """A text, or the part of an image as it is."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in ("image", "image_url") and sees:
        return dict(part)
    valid = "a text or an image" if sees else "a text"
    raise field_error(f"messages, turn {number}: a part that is not {valid}; leave it out")


def _calling(text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of an answer with calls. text: the answer up to its first call."""
    entries = [
        {
            "index": number,  # required in streams
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False),
            },
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": text or None, "tool_calls": entries}


def call_schema(tools: Sequence[Any], name: str | None) -> dict[str, Any]:
    """JSON schema of an answer that is one call of the tool of this name; None allows any tool.

    Raises Refused (422): there is no such tool, or a tool has no function or name.
    """
    functions: list[Mapping[str, Any]] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise field_error("tool_choice: each entry of tools must be a function with a name")
        if name in (None, function["name"]):
            functions.append(function)
    if not functions:
        raise field_error(f"tool_choice: {(name or 'required')[:80]}: there is no such tool; give it in tools")
    calls, parameters = [], {}
    for number, function in enumerate(functions):
        pointer = f"#/$defs/{number}"  # the root of the references within the parameters
        text = json.dumps(function.get("parameters") or NO_PARAMETERS).replace('"$ref": "#', f'"$ref": "{pointer}')
        parameters[str(number)] = json.loads(text)
        call = {"name": {"const": function["name"]}, "arguments": {"$ref": pointer}}
        calls.append({"type": "object", "properties": call, "required": list(call), "additionalProperties": False})
    return {"anyOf": calls, "$defs": parameters}


def forced_call(text: str) -> dict[str, Any]:
    """The message of an answer that was guided by `call_schema`; a truncated answer is a text."""
    try:
        return _calling("", [json.loads(text)])
    except ValueError:
        return {"role": "assistant", "content": text}


class CallReader:
    """Parses tool calls in answers if the format of the chat template is supported."""

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
        """The message of an answer with its calls in `tool_calls`; the text alone if no call can be parsed.

        Args:
            text: the answer without special tokens.
            raw: the answer with special tokens.
            tools: the tools of the client.
            most: maximum number of calls; further ones are left out.
        """
        message = {"role": "assistant", "content": text}
        if not tools or self._format is None:
            return message
        try:
            calls = read_calls(raw, self._format, tools)
        except ValueError:  # the client gets the text
            return message
        if not calls or not all(isinstance(call.get("name"), str) for call in calls):
            return message
        return _calling(self._before_calls(raw), calls[:most])

    def _before_calls(self, raw: str) -> str:
        """The answer up to its first call, thinking included."""
        thinking = self._fields.get("reasoning_content")
        end = thinking.close_re.search(raw) if thinking is not None and thinking.close_re is not None else None
        return raw[: self._fields["tool_calls"].open_re.search(raw, end.end() if end else 0).start()].rstrip()


call_reader = functools.lru_cache(maxsize=1)(CallReader)
"""The `CallReader` of a template, cached."""
