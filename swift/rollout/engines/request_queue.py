"""The request queue of one inference engine: any number of clients, and one thread that calls the engine.

    CompletionStream.submit --> table --> engine.submit, engine.stream --> CompletionStream.take
    do(work), weight updates --> jobs --> the same thread, at rest

No transport: the HTTP server and the Ray actor both wrap it. Request ids need to be unique within a `CompletionStream`
only. Each request comes back exactly once, as a `Completion` or in one `Failure`, unless its stream is closed first.

A job (new weights, sleep, ...) runs at rest: nothing new is submitted while one waits, and it starts when the last
completion is out, or at once while the engine is paused in flight. An open weight update holds the queue until it ends.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, replace
from typing import Any, TypeVar

from swift.errors import EngineDead, EngineError, RequestRefused, SwiftError, first_line
from swift.rollout.engines.base import Health, InferenceEngine
from swift.rollout.engines.completion_stream import Arrival, CompletionStream, Failure, QueueFull
from swift.rollout.engines.process import stack_of
from swift.rollout.engines.queue_updates import QueueUpdates
from swift.rollout.engines.requests import RequestTable
from swift.types import Request

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before the engine is asked again after a failure that lost no request."""
CLOSE_S = 10.0
"""Longest wait for the thread to end."""
ENGINE = "engine"
"""Holder of the requests that run."""

T = TypeVar("T")


