"""A time limit on single requests of an engine in this process, which has none of its own (`--rollout_timeout`).

The rules are those of all engines (`swift.rollout.engines.requests`): a late request is aborted and sampled once more,
with the same seed; then it ends with "error", which leaves it out of training. The engine's own thread looks between
its steps, and no look counts for more than a tenth of the limit, so that a process that was stopped blames nobody.
"""

from __future__ import annotations

import time

from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.requests import RequestTable
from swift.types import Completion, Request

LOOK_S = 1.0
"""Longest time between two looks while the engine gets on."""
HERE = "here"
"""The only holder."""


class RequestClock:
    """Aborts requests of `engine` that take over `limit_s` seconds."""

    def __init__(self, engine: InferenceEngine, limit_s: float) -> None:
        self.engine, self.limit_s = engine, limit_s
        self._now, self._looked_at = 0.0, time.monotonic()
        self._table = RequestTable(limit_s=limit_s)

    @property
    def late(self) -> int:
        """Requests that were late while they were sampled, once for each try."""
        return self._table.late

    def add(self, request: Request) -> None:
        """Count one more request, from now on; before it is submitted."""
        self._table.add(request)
        self._table.send([request.request_id], HERE, self._now)

    def look(self) -> None:
        """Abort what is late; between two steps of the engine."""
        passed = time.monotonic() - self._looked_at
        if passed < min(LOOK_S, self.limit_s / 10):
            return
        self._looked_at += passed
        self._now += min(passed, self.limit_s / 10)
        late, _ = self._table.overdue(self._now)
        if late:
            self.engine.abort(late[HERE])

    def takes(self, completion: Completion) -> bool:
        """Whether this is how the request ends; otherwise it was submitted again."""
        self._table.arrive(HERE, completion)
        self._table.ready.clear()
        again = self._table.held()
        self._table.send([request.request_id for request in again], HERE, self._now)
        for request in again:
            self.engine.submit(request)
        return not again
