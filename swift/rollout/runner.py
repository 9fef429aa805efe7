"""Samples rounds: synchronously, or on a background thread while the trainer trains.

    sample(round)                          returns when the round is complete or has failed
    start(round)  ->  ... wait(round)      the same in the background
    hold() release()                       the engine is paused between them, so that its weights can be updated

The background thread enters no collective and does not use the trainer's model. Rounds are sampled in the order given,
one after the other: the requests that share a batch of the engine change the last bits of each other's log-probs, so
batches must not depend on timing. With in-flight weight updates, which give up reproducibility, rounds overlap: the
longest completions of one round do not idle the engine.

When `wait` or `drain` returns and no other round is being sampled, the engine is free. After a failure no further round
is sampled in the background: each gets that failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import Future

from swift.errors import EngineError, SwiftError
from swift.rollout.collector import RolloutCollector
from swift.rollout.loop import RolloutLoop
from swift.rollout.round import Round

CLOSE_S = 10.0
"""Timeout of `close` for the thread, in seconds; outstanding requests then end with the engine."""
AGAIN_S = 0.2
"""Interval at which `close` aborts the requests of an engine that blocks the thread, in seconds."""


class RoundRunner:
    """Samples rounds of a collector.

    threaded: whether rounds can be sampled in the background. overlap: whether a round may begin before the last one
    is complete.
    """

    def __init__(self, collector: RolloutCollector, *, threaded: bool = False, overlap: bool = False) -> None:
        self.collector, self.overlap = collector, overlap
        self.loop = RolloutLoop(threaded=threaded)
        self._turn = asyncio.Lock()
        self._under_way: dict[int, tuple[Round, Future[None]]] = {}
        self._failure: Exception | None = None
        self._idle_s = 0.0
        self._idle_since: float | None = None  # end of the last round in the background

    def sample(self, current: Round) -> None:
        """Sample a round; a failure is stored for `RolloutCollector.finish`, which raises it on every rank."""
        with self.collector.around():
            if not current.samples_here:
                return
            try:
                self.loop.run(self._run(current))
            except EngineError as error:  # of the loop's thread; the other ranks are in `finish` by now
                current.fail(error)

    def start(self, current: Round) -> None:
        """Start to sample a round in the background."""
        if not current.samples_here:
            return
        if self._failure is not None:
            current.fail(self._failure)
            return
        self._count_idle()
        self._under_way[id(current)] = current, self.loop.begin(self._in_turn(current))

    def samples(self, current: Round) -> bool:
        """Whether a round is being sampled in the background."""
        return id(current) in self._under_way and not self._under_way[id(current)][1].done()

    def wait(self, current: Round) -> None:
        """Wait until a round is complete or has failed; the engine is then free, unless it samples other rounds."""
        _, future = self._under_way.get(id(current), (current, None))
        if future is None:
            return
        try:
            self.loop.wait(future)
        except EngineError as error:
            current.fail(error)
        del self._under_way[id(current)]

    def drain(self) -> None:
        """Wait for all rounds in the background; the engine is then free."""
        for current, _ in list(self._under_way.values()):
            self.wait(current)

    def take_idle_s(self) -> float:
        """Seconds without a round to sample since the last call."""
        self._count_idle()
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def _count_idle(self) -> None:
        now = time.monotonic()
        if self._idle_since is not None and all(future.done() for _, future in self._under_way.values()):
            self._idle_s += now - self._idle_since
            self._idle_since = now

    def hold(self) -> None:
        """Pause the engine and stop its use by the thread; requests continue after `resume` and `release`."""
        source = self.collector.source
        if source is None:
            return
        self.loop.do(source.hold)
        source.engine.pause()
        self.loop.run(source.engine.rest())

    def release(self) -> None:
        if self.collector.source is not None:
            self.loop.do(self.collector.source.release)

    def close(self) -> None:
        """Cancel running rounds and end the thread."""
        deadline = time.monotonic() + CLOSE_S
        while not self.loop.close(AGAIN_S) and time.monotonic() < deadline:
            with contextlib.suppress(SwiftError):  # the engine is closed next in any case
                if self.collector.engine is not None:
                    self.collector.engine.abort()

    # --- on the loop --------------------------------------------------------------------------------------------

    async def _in_turn(self, current: Round) -> None:
        async with contextlib.nullcontext() if self.overlap else self._turn:
            if self._failure is not None:
                current.fail(self._failure)
            elif (error := await self._run(current)) is not None:
                self._failure = error
        self._idle_since = time.monotonic()

    async def _run(self, current: Round) -> Exception | None:
        """Sample a round; returns its error."""
        try:
            await current.run()
        except asyncio.CancelledError:
            current.fail(EngineError("rollout: closed with a round unfinished"))
            raise
        except Exception as error:  # the other ranks are in `RolloutCollector.finish` by now
            current.fail(error)
            return error
        return None
