"""`swift reward-test`: try reward functions on a dataset, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from swift.cli.mode import Action, start


def run(words: Sequence[str]) -> int | None:
    """The mode; returns the exit code."""
    return start("reward-test", words, _action)


def _action() -> Action:
    from swift.rewards.reward_test import run as act

    return act
