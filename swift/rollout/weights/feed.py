"""Buckets from one thread to another, which takes them as an iterator."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from swift.errors import SyncFailed, first_line
from swift.rollout.weights.base import Bucket


class Feed:
    """The giver calls `give` for each bucket, waits for `ready` before the next one, and ends with `end` or `fail`.

    Args:
        silence_s: longest time without a bucket before the receiver gets SyncFailed.

    Attributes:
        ready: done when the receiver asks for the next bucket, so that memory of the last one may be reused. Raises
            what the receiver has ended with.
    """

    def __init__(self, silence_s: float = float("inf")) -> None:
        self.ready = pending()
        self.silence_s = silence_s
        self._items: queue.SimpleQueue[Bucket | Exception | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: Exception | None = None
        self.touched_at = time.monotonic()

    def give(self, bucket: Bucket) -> Future[None]:
        """Hand the next bucket over; returns `ready`. Raises SyncFailed: the last one is not taken yet."""
        with self._lock:
            if not self.ready.done():
                raise SyncFailed("weights: a bucket came before the last one was taken; send one at a time")
            if self._ended is None:
                self.ready = pending()
                self.touch()
                self._items.put(bucket)
            return self.ready

    def end(self) -> None:
        """All buckets were given."""
        self._items.put(None)

    def fail(self, error: Exception) -> None:
        """No more buckets come; `error` is raised in the receiver."""
        self._items.put(error)

    def touch(self) -> None:
        """The giver is still there."""
        self.touched_at = time.monotonic()

    def __iter__(self) -> Iterator[Bucket]:
        while True:
            self.touch()
            with self._lock:
                if not self.ready.done():
                    self.ready.set_result(None)
            item = self._next()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item
            del item  # before the next one is gathered

    def _next(self) -> Bucket | Exception | None:
        while (left_s := self.touched_at + self.silence_s - time.monotonic()) > 0:
            try:
                return self._items.get(timeout=min(left_s, threading.TIMEOUT_MAX))
            except queue.Empty:
                pass
        return SyncFailed(f"weights: no bucket came for {self.silence_s:g} s; the update is given up")

    def leave(self, receiver: Future[Any]) -> None:
        """The receiver, which has ended, takes no more buckets: a callback of its future."""
        error: BaseException = SyncFailed("weights: the update was not begun")
        if not receiver.cancelled():
            error = receiver.exception() or SyncFailed("weights: the update is over; begin another")
        with self._lock:
            self._ended = error if isinstance(error, Exception) else SyncFailed(f"weights: {first_line(error)}")
            if self.ready.done():
                self.ready = pending()
            self.ready.set_exception(self._ended)


def pending() -> Future[None]:
    """A future that cannot be cancelled, as by a caller that stops waiting for it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
