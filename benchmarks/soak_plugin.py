"""Faults inside of the processes of a soak (`soak.py`): external plugin of trainers, reward workers and engines.

`$SOAK_FAULTS` is a folder of tickets: files `<place>.<kind>.<number>`. The process that removes a ticket fails once in
that way; places are `reward`, `trainer` and `engine`. `clock` in the folder holds how many seconds `time.time` is off.
"""

import asyncio
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from swift.plugin import ORM, AsyncORM, inference_backends, orms

FAULTS = Path(os.environ["SOAK_FAULTS"])


clock, clock_ns = time.time, time.time_ns


def ahead_s() -> int:
    """Seconds that the wall clock is ahead of the machine's."""
    try:
        return int((FAULTS / "clock").read_text())
    except FileNotFoundError:
        return 0


def let_clock_jump() -> None:
    """From here on this process reads that clock; swift takes it back from a plugin that does so at its import."""
    time.time = lambda: clock() + ahead_s()
    time.time_ns = lambda: clock_ns() + ahead_s() * 10**9


def take(place: str) -> str | None:
    """The kind of a ticket of this place, which nobody takes again; None if there is none."""
    let_clock_jump()
    for ticket in FAULTS.glob(f"{place}.*"):
        try:
            ticket.unlink()
        except FileNotFoundError:  # another process was faster
            continue
        return ticket.name.split(".")[1]
    return None


def stand_still() -> None:
    """Never returns."""
    while True:
        time.sleep(1)


# --- rewards --------------------------------------------------------------------------------------------------------


def odd_shares(completions: list[str], solution: list[str]) -> list[float]:
    """Shares of odd characters; all groups of each fifth prompt have equal ones."""
    shares = [sum(ord(character) % 2 for character in text) / max(1, len(text)) for text in completions]
    return [0.5 if int(one) % 5 == 0 else share for share, one in zip(shares, solution, strict=True)]


class Odd(ORM):
    """Share of odd characters, unless a ticket says otherwise."""

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        """One reward each."""
        values = odd_shares(completions, solution)
        match take("reward"):
            case "slow":
                time.sleep(2)
            case "hang":
                stand_still()
            case "raise":
                raise RuntimeError("the judge is away")
            case "nan":
                return [math.nan] * len(values)
            case "count":
                return values[1:]
            case "exit":
                os._exit(0)
        return values


class Later(AsyncORM):
    """Half of that share, after a moment."""

    async def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        """One reward each."""
        match take("awaited"):
            case "hang":
                await asyncio.sleep(1e6)
            case "block":
                stand_still()
            case "raise":
                raise RuntimeError("the judge is away")
        await asyncio.sleep(0.01)
        return [share / 2 for share in odd_shares(completions, solution)]


orms["odd"], orms["later"] = Odd, Later


# --- engines --------------------------------------------------------------------------------------------------------


def failing_engine(spec: Any) -> Any:
    """The transformers engine, whose decode steps fail by ticket."""
    import torch

    from swift.rollout.engines.transformers import TransformersEngine, build

    class Failing(TransformersEngine):
        def advance(self) -> Any:
            match take("engine"):
                case "slow":
                    time.sleep(3)
                case "hang":
                    stand_still()
                case "raise":
                    raise RuntimeError("a fault of the soak")
                case "oom":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                case "exit":
                    os._exit(1)
            return super().advance()

    engine = build(spec)
    engine.__class__ = Failing
    return engine


inference_backends["soaked"] = failing_engine


# --- the trainer ------------------------------------------------------------------------------------------------------


def fail_in_passes() -> None:
    """Make passes with gradient run out of memory, or end in a gradient that is not finite, by ticket."""
    import torch

    from swift.trainers.grpo import logprobs

    usual = logprobs.score_tokens

    def score_tokens(model: Any, *args: Any, **kwargs: Any) -> Any:
        kind = take("trainer") if torch.is_grad_enabled() else None
        if kind == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if kind == "nan":
            weight = next(one for one in model.parameters() if one.requires_grad)
            once = weight.register_hook(lambda gradient: (once.remove(), gradient * math.nan)[1])
        if kind == "hang":
            stand_still()
        return usual(model, *args, **kwargs)

    logprobs.score_tokens = score_tokens


if "swift.cli.main" in sys.modules:  # neither a reward worker nor an engine's actor
    fail_in_passes()
