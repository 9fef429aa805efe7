"""Rewards: what a completion is worth, judged by users' functions, built-in functions and reward models.

    orms["name"]  ->  RewardPipeline  ->  worker processes  ->  GroupScores

A function is called with the completions of whole prompts and every column of the data set. It runs in a
worker process that can be killed, so a function that hangs, crashes or raises costs the samples it failed
on and nothing else. None means "does not apply"; a failure is never a silent 0.
"""

from swift.plugin import ORM, AsyncORM, orms

__all__ = ["ORM", "AsyncORM", "orms"]
