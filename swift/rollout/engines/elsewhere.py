"""What engines have in common that live elsewhere: in a process of their own, or on another machine.

    outstanding -- completion read --> delivered        an id that is unknown from then on
    outstanding -- limit passed --> aborted --> once more, then "error"
    open -- close --> closed          alive -- `_dead` --> dead          whole -- update fails --> void

How requests travel, how a life that is over is followed by another, and how weights come there is theirs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift.errors import EngineDead, EngineError, SwiftError, SyncFailed
from swift.rollout.engines.base import EngineCounters, Health, InferenceEngine
from swift.types import Completion, Request

TRIES = 2
"""How often a request that takes too long is sampled."""


@dataclass(slots=True)
class Pending:
    """A request that has not come back.

    sent_at: to who samples it now. tries: how often it was. expired_at: when it was aborted for taking too long.
    aborted: by the caller.
    """

    request: Request
    sent_at: float = 0.0
    tries: int = 1
    expired_at: float | None = None
    aborted: bool = False

    @property
    def expired(self) -> bool:
        """Whether it was aborted for taking too long, and for nothing else."""
        return self.expired_at is not None and not self.aborted


class EngineElsewhere(InferenceEngine):
    """The states of an engine that is reached through something that can break.

    Attributes:
        name: for messages and logs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.counters = EngineCounters()
        self.late = 0
        self._before = EngineCounters()  # of the lives that are over
        self._ready: deque[Completion] = deque()
        self._void = ""
        self._paused_at: float | None = None
        self._dead: SwiftError | None = None
        self._closed = False

    @property
    def _pending(self) -> Mapping[str, Pending]:
        """What is outstanding, by id."""
        raise NotImplementedError

    def _comes_again(self, pending: Pending, completion: Completion) -> bool:
        """Whether a request that expired is to be sampled once more; otherwise its end is an "error", and counted."""
        begun = bool(completion.token_ids)
        self.late += begun
        if begun and pending.tries >= TRIES:
            completion.finish_reason = "error"
            return False
        pending.tries += begun  # one that never had its turn is not at fault
        return True

    def _finish_outstanding(self) -> None:
        """Stream to the end, for a later `stream` to deliver."""
        if self._paused_at is not None:
            return
        held: list[Completion] = []
        try:
            with self._undisturbed():
                held.extend(self.stream())
        finally:
            self._ready.extendleft(reversed(held))

    def _no_health(self) -> Health | None:
        """Why it need not be asked for its health; None when it is to be asked."""
        if self._closed or self._dead is not None:
            return Health(False, self.version, self._dead.problems[0] if self._dead is not None else "closed")
        if self._void:
            return Health(False, self.version, f"its weights are void: {self._void}")
        return None

    # --- states -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self.name}: it is closed; make a new one")

    def _check_alive(self) -> None:
        self._check_open()
        if self._dead is not None:
            raise self._dead

    def _check_whole(self) -> None:
        if self._void:
            raise SyncFailed(f"{self.name}: its weights are void: {self._void}; publish again, or rebuild it")

    def _check_at_rest(self, what: str) -> None:
        if self._pending and self._paused_at is None:
            raise EngineError(
                f"{self.name}: {what} while {len(self._pending)} requests are outstanding; wait for them, or pause "
                "with keep"
            )

    def _check_idle(self, what: str) -> None:
        """Not even a pause helps."""
        if self._pending:
            raise EngineError(f"{self.name}: {what} while {len(self._pending)} requests are outstanding; abort them")


def impossible(completion: Completion) -> str:
    """Why a completion's log-probs cannot be; "" when they can."""
    if len(completion.logprobs) != len(completion.token_ids):
        return f"{len(completion.logprobs)} log-probs for {len(completion.token_ids)} tokens"
    for place, logprob in enumerate(completion.logprobs):
        if logprob is None or not (logprob <= 0 and math.isfinite(logprob)):  # type: ignore[redundant-expr]
            return f"token {place} has log-prob {logprob}"
    return ""


def fields_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """`Capabilities` that travelled as JSON, where tuples are lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
