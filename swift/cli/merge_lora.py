"""`swift merge-lora`: fold a LoRA adapter into its base model; `swift export --merge_lora true` by its old name."""

from __future__ import annotations

from collections.abc import Sequence

from swift.cli.mode import Action, start


def run(words: Sequence[str]) -> int | None:
    """The mode; returns the exit code."""
    return start("merge-lora", words, _action)


def _action() -> Action:
    from swift.models.export import run as act

    return act
