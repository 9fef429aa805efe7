"""The requests of one client of a `RequestQueue`, and their completions and failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift.errors import EngineError, SwiftError
from swift.types import Alternatives, Completion, Request

if TYPE_CHECKING:
    from swift.rollout.engines.request_queue import RequestQueue


class QueueFull(EngineError):
    """More samples would wait or run than the queue allows; none of the submitted requests was taken."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests without a completion. error: `EngineDead` if the engine cannot go on."""

    request_ids: list[str]
    error: SwiftError


Arrival = Completion | Failure
Grown = tuple[list[int], list[float], list[Alternatives]]
"""Token ids, their log-probs, and alternatives to them if requested."""


class CompletionStream:
    """The requests of one client and their completions; made by `RequestQueue.open`. Thread-safe.

    Attributes:
        owner: the run it belongs to, or None.
        number: number of this stream, a prefix of its request ids in the engine.
        outstanding: ids of its requests in the engine, set by the queue.
        image_bytes: size of the images of its requests, set by the queue.
        grows: whether it gets tokens before their completion has ended, if the engine supports it.
    """

    def __init__(
        self, queue: RequestQueue, number: int, owner: str | None, notify: Callable[[], None], *, grows: bool = False
    ) -> None:
        self.owner, self.grows = owner, grows
        self.number = number
        self.outstanding: set[str] = set()
        self.image_bytes = 0
        self._queue, self._notify = queue, notify
        self._changed = threading.Condition()
        self._arrived: list[Arrival] = []
        self._grown: dict[str, Grown] = {}
        self._closed = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; all of them, or none. Requests submitted together enter one batch of the engine.

        Raises:
            PromptTooLong, RequestRefused, Unsupported: a request that the engine refuses.
            QueueFull: over the limit of the queue.
            EngineDead: the engine is dead, or the queue is closed.
        """
        self._queue.enqueue(self, requests)

    def take(self, timeout_s: float = 0.0) -> list[Arrival]:
        """Everything that has arrived, waiting up to `timeout_s` for the first; [] if nothing came."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._closed, timeout_s)
            arrived, self._arrived = self._arrived, []
            return arrived

    def take_grown(self) -> dict[str, Grown]:
        """All tokens so far of each request that has more of them than at the last call."""
        with self._changed:
            grown, self._grown = self._grown, {}
            return grown

    def close(self) -> None:
        """Abort outstanding requests; nothing arrives any more. Idempotent."""
        with self._changed:
            self._closed = True
            self._arrived.clear()
            self._changed.notify_all()
        if self.outstanding:
            self._queue.abort(lambda stream: stream is self)

    def grow(
        self, request_id: str, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Alternatives] = ()
    ) -> None:
        """Deliver the tokens of a request so far; called by the queue."""
        with self._changed:
            if self._closed or not token_ids:
                return
            self._grown[request_id] = (list(token_ids), list(logprobs), list(tops))
        self._notify()

    def put(self, arrival: Arrival) -> None:
        """Deliver a completion or failure; called by the queue."""
        with self._changed:
            if self._closed:
                return
            self._arrived.append(arrival)
            self._changed.notify_all()
        self._notify()
