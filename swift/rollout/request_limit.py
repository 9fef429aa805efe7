"""A time limit on single requests of an engine in this process, which has none of its own (`--rollout_timeout`).

The rules are those of all engines (`swift.rollout.engines.requests`): a late request is aborted and sampled once more,
with the same seed; then it ends with "error", which leaves it out of training. Time is counted in ticks, so that a
process that was stopped blames nobody.
"""

from __future__ import annotations

import contextlib
import threading

from swift.errors import SwiftError
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.requests import RequestTable
from swift.types import Completion, Request

LOOK_S = 1.0
"""Longest time between two looks."""
HERE = "here"
"""The only holder."""


class RequestClock:
    """Aborts requests of `engine` that take over `limit_s` seconds, from a thread of its own while it is entered."""

    def __init__(self, engine: InferenceEngine, limit_s: float) -> None:
        self.engine = engine
        self._look_s = min(LOOK_S, limit_s / 10)
        self._now = 0.0
        self._table = RequestTable(limit_s=limit_s)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request clock", daemon=True)

    @property
    def late(self) -> int:
        """Requests that were late while they were sampled, once for each try."""
        return self._table.late

    def add(self, request: Request) -> None:
        """Count one more request, from now on; before it is submitted."""
        with self._lock:
            self._table.add(request)
            self._table.send([request.request_id], HERE, self._now)

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
                late, _ = self._table.overdue(self._now)
            if late:
                with contextlib.suppress(SwiftError):  # an engine that is gone says so in its stream
                    self.engine.abort(late[HERE])

    def takes(self, completion: Completion) -> bool:
        """Whether this is how the request ends; otherwise it was submitted again."""
        with self._lock:
            self._table.arrive(HERE, completion)
            self._table.ready.clear()
            again = self._table.held()
            self._table.send([request.request_id for request in again], HERE, self._now)
        for request in again:
            self.engine.submit(request)
        return not again
