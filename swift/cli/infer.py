"""`swift infer`: generate, interactively or over a dataset."""

from __future__ import annotations

from collections.abc import Sequence

from swift.cli.mode import Action, start


def run(words: Sequence[str]) -> int | None:
    """The mode; returns the exit code."""
    return start("infer", words, _action, workers=True)


def _action() -> Action:
    from swift.rollout.infer import run as act

    return act
