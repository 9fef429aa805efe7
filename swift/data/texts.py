"""Rows that are trained on as plain text, without a chat template: documents.

`text` if there is such a column, else `messages` (or `conversations`) of assistant turns alone, joined by line breaks.
A document is one assistant turn without a prompt, by which encoders identify it. Images may stand anywhere in it
(`swift.data.media`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swift.data.chats import ChatPlan
from swift.data.columns import CHATS, PROMPTS, TEXT, ColumnPlan
from swift.data.messages import Message, read_messages, text_of, with_system
from swift.data.records import IMAGE_COLUMNS, RowError


class TextPlan(ColumnPlan):
    """Documents. Other columns are read and not used."""

    others_are = "other columns"
    optional = ()
    documents = True

    def choose(self) -> None:
        """Only the text and its images are used; names of rewards' keywords are not reserved."""
        self.used = [name for name in self.used if name in (self.prompt, *IMAGE_COLUMNS)]

    @property
    def line(self) -> str:
        """The line to print, such as `text <- messages; other columns: source`."""
        return super().line.replace("prompt <-", "text <-", 1)

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The document."""
        if system:
            raise RowError("plain text has no system prompt; leave --system out")
        messages = with_system(self._prompt_messages(row), row.get("system"), None)
        if others := [turn["role"] for turn in messages if turn["role"] != "assistant" or turn.get("tool_calls")]:
            raise RowError(f"{self.prompt} has a {others[0]} turn; plain text has assistant turns only: use swift sft")
        return [{"role": "assistant", "content": self._joined([turn["content"] for turn in messages])}], {}

    def _joined(self, contents: Sequence[Any]) -> str | list[Any]:
        """The contents of turns as one: a text, or parts if one of them has parts."""
        if all(isinstance(content, str) for content in contents):
            return text_of("\n".join(contents), self.prompt)
        parts: list[Any] = []
        for content in contents:
            parts += [{"type": "text", "text": "\n"}] if parts else []
            parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
        text = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(text) == len(parts) and not any(str(one or "").strip() for one in text):
            raise RowError(f"{self.prompt} is empty")
        return parts

    def holds_chat(self, values: Mapping[str, Any]) -> bool:
        """A document is not a chat."""
        return False

    def _choose_prompt(self) -> str:
        if found := [name for name in (TEXT, *CHATS) if name in self.names]:
            return found[0]
        likely = next((name for name in self.names if name in ("content", "document")), None)
        raise self.lacking(f"none is {TEXT}, and there are no messages", [TEXT, *CHATS], TEXT, likely=likely)

    def _prompt_messages(self, row: Mapping[str, Any]) -> list[Message]:
        value = row.get(self.prompt)
        if value is None:
            raise RowError(f"no {self.prompt}")
        if self.prompt in CHATS:
            return read_messages(value, self.prompt, images=self.images is not None)
        return [{"role": "assistant", "content": text_of(value, self.prompt)}]


def chats_or_texts(columns: Sequence[str], renames: Mapping[str, str], **named: Any) -> ColumnPlan:
    """Chats; a dataset with `text` and no column of a prompt has documents."""
    names = {renames.get(column, column) for column in columns}
    plan = TextPlan if TEXT in names and not names & {*CHATS, *PROMPTS} and not named.get("chats") else ChatPlan
    return plan(columns, renames, **named)
