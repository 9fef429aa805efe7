"""`swift bench`: swift against other trainers on equal work."""

from __future__ import annotations

from collections.abc import Sequence

from swift.cli.mode import Action, start


def run(words: Sequence[str]) -> int | None:
    """The mode; returns the exit code."""
    return start("bench", words, _action)


def _action() -> Action:
    from swift.bench.run import run as act

    return act
