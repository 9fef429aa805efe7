"""Runs that are ended at some moment: by a signal to the command, or by the death of one of its training processes."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import psutil
from cli_runs import Cli, Run
from commands import Attempt, short_run

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL]


def signals(rng: random.Random, cli: Cli) -> Attempt:
    """A run of 30 steps that gets a signal at some moment."""
    mode = rng.choice(["rlhf", "rlhf", "ebft", "dpo", "sft"])
    words = short_run(cli, mode, max_steps=30, save_steps=rng.choice([1, 7, 100]), logging_steps=1)
    after = rng.choice([0, 0, 1, 2, 5, 9])
    return Attempt(words, signum=rng.choice(SIGNALS), after_step=after, after_s=rng.uniform(0, 0.3 if after else 3))


def rank_kills(rng: random.Random, cli: Cli) -> Attempt:
    """Two processes that train, one of which is killed."""
    mode = rng.choice(["rlhf", "ebft", "dpo", "sft"])
    words = short_run(cli, mode, max_steps=30, save_steps=rng.choice([1, 3]), logging_steps=1)
    rank = rng.randrange(2)
    return Attempt(
        words,
        variables={"NPROC_PER_NODE": "2"},
        signum=signal.SIGKILL,
        victim=lambda run: training_process(run, rank),
        after_step=rng.choice([1, 2, 5]),
        after_s=rng.uniform(0, 0.3),
    )


def training_process(run: Run, rank: int) -> psutil.Process:
    """The process of a rank below the command."""
    return next(one for one in run.family()[1:] if one.environ().get("RANK") == str(rank))


KINDS: dict[Callable[[random.Random, Cli], Attempt], int] = {signals: 20, rank_kills: 8}
"""How many of each are drawn."""
