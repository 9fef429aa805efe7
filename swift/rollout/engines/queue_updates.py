"""Weight updates of a request queue: one at a time, in jobs on the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from swift.errors import SyncFailed
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.weights.base import Ack, Bucket, TensorInfo, WeightUpdate


class QueueUpdates:
    """Begin, send, commit, abort; nothing is sampled while an update is open."""

    def __init__(self, do: Callable[[Callable[[InferenceEngine], Any]], Future[Any]]) -> None:
        self._do = do
        self._update: WeightUpdate | None = None
        self._number = 0  # of the latest update
        self._touched_at = 0.0

    @property
    def open(self) -> bool:
        return self._update is not None

    @property
    def idle_s(self) -> float | None:
        """Seconds since the open update had its last bucket; None if none is open."""
        return None if self._update is None else time.monotonic() - self._touched_at

    def begin(self, manifest: Sequence[TensorInfo], version: int) -> Future[int]:
        """Start an update, aborting one that was left open; its number, for the calls below.

        Raises as `InferenceEngine.begin_update`.
        """

        def begin(engine: InferenceEngine) -> int:
            self._end(abort=True)
            self._touched_at = time.monotonic()
            self._number, self._update = self._number + 1, engine.begin_update(manifest, version)
            return self._number

        return self._do(begin)

    def send(self, number: int, read: Callable[[tuple[TensorInfo, ...]], Bucket]) -> Future[None]:
        """Deliver the next bucket; `read` runs on the engine's thread and gets the tensors that are still missing.

        A failure aborts the update.
        """

        def send(update: WeightUpdate) -> None:
            update.send(read(self.missing(number)))
            self._touched_at = time.monotonic()

        return self._step(number, send)

    def commit(self, number: int) -> Future[Ack]:
        """The engine switches to the new weights; a failure aborts the update. See `WeightUpdate.commit`."""

        def commit(update: WeightUpdate) -> Ack:
            ack = update.commit()
            self._end(abort=False)
            return ack

        return self._step(number, commit)

    def _step(self, number: int, work: Callable[[WeightUpdate], Any]) -> Future[Any]:
        def step(engine: InferenceEngine) -> Any:
            update = self._current(number)
            try:
                return work(update)
            except BaseException:
                self._end(abort=True)
                raise

        return self._do(step)

    def abort(self, number: int | None = None) -> Future[None]:
        """Give an update up, whichever is open with None; idempotent."""

        def abort(engine: InferenceEngine) -> None:
            if self._update is not None and number in (None, self._number):
                self._end(abort=True)

        return self._do(abort)

    def missing(self, number: int) -> tuple[TensorInfo, ...]:
        """Tensors of an update that have not arrived. Asking is a sign of life. Raises SyncFailed: it is not open."""
        update = self._current(number)
        self._touched_at = time.monotonic()
        return update.manifest[update.sent :]

    def _current(self, number: int) -> WeightUpdate:
        if self._update is None or self._number != number:
            raise SyncFailed(f"weights: update {number}: is not open; it ended or expired: begin another")
        return self._update

    def _end(self, *, abort: bool) -> None:
        ended, self._update = self._update, None
        if ended is not None and abort:
            ended.abort()
