"""Generation on a thread of its own, so that the trainer trains meanwhile.

The thread owns the engine while rounds are on their way: it submits their requests, streams completions, and hands each
one to the collector, which scores finished groups. It never runs a collective and never touches the trainer's model.
Rounds start in the order given and overlap in the engine, so that the stragglers of one do not idle it.

    start(round)  ->  ... wait(round)      the round is complete, or carries its failure
    held()            the engine is the caller's for a moment (weights are swapped in mid-flight)

It ends with `close`; an engine that makes no progress is the engine's own business to notice, and comes here as an
`EngineError`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

from swift.errors import EngineError, SwiftError
from swift.rollout.collect import RolloutCollector, Round

POLL_S = 1.0
"""How often a waiting thread looks whether the other one still lives."""


class GenerationThread:
    """Samples rounds in the background.

    Args:
        collector: takes the completions; its engine is used by this thread only, except inside `held`.
    """

    def __init__(self, collector: RolloutCollector) -> None:
        self.collector = collector
        self.busy_s = 0.0
        self._changed = threading.Condition()
        self._new: deque[Round] = deque()
        self._running: list[Round] = []
        self._wants_hold = False
        self._at_rest = True
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def in_flight(self) -> bool:
        """Whether any round is incomplete."""
        with self._changed:
            return bool(self._new or self._running)

    def start(self, current: Round) -> None:
        """Sample a round from now on; returns at once."""
        if self.collector.engine is None or not current.requests:
            return
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
                self._thread.start()
            self._new.append(current)
            self._changed.notify_all()

    def wait(self, current: Round) -> None:
        """Until the round is complete or has failed."""
        with self._changed:
            while current in self._new or current in self._running:
                self._changed.wait(POLL_S)
                if self._thread is None or not self._thread.is_alive():
                    raise EngineError("generation: its thread has ended with a round unfinished")

    def drain(self) -> None:
        """Until nothing is in flight."""
        while True:
            with self._changed:
                rest = [*self._new, *self._running]
            if not rest:
                return
            self.wait(rest[0])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The engine is the caller's inside the block; what runs in it goes on or is paused by the caller."""
        with self._changed:
            self._wants_hold = True
            while not self._at_rest and self._thread is not None and self._thread.is_alive():
                self._changed.wait(POLL_S)
        try:
            yield
        finally:
            with self._changed:
                self._wants_hold = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; rounds that run are given up."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and self.collector.engine is not None:
            with contextlib.suppress(SwiftError):  # it is being closed: whether it still listens does not matter
                self.collector.engine.abort()
            thread.join(10.0)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            started = time.monotonic()
            try:
                self._stream()
            except Exception as error:  # carried to the trainer's thread, which raises it on every rank
                self._fail(error)
            self.busy_s += time.monotonic() - started

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._at_rest = True
            self._changed.notify_all()
            while not self._closing and (self._wants_hold or not (self._new or self._running)):
                self._changed.wait(POLL_S)
            self._at_rest = False
            return not self._closing

    def _stream(self) -> None:
        """One stream of completions; rounds that come meanwhile join it."""
        engine = self.collector.engine
        assert engine is not None
        self._submit_new()
        for completion in engine.stream():
            self._deliver(completion.request_id, completion)
            self._submit_new()
            if not self._may_go_on():
                return
        self._fail_incomplete()

    def _submit_new(self) -> None:
        engine = self.collector.engine
        assert engine is not None
        while True:
            with self._changed:
                if not self._new:
                    return
                current = self._new.popleft()
                self._running.append(current)
            for request in current.requests:
                engine.check_length(request)
            for request in current.requests:
                engine.submit(request)

    def _deliver(self, request_id: str, completion: object) -> None:
        for current in self._running:
            if request_id.rpartition("/")[0] in current.waiting and request_id not in current.done:
                self.collector.take(current, completion)  # type: ignore[arg-type]
                if current.complete:
                    self._end(current)
                return

    def _may_go_on(self) -> bool:
        """Between two completions: give the engine away when asked; False when closing."""
        with self._changed:
            while self._wants_hold and not self._closing:
                self._at_rest = True
                self._changed.notify_all()
                self._changed.wait(POLL_S)
            self._at_rest = False
            return not self._closing

    def _end(self, current: Round) -> None:
        with self._changed:
            self._running.remove(current)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            for current in [*self._running, *self._new]:
                current.failure = current.failure or error
            self._running.clear()
            self._new.clear()
            self._changed.notify_all()

    def _fail_incomplete(self) -> None:
        """The engine says that nothing is outstanding; a round that still waits lost a request."""
        if self._running:
            missing = next(r.request_id for c in self._running for r in c.requests if r.request_id not in c.done)
            self._fail(EngineError(f"engine: request {missing}: it never came back; this is a defect of the engine"))
