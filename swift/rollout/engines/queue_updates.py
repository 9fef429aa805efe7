"""Weight updates of a request queue: one at a time, in jobs on the engine's thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from swift.errors import SyncFailed
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.weights.base import Ack, Bucket, TensorInfo, WeightUpdate


@dataclass(eq=False, slots=True)
class _Update:
    number: int
    update: WeightUpdate
    touched_at: float = field(default_factory=time.monotonic)


class QueueUpdates:
    """Begin, send, commit, abort; nothing is sampled while an update is open.

    Args:
        do: `RequestQueue.do`.
        ended: called on the engine's thread when an update has ended.

    Attributes:
        void: why the engine's weights belong to no version since an update failed; "" when they do.
    """

    def __init__(
        self, do: Callable[[Callable[[InferenceEngine], Any]], Future[Any]], ended: Callable[[], None]
    ) -> None:
        self._do, self._ended = do, ended
        self._numbers = itertools.count(1)
        self._update: _Update | None = None
        self.void = ""

    @property
    def open(self) -> bool:
        """Whether one has begun and not ended."""
        return self._update is not None

    @property
    def idle_s(self) -> float | None:
        """Seconds since the open update had its last bucket; None if none is open."""
        update = self._update
        return None if update is None else time.monotonic() - update.touched_at

    def begin(self, manifest: Sequence[TensorInfo], version: int) -> Future[int]:
        """Start an update, aborting one that was left open.

        Returns:
            The number of the update, for the calls below. Raises as `InferenceEngine.begin_update`.
        """

        def begin(engine: InferenceEngine) -> int:
            self._end(abort=True)
            self._update = _Update(next(self._numbers), engine.begin_update(manifest, version))
            return self._update.number

        return self._do(begin)

    def send(self, number: int, read: Callable[[tuple[TensorInfo, ...]], Bucket]) -> Future[None]:
        """Deliver the next bucket; `read` runs on the engine's thread and gets the tensors that are still missing.

        A failure aborts the update.
        """

        def send(engine: InferenceEngine) -> None:
            current = self._current(number)
            try:
                bucket = read(self.missing(number))
                self.void = f"the update to version {current.update.version} has not arrived whole"
                current.update.send(bucket)
            except BaseException:
                self._end(abort=True)
                raise
            current.touched_at = time.monotonic()

        return self._do(send)

    def commit(self, number: int) -> Future[Ack]:
        """The engine switches to the new weights; a failure aborts the update. See `WeightUpdate.commit`."""

        def commit(engine: InferenceEngine) -> Ack:
            current = self._current(number)
            try:
                ack = current.update.commit()
            except BaseException:
                self._end(abort=True)
                raise
            self._end(abort=False)
            self.void = ""
            return ack

        return self._do(commit)

    def abort(self, number: int | None = None) -> Future[None]:
        """Give an update up, whichever is open with None; idempotent."""

        def abort(engine: InferenceEngine) -> None:
            if self._update is not None and number in (None, self._update.number):
                self._end(abort=True)

        return self._do(abort)

    def missing(self, number: int) -> tuple[TensorInfo, ...]:
        """Tensors of an update that have not arrived. Asking is a sign of life.

        Raises:
            SyncFailed: it is not open.
        """
        current = self._current(number)
        current.touched_at = time.monotonic()
        return current.update.manifest[current.update.sent :]

    def _current(self, number: int) -> _Update:
        if self._update is None or self._update.number != number:
            raise SyncFailed(f"weights: update {number}: is not open; it ended or expired: begin another")
        return self._update

    def _end(self, *, abort: bool) -> None:
        ended, self._update = self._update, None
        if ended is not None and abort:
            ended.update.abort()
        self._ended()
