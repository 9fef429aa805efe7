"""Rows of supervised training: a chat that ends with the assistant's answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift.data.columns import CHATS, ColumnPlan
from swift.data.messages import Message, chat_in, chat_of, read_messages, text_of, with_system
from swift.data.records import RowError

PARTNERS = {
    "query": "response",
    "prompt": "completion",
    "question": "answer",
    "problem": "solution",
    "instruction": "output",
}
"""Prompt columns, and the answer column that usually belongs to each."""

ANSWER = "given_answer"
"""Column of the answer of a row for a distillation, a message."""

ANSWERS = ("response", "output", "completion", "answer", "solution")


class ChatPlan(ColumnPlan):
    """Prompt and answer. Unless the chat holds the answer, it is a column too, by preference the prompt's partner."""

    others_are = "other columns"
    answer: str | None = None

    def choose(self) -> None:
        """Chooses the answer column."""
        if self.prompt in CHATS or (self.prompt in self.chats and not set(ANSWERS) & set(self.names)):
            return
        renamed = [new for new in self.here.values() if new in ANSWERS]
        partner = PARTNERS.get(self.prompt)  # a request of NeMo Gym has none
        self.answer = partner if partner in self.names and len(renamed) != 1 else self._only_answer()
        self.used.append(self.answer)
        self.more_mappings = [f"response <- {self.answer}"]

    def _only_answer(self) -> str:
        if answer := self.only_one(ANSWERS, "each could be the response", "response"):
            return answer
        what = f"none is a response ({', '.join(ANSWERS)}), and there are no messages"
        raise self.lacking(what, ANSWERS, "response", beside=[self.prompt, *self.used])

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The chat with its answer."""
        return self.with_answer(with_system(self._prompt_messages(row), row.get("system"), system), row), {}

    def with_answer(self, messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
        """The messages of the prompt column and the answer."""
        if self.answer:
            value = chat_in(row.get(self.answer))
            if value is None:
                raise RowError(f"no {self.answer}")
            if isinstance(value, list):
                messages = messages + read_messages(value, self.answer)
            else:
                messages = [*messages, {"role": "assistant", "content": text_of(value, self.answer)}]
        return chat_of(messages)


class TaughtPlan(ChatPlan):
    """Rows of a distillation: the answer is no message but a column, `ANSWER`."""

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The chat before its answer, and the answer."""
        messages, made = super().parts(row, system)
        if len(messages) < 2:
            raise RowError("no prompt before the answer")
        return messages[:-1], {**made, ANSWER: messages[-1]}
