"""Rows that are documents of strided EBFT: a text, a prompt with its completion, or a chat (`transforms`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift.data.columns import ColumnPlan
from swift.data.messages import Message, with_system


class DocumentPlan(ColumnPlan):
    """The columns that a transform made, unchanged; a chat gets the system turn of `--system`."""

    others_are = "document"
    optional = ()

    def _choose_prompt(self) -> str:
        return "document"

    def choose(self) -> None:
        """Nothing is reserved."""

    @property
    def line(self) -> str:
        """Such as `document <- prompt, completion`."""
        return f"document <- {', '.join(self.names)}"

    def read(self, values: Mapping[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The chat, or no messages, and the texts."""
        texts = {name: value for name, value in values.items() if name != "messages"}
        return with_system(values["messages"], None, system) if "messages" in values else [], texts
