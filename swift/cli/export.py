"""`swift export`: convert a model or fold an adapter in."""

from __future__ import annotations

from collections.abc import Sequence

from swift.cli.mode import Action, start


def run(words: Sequence[str]) -> int | None:
    """The mode; returns the exit code."""
    return start("export", words, _action)


def _action() -> Action:
    from swift.models.export import run as act

    return act
