"""Sampling of rounds: here and now, or on a thread of its own, so that the trainer trains meanwhile.

    sample(round)                          the round is complete, or carries its failure

The thread owns the engine while rounds are on their way: it submits their requests, streams completions, and hands each
one to its round, which has finished groups scored. It never runs a collective and never touches the trainer's model.
Rounds are sampled in the order given, one after the other: which requests share a batch of the engine changes the last
bits of their log-probs, so it must not depend on how fast anything was. Only where that is given up anyway (weights
that change in mid-flight) they overlap, so that the stragglers of one do not idle the engine.

    start(round)  ->  ... wait(round)      the round is complete, or carries its failure
    hold() release()  between them the engine is paused and the caller's (weights are swapped in mid-flight)

When `wait` or `drain` returns and nothing else is under way, the stream has ended and the engine is free. After a
failure no further round is sampled: each carries that failure.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from swift.errors import EngineError, SwiftError
from swift.rollout.collector import RolloutCollector
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.request_limit import RequestClock
from swift.rollout.round import Round
from swift.rollout.round_result import lost
from swift.types import Completion

POLL_S = 1.0
"""How often a waiting thread looks whether the other one still lives."""

CLOSE_S = 10.0
"""How long `close` waits for the thread; what is still in the engine then ends with the engine."""


class Generation:
    """Samples rounds of a collector; with `overlap` one may start in the background before another is complete.

    Once `start` was called, the collector's engine is used by its thread only, except between `hold` and `release`.
    """

    def __init__(self, collector: RolloutCollector, *, overlap: bool = False) -> None:
        self.collector = collector
        self.overlap = overlap
        self._changed = threading.Condition()
        self._new: deque[Round] = deque()
        self._running: list[Round] = []
        self._wants_hold = False
        self._at_rest = True
        self._closing = False
        self._failure: Exception | None = None
        self._clock: RequestClock | None = None
        self._thread: threading.Thread | None = None
        self._idle_s = 0.0

    def take_idle_s(self) -> float:
        """Seconds in which the thread had nothing to do, since the last call."""
        with self._changed:
            idle, self._idle_s = self._idle_s, 0.0
        return idle

    def sample(self, current: Round) -> None:
        """Sample a round in this thread; a failure is kept for `finish`, where every rank learns of it."""
        limit_s = self.collector.request_s
        with self.collector.around():
            if self.collector.engine is None or not current.samples_here:
                return
            self._new.append(current)
            self._clock = RequestClock(self._engine, limit_s) if limit_s is not None else None
            try:
                while self._new or self._running:
                    self._stream()
            except Exception as error:  # the other ranks wait in `finish` by now
                self._give_up(error)
            self.collector.late += self._clock.late if self._clock is not None else 0

    def samples(self, current: Round) -> bool:
        with self._changed:
            return current in self._new or current in self._running

    def start(self, current: Round) -> None:
        """Sample a round from now on; returns at once."""
        if self.collector.engine is None or not current.samples_here:
            return
        with self._changed:
            if self._failure is not None:
                current.fail(self._failure)
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
                self._thread.start()
            self._new.append(current)
            self._changed.notify_all()

    def wait(self, current: Round) -> None:
        """Until the round is complete or has failed, and the engine is free unless other rounds are under way."""
        with self._changed:
            self._wait_until(lambda: current not in self._new and current not in self._running and self._rests())

    def drain(self) -> None:
        """Until nothing is under way and the engine is free."""
        with self._changed:
            self._wait_until(lambda: not self._new and not self._running and self._rests())

    def hold(self) -> None:
        """Pause the engine and take it from the thread; what runs in it goes on after `resume` and `release`."""
        with self._changed:
            self._wants_hold = True
        if self.collector.engine is not None:
            self.collector.engine.pause()  # ends the stream between two tokens, so that the thread comes to rest
        with self._changed:
            self._wait_until(lambda: self._at_rest)

    def release(self) -> None:
        with self._changed:
            self._wants_hold = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; rounds that run are given up."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread, engine = self._thread, self.collector.engine
        deadline = time.monotonic() + CLOSE_S
        while thread is not None and engine is not None and thread.is_alive() and time.monotonic() < deadline:
            if not self._at_rest:
                with contextlib.suppress(SwiftError):  # it is being closed: whether it still listens does not matter
                    engine.abort()  # and again in a moment: the thread may have submitted more meanwhile
            thread.join(0.2)

    def _rests(self) -> bool:
        """Whether the engine is left alone, or kept busy by other rounds."""
        return self._at_rest or bool(self._new or self._running)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Holding the lock; a thread that is gone leaves its rounds with a failure."""
        while not reached():
            if self._thread is None or not self._thread.is_alive():
                self._at_rest = True
                self._end_all(EngineError("generation: its thread has ended with a round unfinished"))
                return
            self._changed.wait(POLL_S)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._stream()
            except Exception as error:  # carried to the trainer's thread, which raises it on every rank
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Every round carries the failure; the engine is free, as evaluation may need it before that is raised."""
        try:
            with contextlib.suppress(SwiftError):  # the first error is the one to show
                self._engine.abort()
                for _ in self._engine.stream():
                    pass
        finally:
            with self._changed:
                self._failure = error
                self._end_all(error)

    @property
    def _engine(self) -> InferenceEngine:
        assert self.collector.engine is not None
        return self.collector.engine

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._at_rest = True
            self._changed.notify_all()
            while not self._closing and (self._wants_hold or not (self._new or self._running)):
                began = time.monotonic()
                self._changed.wait(POLL_S)
                self._idle_s += 0.0 if self._wants_hold else time.monotonic() - began
            self._at_rest = self._closing
            return not self._closing

    def _stream(self) -> None:
        """One stream of completions: of one round, all of whose requests are submitted before it begins, or of several.

        It ends early when the engine is paused.
        """
        self._begin_new()
        self._engine.between_steps = self._move_along
        try:
            self._move_along()
            for completion in self._engine.stream():
                if self._closing:
                    return
                self._deliver(completion)
                if self.overlap:
                    self._begin_new()
        finally:
            self._engine.between_steps = None
        if self._wants_hold or self._closing:
            return
        if missing := [name for one in self._running for name in one.outstanding]:
            raise lost(missing[0])
        for current in self._running:
            current.rest()

    def _begin_new(self) -> None:
        while True:
            with self._changed:
                if not self._new or (self._running and not self.overlap):
                    return
                current = self._new.popleft()
                self._running.append(current)
            current.begin()

    def _move_along(self) -> None:
        """Submit what rounds ask for now; those that have ended leave."""
        if self._clock is not None:
            self._clock.look()
        for current in list(self._running):
            requests = current.due() if not self._wants_hold and not self._closing else []
            for request in requests:
                self._engine.check_length(request)
            for request in requests:
                if self._clock is not None:
                    self._clock.add(request)
                self._engine.submit(request)
            self._leave_if_complete(current)

    def _deliver(self, completion: Completion) -> None:
        if self._clock is not None and not self._clock.takes(completion):
            return
        current = next((one for one in self._running if one.expects(completion.request_id)), None)
        if current is None:
            raise EngineError(
                f"engine: request {completion.request_id}: it came back twice, or nobody asked for it; "
                "this is a defect of the engine"
            )
        self.collector.progress()
        if completion.episode is None:
            completion.text = self.collector.decode(completion.token_ids)
        current.take(completion)
        self._leave_if_complete(current)

    def _leave_if_complete(self, current: Round) -> None:
        if current.complete:
            with self._changed:
                self._running.remove(current)
                self._changed.notify_all()

    def _end_all(self, error: Exception) -> None:
        """Holding the lock: every round carries the failure."""
        for current in [*self._running, *self._new]:
            current.fail(error)
        self._running.clear()
        self._new.clear()
        self._changed.notify_all()
