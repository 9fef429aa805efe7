"""Weight updates of a request queue: each is one job of the engine's thread, which takes buckets until the commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from swift.errors import SyncFailed, first_line
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.weights.base import Ack, Bucket, TensorInfo, WeightStream
from swift.rollout.weights.feed import Feed, pending

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenUpdate:
    """An update between its begin and its commit. number: by which calls refer to it. job: ends with its ack."""

    number: int
    feed: Feed
    stream: WeightStream
    job: Future[Ack]


class QueueUpdates:
    """Begin, send, commit, abort; nothing is sampled while an update is open.

    Args:
        do: `RequestQueue.do`.
        silence_s: an update that gets no bucket for so long is given up.
    """

    def __init__(
        self, do: Callable[[Callable[[InferenceEngine], Any]], Future[Any]], silence_s: float = float("inf")
    ) -> None:
        self._do = do
        self.silence_s = silence_s
        self._latest: OpenUpdate | None = None
        self._number = 0

    @property
    def progress(self) -> Any:
        """Another value whenever an open update has moved."""
        return self._latest and (self._latest.number, self._latest.feed.touched_at)

    def begin(self, manifest: Sequence[TensorInfo], version: int) -> OpenUpdate:
        """Start an update, after giving up one that was left open. `feed.ready` is done when the engine takes buckets.

        `feed.ready` and `job` raise as `InferenceEngine.update`.
        """
        self.abort()
        self._number += 1
        feed = Feed(self.silence_s)
        stream = WeightStream(manifest, feed, version)
        job = self._do(lambda engine: engine.update(stream))
        job.add_done_callback(feed.leave)
        update = self._latest = OpenUpdate(self._number, feed, stream, job)
        job.add_done_callback(partial(self._ended, self._number))
        return update

    def _ended(self, number: int, job: Future[Ack]) -> None:
        """Forget the update: its error refers to the engine's memory, which a rebuild must be able to free."""
        if self._latest is not None and self._latest.number == number:
            self._latest = None
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.warning("%s", first_line(error))  # a client that is gone does not read it

    def send(self, number: int, bucket: Bucket) -> Future[None]:
        """Deliver the next bucket; done when the engine has taken it."""
        return self._open(number).feed.give(bucket)

    def commit(self, number: int) -> Future[Ack]:
        """The engine switches to the new weights. Raises as `InferenceEngine.update`."""
        update = self._open(number)
        update.feed.end()
        return update.job

    def abort(self, number: int | None = None) -> Future[None]:
        """Give an update up, whichever is open with None; done when it has ended. Idempotent."""
        ended = pending()
        update = self._latest
        if update is None or number not in (None, update.number) or update.job.cancel():
            ended.set_result(None)
            return ended
        update.feed.fail(SyncFailed(f"weights: update {update.number}: was given up"))
        update.job.add_done_callback(lambda _: ended.set_result(None))
        return ended

    def renew(self, number: int) -> tuple[TensorInfo, ...]:
        """Renew the time limit of an update; its tensors that have not arrived. Raises SyncFailed: it is not open."""
        update = self._open(number)
        update.feed.touch()
        return update.stream.missing

    def _open(self, number: int) -> OpenUpdate:
        update = self._latest
        if update is None or update.number != number or update.job.done():
            raise SyncFailed(f"weights: update {number}: is not open; it ended or expired: begin another")
        return update
