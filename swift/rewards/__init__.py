"""Rewards: what a completion is worth, judged by users' functions, built-in functions and reward models.

    orms["name"]  ->  RewardPipeline  ->  worker processes  ->  GroupScores  ->  total(values, weights)

A function is called with the completions of whole prompts and every column of the data set. It runs in a
worker process that can be killed, so a function that hangs, crashes or raises costs the samples it failed
on and nothing else. None means "does not apply"; a failure is never a silent 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift.plugin import ORM, AsyncORM, orms
from swift.rewards.scores import total

if TYPE_CHECKING:
    from swift.rewards.pipeline import RewardPipeline

__all__ = ["ORM", "AsyncORM", "RewardPipeline", "orms", "total"]


def __getattr__(name: str) -> Any:
    # The pipeline needs the finished package: it is imported when somebody asks for it.
    if name == "RewardPipeline":
        from swift.rewards.pipeline import RewardPipeline

        return RewardPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
