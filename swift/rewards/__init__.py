"""Rewards: scores of completions by users' functions, built-in functions and reward models.

    orms["name"]  ->  RewardPipeline  ->  worker processes  ->  GroupScores

A function is called with the completions of whole prompts and every column of the dataset. It runs in a worker process
that can be killed, so a function that hangs, crashes or raises excludes only the samples it failed on. None means "does
not apply"; a failure never becomes a score of 0.
"""

from swift.plugin import ORM, AsyncORM, MultiTurnScheduler, multi_turns, orms, rm_plugins

__all__ = ["ORM", "AsyncORM", "MultiTurnScheduler", "multi_turns", "orms", "rm_plugins"]
