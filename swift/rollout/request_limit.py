"""A bound on single requests of an engine in this process, which has none of its own (`--rollout_timeout`).

As with engines in processes of their own: a request that takes too long is aborted and sampled once more, with the same
seed; then it ends with "error", which leaves it out of training. One that had not begun is not at fault, and only waits
again. Time is counted in ticks, so that a process that was stopped blames nobody.

What joins a running stream is bounded once the clock is told of it (`RequestClock.add`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift.errors import SwiftError
from swift.rollout.engines.base import InferenceEngine
from swift.types import Completion, Request

LOOK_S = 1.0
"""Longest time between two looks."""
TRIES = 2
"""How often a request that takes too long is sampled."""


@dataclass(slots=True)
class _Pending:
    request: Request
    sent_at: float = 0.0
    tries: int = 1
    expired: bool = False


class RequestClock:
    """Aborts late requests from a thread of its own while it is entered.

    Args:
        engine: samples them.
        requests: counted from now on.
        limit_s: for each.
        on_late: called for each that had begun and was aborted.
    """

    def __init__(
        self, engine: InferenceEngine, requests: Sequence[Request], limit_s: float, on_late: Callable[[], None]
    ) -> None:
        self.engine = engine
        self.limit_s = limit_s
        self.on_late = on_late
        self._look_s = min(LOOK_S, limit_s / 10)
        self._now = 0.0
        self._pending = {request.request_id: _Pending(request) for request in requests}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request clock", daemon=True)

    def add(self, request: Request) -> None:
        """Count one more request, from now on; before it is submitted."""
        with self._lock:
            self._pending[request.request_id] = _Pending(request, self._now)

    def __enter__(self) -> RequestClock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._look_s):
            with self._lock:
                self._now += self._look_s
                late = [
                    one for one in self._pending.values() if not one.expired and self._now - one.sent_at > self.limit_s
                ]
                for one in late:
                    one.expired = True
            if late:
                with contextlib.suppress(SwiftError):  # an engine that is gone says so in its stream
                    self.engine.abort([one.request.request_id for one in late])

    def takes(self, completion: Completion) -> bool:
        """Whether this is how the request ends; otherwise it was submitted again."""
        with self._lock:
            pending = self._pending.get(completion.request_id)
            if pending is None:
                return True
            if pending.expired and completion.finish_reason == "abort":
                begun = bool(completion.token_ids)
                if begun:
                    self.on_late()
                if begun and pending.tries >= TRIES:
                    completion.finish_reason = "error"
                else:
                    pending.tries += begun
                    pending.sent_at, pending.expired = self._now, False
                    again = pending.request
                    self.engine.submit(again)
                    return False
            del self._pending[completion.request_id]
            return True