class RequestQueue:
    """See the module's docstring; starts its thread.

    Args:
        engine: owned by the queue from now on, with its `between_steps`.
        limit: samples that may wait or run; None for no limit.

    Attributes:
        dead: why the engine cannot go on, or None.
        paused: whether nothing is submitted until `resume`.
        updates: its weight updates.
    """

    def __init__(self, engine: InferenceEngine, *, limit: int | None = None) -> None:
        self.engine = engine
        self.limit = limit
        self.dead: EngineDead | None = None
        self.paused = False
        self.updates = QueueUpdates(self.do)
        self._changed = threading.Condition()
        self._table = RequestTable(retries=False)  # by the names that the engine knows: "<stream>:<id>"
        self._streams: dict[str, CompletionStream] = {}  # by the same names
        self._growing: dict[str, CompletionStream] = {}  # of them, those that tell their tokens before the end
        self._jobs: deque[tuple[Callable[[InferenceEngine], Any], Future[Any]]] = deque()
        self._numbers = itertools.count(1)
        self._pausing = threading.Lock()
        self._kept = False  # and what ran is paused in flight
        self._resumes_later = False  # when the open update ends
        self._interrupts = 0  # pauses so far
        self._interrupting = False  # one is being carried out
        self._closed = False
        self._working: Any = None  # the job that runs
        self._seen: Any = None  # signs of progress
        self._seen_at = 0.0
        self.thread = threading.Thread(target=self._run, name="request queue", daemon=True)
        self.thread.start()

    # --- requests ---------------------------------------------------------------------------------------------

    def open(
        self, owner: str | None = None, notify: Callable[[], None] = lambda: None, *, grows: bool = False
    ) -> CompletionStream:
        """A stream for one client. notify: called from the queue's thread whenever something arrived."""
        return CompletionStream(self, next(self._numbers), owner, notify, grows=grows)

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of samples that run, and that wait."""
        return self._table.count(ENGINE), self._table.count()

    @property
    def running_by_owner(self) -> dict[str | None, int]:
        with self._changed:
            return dict(Counter(self._streams[one.request_id].owner for one in self._table.held(ENGINE)))

    def abort(
        self, belongs: Callable[[CompletionStream], bool] = lambda stream: True, ids: Collection[str] | None = None
    ) -> int:
        """End requests of the streams that `belongs` selects, all of them with None; returns their number."""
        wanted = None if ids is None else set(ids)
        with self._changed:
            names = [
                name
                for name, stream in self._streams.items()
                if belongs(stream) and (wanted is None or _own_id(name) in wanted)
            ]
            running = self._table.abort(names).get(ENGINE, [])
            done = self._done()
            self._changed.notify_all()
        _put(done)
        if running:  # the engine does not know one that is being submitted; see `_submit_waiting`
            self.engine.abort(running)
        return len(names)

    def enqueue(self, stream: CompletionStream, requests: Sequence[Request]) -> None:
        self._check_alive()
        for request in requests:
            self.engine.check_length(request)
        with self._changed:
            self._check_alive()
            count = len(self._table)
            if self.limit is not None and count + len(requests) > self.limit:
                raise QueueFull(
                    f"queue: {count} samples wait or run and {len(requests)} came: over the limit of {self.limit}; "
                    "send fewer at a time, or try again later"
                )
            named = {f"{stream.number}:{request.request_id}": request for request in requests}
            known = [name for name in named if name in self._table]
            if known or len(named) < len(requests):
                name = _own_id(known[0]) if known else "of several"
                raise RequestRefused(name, f"request: {name}: is outstanding already; give each an id of its own")
            for name, request in named.items():
                self._streams[name] = stream
                if stream.grows:
                    self._growing[name] = stream
                stream.outstanding.add(name)
                self._table.add(replace(request, request_id=name))
            self._changed.notify_all()

    def _done(self) -> list[tuple[CompletionStream, Arrival]]:
        """What is ready, and whose it is; to be brought there without a lock."""
        done: list[tuple[CompletionStream, Arrival]] = []
        while self._table.ready:
            one = self._table.ready.popleft()
            done.append((self._left(one.request_id), replace(one, request_id=_own_id(one.request_id))))
        return done

    def _left(self, name: str) -> CompletionStream:
        """The stream of a request that has come back."""
        stream = self._streams.pop(name)
        self._growing.pop(name, None)
        stream.outstanding.discard(name)
        return stream

    def _failed(self, names: Iterable[str], error: SwiftError) -> list[tuple[CompletionStream, Arrival]]:
        """The failure of requests that the table has forgotten, for each stream; as `_done`."""
        by_stream: dict[CompletionStream, list[str]] = {}
        for name in names:
            by_stream.setdefault(self._left(name), []).append(_own_id(name))
        return [(stream, Failure(ids, error)) for stream, ids in by_stream.items()]

    # --- jobs -------------------------------------------------------------------------------------------------

    def do(self, work: Callable[[InferenceEngine], T]) -> Future[T]:
        """Carry out `work` on the engine's thread, at rest. A future that is cancelled in time is not carried out.

        Raises EngineDead: the engine is gone, or the queue is closed.
        """
        future: Future[T] = Future()
        with self._changed:
            self._check_alive()
            self._jobs.append((work, future))
            self._changed.notify_all()
        return future

    def pause_in_flight(self) -> None:
        """Stop sampling between two tokens, keeping what runs for `resume`; jobs can run meanwhile.

        Raises Unsupported: the engine cannot; nothing is paused then.
        """
        with self._pausing:
            with self._changed:
                before, self.paused = self.paused, True
                self._interrupting = True
                self._interrupts += 1
            done = False
            try:
                self.engine.pause()
                done = True
            finally:
                with self._changed:
                    self._interrupting = False
                    self._kept |= done
                    self.paused = done or before
                    self._changed.notify_all()

    def resume(self) -> Future[None]:
        """Go on after a pause, as soon as no weight update is open; idempotent."""
        with self._changed:
            if self._kept:
                return self.do(self._resume)
            self.paused = False
            self._changed.notify_all()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _resume(self, engine: InferenceEngine) -> None:
        self._resumes_later = self.updates.open
        if self._resumes_later:
            return
        engine.resume()
        with self._changed:
            self._kept = self.paused = False

    def reset_caches(self) -> Future[None]:
        """Drop the engine's prefix cache: between two tokens if the engine can pause in flight, else at rest."""
        in_flight = self._table.count(ENGINE) and not self.paused and self.engine.capabilities.in_flight_updates
        if in_flight:
            self.pause_in_flight()
        future = self.do(lambda engine: engine.reset_caches())
        if in_flight:
            self.resume()
        return future

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._job_is_due or self._may_sample)
                if self._closed:
                    return
                job = self._jobs.popleft() if self._job_is_due else None
            if job is None:
                self._sample()
                continue
            work, future = job
            if future.set_running_or_notify_cancel():
                self._working = future
                try:
                    future.set_result(self._carry_out(work))
                except BaseException as error:  # belongs to whoever waits for the job
                    future.set_exception(error)
                self._working = None

    def _carry_out(self, work: Callable[[InferenceEngine], T]) -> T:
        try:
            return work(self.engine)
        finally:
            if self._resumes_later:  # if that has ended the update
                self._resume(self.engine)

    @property
    def _job_is_due(self) -> bool:
        return bool(self._jobs) and (not self._table.count(ENGINE) or self._kept)

    @property
    def _may_submit(self) -> bool:
        return bool(self._table.count()) and not (self.paused or self._jobs or self.updates.open or self._closed)

    @property
    def _may_sample(self) -> bool:
        return not self._kept and not self.updates.open and (bool(self._table.count(ENGINE)) or self._may_submit)

    def _submit_waiting(self) -> None:
        """Hand what waits to the engine; its `between_steps` while it samples, so that new requests join the batch."""
        with self._changed:
            waiting = self._table.held()
        for request in waiting:
            name = request.request_id
            with self._changed:
                if not self._may_submit:
                    return
                if not self._table.waits(request):  # aborted meanwhile
                    continue
                self._table.send([name], ENGINE)
            try:
                self.engine.submit(request)
            except EngineDead:  # ends the stream, and everything
                raise
            except SwiftError as error:
                self._refuse(name, error)
                continue
            if self._table.is_aborted(name):
                self.engine.abort([name])

    def _between_steps(self) -> None:
        self._submit_waiting()
        with self._changed:
            growing = list(self._growing.items())
        for name, stream in growing:
            stream.grow(_own_id(name), *self.engine.so_far(name))

    def _refuse(self, name: str, error: SwiftError) -> bool:
        """One request fails, the others go on; returns whether it ran."""
        with self._changed:
            failed = self._failed(self._table.remove(ENGINE, [name]), error)
        _put(failed)
        return bool(failed)

    def _sample(self) -> None:
        """Until nothing runs, or somebody pauses; failures go to those whom they concern."""
        interrupts = self._interrupts
        error: Exception | None = None
        self.engine.between_steps = self._between_steps
        try:
            self._submit_waiting()
            for completion in self.engine.stream():
                with self._changed:
                    self._table.arrive(ENGINE, completion)
                    done = self._done()
                _put(done)
        except Exception as raised:
            if isinstance(raised, RequestRefused) and self._refuse(raised.request_id, raised):
                return
            error = raised
        finally:
            self.engine.between_steps = None  # jobs may stream on their own
        with self._changed:
            self._changed.wait_for(lambda: not self._interrupting)
            if self._closed or (error is None and (self._kept or interrupts != self._interrupts)):
                return
        self._fail_lost(error)

    def _fail_lost(self, error: Exception | None) -> None:
        """Tell whose requests the engine will not deliver any more."""
        survivors: Collection[str] = ()
        if isinstance(error, SwiftError) and not isinstance(error, EngineDead):
            try:
                survivors = self.engine.recover()
            except Exception as worse:
                error = worse
        if error is not None and (isinstance(error, EngineDead) or not isinstance(error, SwiftError)):
            self._die(error)
            return
        with self._changed:
            running = [one.request_id for one in self._table.held(ENGINE)]
            lost = self._table.remove(ENGINE, [name for name in running if name not in survivors])
            if error is not None and not lost:  # they wait for valid weights; so does this thread
                self._changed.wait_for(lambda: self._closed or self._job_is_due, RETRY_S)
            why = error or EngineError("engine: its stream ended without them; a defect of the engine")
            failed = self._failed(lost, why)
        _put(failed)

    def _die(self, error: Exception) -> None:
        """The engine cannot go on, and nothing is accepted any more."""
        if not isinstance(error, EngineDead):
            logger.error("the engine failed", exc_info=error)
            what = f"{type(error).__name__}: {first_line(error)}"
            error = EngineDead(f"engine: {self.engine.capabilities.name}: {what}")
        self.dead = error
        self._fail_all(error)

    def _fail_all(self, error: EngineDead) -> None:
        with self._changed:
            failed = self._failed([*self._table.remove(ENGINE), *self._table.remove(None)], error)
            jobs = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        _put(failed)
        for _, future in jobs:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    # --- the state --------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDead("engine: its queue is closed; use another one")
        if self.dead is not None:
            raise self.dead

    def check_progress(self, stall_s: float, job_s: float) -> None:
        """To be called every second or so.

        Raises EngineDead: samples run and nothing has moved for `stall_s`, or one job has run for `job_s`.
        """
        now, signs = time.monotonic(), (self._working, self._table.count(ENGINE), astuple(self.engine.counters))
        idle = self._working is None and (not self._table.count(ENGINE) or self._kept)
        if idle or signs != self._seen:
            self._seen, self._seen_at = signs, now
        limit_s = stall_s if self._working is None else job_s
        if now - self._seen_at > limit_s:
            error = EngineDead(f"engine: no progress for {limit_s:g} s; its thread is in {stack_of(self.thread)}")
            self._die(error)
            raise error

    def health(self) -> Health:
        if self.dead is not None or self._closed:
            return Health(False, self.dead.problems[0] if self.dead is not None else "closed")
        return self.engine.health()

    def close(self) -> None:
        """End the engine; whoever waits is told. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._fail_all(EngineDead("engine: its queue is closed; use another one"))
        self.engine.close()
        self.thread.join(CLOSE_S)


def _own_id(name: str) -> str:
    return name.partition(":")[2]


def _put(arrivals: Iterable[tuple[CompletionStream, Arrival]]) -> None:
    for stream, arrival in arrivals:
        stream.put(arrival)
