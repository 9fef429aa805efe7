"""Structured EBFT: GRPO's run, whose rewards come from features (`swift.trainers.ebft.rewards`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift.trainers.grpo.run import run as run_grpo

if TYPE_CHECKING:
    from swift.arguments import Resolved


def run(resolved: Resolved) -> int:
    """The mode; returns the exit code. Raises as `swift.trainers.grpo.run.run`."""
    return run_grpo(resolved)
