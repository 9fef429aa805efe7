"""Rows of process reward models: a prompt, the steps of an answer, and whether each is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swift.data.chats import ANSWERS, ChatPlan
from swift.data.columns import CHATS, ColumnPlan, truth_of
from swift.data.messages import Message, parsed, text_of
from swift.data.records import RowError

STEPS, LABELS = "completions", "labels"


class StepPlan(ColumnPlan):
    """A prompt, and the columns `completions` (texts) and `labels` (truth values), one for each step."""

    others_are = "other columns"

    def choose(self) -> None:
        """Chooses the columns of the steps, which have no other names."""
        if missing := [name for name in (STEPS, LABELS) if name not in self.names]:
            raise self.lacking(f"no {' and no '.join(missing)}", missing, missing[0], likely="...")
        self.used += [STEPS, LABELS]
        self.more_mappings = [f"steps <- {STEPS}", f"{LABELS} <- {LABELS}"]

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The prompt, and the columns of the steps and their labels."""
        messages, _ = super().parts(row, system)
        steps, labels = parsed(row.get(STEPS), STEPS), parsed(row.get(LABELS), LABELS)
        if not isinstance(steps, list) or not isinstance(labels, list) or not steps:
            raise RowError(f"{STEPS} and {LABELS} must be lists, one item for each step")
        if len(steps) != len(labels):
            raise RowError(f"{len(steps)} {STEPS} and {len(labels)} {LABELS}; each step has one label")
        texts = [text_of(step, STEPS) for step in steps]
        return messages, {STEPS: texts, LABELS: [truth_of(label, LABELS) for label in labels]}


def steps_or_chats(columns: Sequence[str], renames: Mapping[str, str], **named: Any) -> ColumnPlan:
    """The plan of rows that a reward model scores: chats, unless they have steps and labels."""
    names = {renames.get(column, column) for column in columns}
    steps = STEPS in names and not (names & {*CHATS, *ANSWERS} and LABELS not in names)
    return (StepPlan if steps else ChatPlan)(columns, renames, **named)
