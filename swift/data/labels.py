"""Rows of classifiers: a prompt, or a chat with its answer, and `label`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swift.data.chats import ANSWERS, ChatPlan
from swift.data.columns import ColumnPlan, as_number
from swift.data.messages import Message, parsed, prompt_of
from swift.data.records import RowError

LABEL = "label"


class ReadPlan(ChatPlan):
    """A text: a prompt, or a chat with its answer."""

    def choose(self) -> None:
        """Chooses the answer if there is one."""
        if set(ANSWERS) & set(self.names):
            super().choose()

    def with_answer(self, messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
        """The messages, with an answer where the row has one."""
        if not self.answer and messages[-1]["role"] != "assistant":
            return prompt_of(messages)
        return super().with_answer(messages, row)


class LabelPlan(ReadPlan):
    """A text, and the column `label`: a number, or a list of numbers, which becomes a list."""

    def choose(self) -> None:
        """Chooses the label, too."""
        if LABEL not in self.names:
            raise self.lacking(f"no {LABEL}", [LABEL], LABEL, beside=self.used)
        self.used.append(LABEL)
        super().choose()
        self.more_mappings.append(f"{LABEL} <- {LABEL}")

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The text and its label."""
        return super().parts(row, system)[0], {LABEL: numbers_of(row.get(LABEL))}


def numbers_of(value: Any) -> list[float]:
    """The numbers of a cell that holds one, several, or a truth value."""
    value = parsed(value, LABEL)
    items = value if isinstance(value, list) else [value]
    numbers = [float(item) if isinstance(item, bool) else as_number(item) for item in items]
    if any(number is None for number in numbers):
        raise RowError(f"no {LABEL}" if value is None else f"{LABEL} must be a number or a list of them, not {value!r}")
    return [number for number in numbers if number is not None]


def maybe_labelled(columns: Sequence[str], renames: Mapping[str, str], **named: Any) -> ColumnPlan:
    """The plan of rows that a classifier reads, with labels or without."""
    names = {renames.get(column, column) for column in columns}
    return (LabelPlan if LABEL in names else ReadPlan)(columns, renames, **named)
