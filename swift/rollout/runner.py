"""Samples rounds: here and now, or on a thread of its own, so that the trainer trains meanwhile.

    sample(round)                          the round is complete, or carries its failure
    start(round)  ->  ... wait(round)      likewise, in the background
    hold() release()  between them the engine is paused and the caller's (weights are swapped in mid-flight)

Nothing that runs on the thread enters a collective or touches the trainer's model. Rounds are sampled in the order
given, one after the other: which requests share a batch of the engine changes the last bits of their log-probs, so it
must not depend on how fast anything was. Only where that is given up anyway (weights that change in mid-flight) they
overlap, so that the stragglers of one do not idle the engine.

When `wait` or `drain` returns and nothing else is under way, the engine is free. After a failure no further round is
sampled in the background: each carries that failure.
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
"""How long `close` waits for the thread; what is still in the engine then ends with the engine."""
AGAIN_S = 0.2
"""How often an engine that keeps the thread is asked to end meanwhile."""


class RoundRunner:
    """Samples rounds of a collector. threaded: in the background. overlap: one may begin before another is complete."""

    def __init__(self, collector: RolloutCollector, *, threaded: bool = False, overlap: bool = False) -> None:
        self.collector, self.overlap = collector, overlap
        self.loop = RolloutLoop(threaded=threaded)
        self._turn = asyncio.Lock()
        self._under_way: dict[int, tuple[Round, Future[None]]] = {}
        self._failure: Exception | None = None
        self._idle_s = 0.0
        self._idle_since: float | None = None  # since the last round that was started ended

    def sample(self, current: Round) -> None:
        """Sample a round now; a failure is kept for `finish`, where every rank learns of it."""
        with self.collector.around():
            if not current.samples_here:
                return
            try:
                self.loop.run(self._sampled(current))
            except EngineError as error:  # of the loop's thread; the other ranks wait in `finish` by now
                current.fail(error)

    def start(self, current: Round) -> None:
        """Sample a round from now on; returns at once."""
        if not current.samples_here:
            return
        if self._failure is not None:
            current.fail(self._failure)
            return
        self._count_idle()
        self._under_way[id(current)] = current, self.loop.begin(self._in_turn(current))

    def samples(self, current: Round) -> bool:
        """Whether a round is under way."""
        return id(current) in self._under_way and not self._under_way[id(current)][1].done()

    def wait(self, current: Round) -> None:
        """Until a round is complete or has failed, and the engine is free unless other rounds are under way."""
        _, future = self._under_way.get(id(current), (current, None))
        if future is None:
            return
        try:
            self.loop.wait(future)
        except EngineError as error:
            current.fail(error)
        del self._under_way[id(current)]

    def drain(self) -> None:
        """Until nothing is under way and the engine is free."""
        for current, _ in list(self._under_way.values()):
            self.wait(current)

    def take_idle_s(self) -> float:
        """Seconds in which there was nothing to sample, since the last call."""
        self._count_idle()
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def _count_idle(self) -> None:
        now = time.monotonic()
        if self._idle_since is not None and all(future.done() for _, future in self._under_way.values()):
            self._idle_s += now - self._idle_since
            self._idle_since = now

    def hold(self) -> None:
        """Pause the engine and take it from the thread; what runs in it goes on after `resume` and `release`."""
        source = self.collector.source
        if source is None:
            return
        self.loop.do(source.hold)
        source.inner.engine.pause()
        self.loop.run(source.inner.rest())

    def release(self) -> None:
        if self.collector.source is not None:
            self.loop.do(self.collector.source.release)

    def close(self) -> None:
        """End the thread; rounds that run are given up."""
        deadline = time.monotonic() + CLOSE_S
        while self.loop.alive and not self.loop.close(AGAIN_S) and time.monotonic() < deadline:
            with contextlib.suppress(SwiftError):  # it is closed next, whether it has heard this or not
                if self.collector.engine is not None:
                    self.collector.engine.abort()

    # --- on the loop --------------------------------------------------------------------------------------------

    async def _in_turn(self, current: Round) -> None:
        async with contextlib.nullcontext() if self.overlap else self._turn:
            if self._failure is not None:
                current.fail(self._failure)
            elif (error := await self._sampled(current)) is not None:
                self._failure = error
        self._idle_since = time.monotonic()

    async def _sampled(self, current: Round) -> Exception | None:
        try:
            await current.run()
        except asyncio.CancelledError:
            current.fail(EngineError("rollout: closed with a round unfinished"))
            raise
        except Exception as error:  # the other ranks wait in `finish` by now
            current.fail(error)
            return error
        return None
