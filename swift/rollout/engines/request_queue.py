"""The request queue of one inference engine: any number of clients, and one thread that calls the engine.

    CompletionStream.submit --> waiting --> one coroutine for each request --> CompletionStream.take
    do(work), weight updates --> jobs --> the same thread, at rest, one after the other

It has no transport: the HTTP server and the Ray actor both wrap it. Request ids are unique per `CompletionStream`. Each
request ends exactly once, with a `Completion` or in one `Failure`, unless its stream is closed first.

A job (new weights, sleep, ...) runs at rest: no request is submitted while a job waits, and it starts after the last
completion, or at once while the engine is paused in flight. A weight update is one job, until it is committed.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import astuple, replace
from typing import Any, TypeVar

from swift.data.images import encoded
from swift.errors import EngineDead, RequestRefused, SwiftError, first_line
from swift.rollout.engines.base import Health, InferenceEngine
from swift.rollout.engines.completion_stream import Arrival, CompletionStream, Failure, QueueFull
from swift.rollout.engines.process import stack_of
from swift.rollout.engines.queue_updates import QueueUpdates
from swift.rollout.loop import RolloutLoop
from swift.types import Completion, Request

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Longest wait for the end of the thread, in seconds."""

T = TypeVar("T")


class RequestQueue:
    """See the module's docstring; starts its thread.

    Args:
        engine: the engine; the queue closes it.
        limit: maximum number of samples that wait or run; None means no limit.
        image_limit: maximum size of the images of all streams whose samples wait or run, in bytes.
        request_limit_s: longest time of a request; see `Request.limit_s`.
        silence_s: a weight update without a bucket for this time is aborted.

    Attributes:
        dead: why the engine cannot go on, or None.
        paused: whether nothing is submitted until `resume`.
        updates: its weight updates.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        limit: int | None = None,
        image_limit: float = math.inf,
        request_limit_s: float = math.inf,
        silence_s: float = math.inf,
    ) -> None:
        self.engine, self.limit, self.request_limit_s = engine, limit, request_limit_s
        self.image_limit = image_limit
        self.dead: EngineDead | None = None
        self.paused = False
        self.updates = QueueUpdates(self.do, silence_s)
        engine.after_step = self._grow
        self._loop = RolloutLoop(threaded=True, name="request queue")
        self._lock = threading.Lock()  # of the fields below
        self._streams: dict[str, CompletionStream] = {}  # by the request ids of the engine: "<stream>:<id>"
        self._waiting: dict[str, Request] = {}  # in order
        self._jobs: deque[tuple[Callable[[InferenceEngine], Any], Future[Any]]] = deque()
        self._numbers = itertools.count(1)
        self._pausing = threading.Lock()
        self._paused_in_flight = False  # the running requests are paused in flight
        self._closed = False
        self._working: Any = None  # the job that runs
        self._worker: asyncio.Task[None] | None = None
        self._failures: dict[tuple[CompletionStream, SwiftError], list[str]] = {}
        self._seen: Any = None  # signs of progress
        self._seen_at = 0.0
        self._loop.call(self._dispatch)

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that calls the engine."""
        return self._loop.thread

    # --- requests ---------------------------------------------------------------------------------------------

    def open(
        self, owner: str | None = None, notify: Callable[[], None] = lambda: None, *, grows: bool = False
    ) -> CompletionStream:
        """A stream for one client. notify: called from the queue's thread after each arrival."""
        return CompletionStream(self, next(self._numbers), owner, notify, grows=grows)

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of samples that run, and that wait."""
        with self._lock:
            return len(self._streams) - len(self._waiting), len(self._waiting)

    @property
    def running_by_owner(self) -> dict[str | None, int]:
        with self._lock:
            return dict(Counter(stream.owner for name, stream in self._streams.items() if name not in self._waiting))

    def abort(
        self, belongs: Callable[[CompletionStream], bool] = lambda stream: True, ids: Collection[str] | None = None
    ) -> int:
        """End requests of the streams that `belongs` selects, all of them with None; returns their number."""
        wanted = None if ids is None else set(ids)
        with self._lock:
            names = [
                name
                for name, stream in self._streams.items()
                if belongs(stream) and (wanted is None or _own_id(name) in wanted)
            ]
            waiting = [(name, self._streams.pop(name)) for name in names if self._waiting.pop(name, None) is not None]
            begun = [name for name in names if name in self._streams]
        for name, stream in waiting:
            stream.outstanding.discard(name)
            stream.put(Completion(_own_id(name), [], [], "abort"))
        self._loop.call(self._abort, begun)
        return len(names)

    def _abort(self, begun: list[str]) -> None:
        if begun:  # after the coroutines begun in this iteration of the loop have called the engine
            asyncio.get_running_loop().call_soon(self.engine.abort, begun)
        self._dispatch()

    def enqueue(self, stream: CompletionStream, requests: Sequence[Request]) -> None:
        self._check_alive()
        for request in requests:
            self.engine.check_length(request)
        images = {shown.image.digest: shown.image for request in requests for shown in request.images}
        image_bytes = sum(len(encoded(image)) for image in images.values())
        with self._lock:
            self._check_alive()
            count = len(self._streams)
            if self.limit is not None and count + len(requests) > self.limit:
                raise QueueFull(
                    f"queue: {count} samples wait or run and {len(requests)} came: over the limit of {self.limit}; "
                    "send fewer at a time, or try again later"
                )
            held = sum(one.image_bytes for one in set(self._streams.values())) if image_bytes else 0
            if held + image_bytes > self.image_limit:
                raise QueueFull(f"queue: the images would exceed {self.image_limit} bytes; try again later")
            named = {f"{stream.number}:{request.request_id}": request for request in requests}
            known = [name for name in named if name in self._streams]
            if known or len(named) < len(requests):
                name = _own_id(known[0]) if known else "of several"
                raise RequestRefused(name, f"request: {name}: is outstanding already; give each an id of its own")
            stream.outstanding.update(named)
            stream.image_bytes += image_bytes
            self._streams.update(dict.fromkeys(named, stream))
            for name, request in named.items():
                limit_s = min(request.limit_s, self.request_limit_s)
                self._waiting[name] = replace(request, request_id=name, limit_s=limit_s)
        self._loop.call(self._dispatch)

    async def _sample(self, request: Request) -> None:
        """Sample a request, and deliver its completion or failure."""
        name = request.request_id
        try:
            completion = await self.engine.generate(request)
            if (stream := self._remove(name)) is not None:  # it has not ended already
                stream.put(replace(completion, request_id=_own_id(name)))
        except Exception as error:
            if isinstance(error, SwiftError) and not isinstance(error, EngineDead):
                self._fail(name, error)
            else:
                self._die(error)
        self._dispatch()

    def _remove(self, name: str) -> CompletionStream | None:
        with self._lock:
            stream = self._streams.pop(name, None)
            self._waiting.pop(name, None)
        if stream is not None:
            stream.outstanding.discard(name)
        return stream

    def _fail(self, name: str, error: SwiftError) -> None:
        """End a request; requests with the same error are delivered in one `Failure`."""
        if (stream := self._remove(name)) is None:
            return
        if not self._failures:
            asyncio.get_running_loop().call_soon(self._put_failures)
        self._failures.setdefault((stream, error), []).append(_own_id(name))

    def _put_failures(self) -> None:
        failures, self._failures = self._failures, {}
        for (stream, error), names in failures.items():
            stream.put(Failure(names, error))

    def _grow(self) -> None:
        """After a step: deliver the tokens so far to streams with `grows`."""
        with self._lock:
            growing = [
                (name, stream) for name, stream in self._streams.items() if stream.grows and name not in self._waiting
            ]
        for name, stream in growing:
            stream.grow(_own_id(name), *self.engine.so_far(name))

    # --- jobs -------------------------------------------------------------------------------------------------

    def do(self, work: Callable[[InferenceEngine], Any]) -> Future[Any]:
        """Run `work` on the engine's thread, at rest; it may be a coroutine function.

        Cancelling the future before its start removes the job.

        Raises EngineDead: the engine is dead, or the queue is closed.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._check_alive()
            self._jobs.append((work, future))
        self._loop.call(self._dispatch)
        return future

    def pause_in_flight(self) -> None:
        """Stop sampling between two tokens, keeping running requests for `resume`; jobs can run meanwhile.

        Raises Unsupported: the engine cannot; nothing is paused then.
        """
        with self._pausing:
            self._check_alive()
            before, self.paused = self.paused, True
            try:
                self._loop.run(self._hold())
                self.engine.pause()
            except BaseException:
                self.paused = before
                self._loop.call(self._go_on)
                raise
            self._loop.run(self.engine.rest())
            self.paused = self._paused_in_flight = True
            self._loop.call(self._dispatch)

    async def _hold(self) -> None:
        """Hold the engine when no job uses it."""
        while self._worker is not None:
            await asyncio.wait([self._worker])
        self.engine.hold()

    def resume(self) -> Future[None]:
        """Continue after a pause, as soon as no weight update is open; idempotent."""
        if self._paused_in_flight:
            return self.do(self._resume)
        self.paused = False
        self._loop.call(self._dispatch)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _resume(self, engine: InferenceEngine) -> None:
        engine.resume()
        self._paused_in_flight = self.paused = False
        self.engine.release()

    def _go_on(self) -> None:
        self.engine.release()
        self._dispatch()

    def reset_caches(self) -> Future[None]:
        """Drop the engine's prefix cache: between two tokens if the engine can pause in flight, else at rest."""
        in_flight = self.load[0] and not self.paused and self.engine.capabilities.in_flight_updates
        if in_flight:
            self.pause_in_flight()
        future = self.do(lambda engine: engine.reset_caches())
        if in_flight:
            self.resume()
        return future

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Start the next job if the engine is at rest; without a job, begin the waiting requests."""
        with self._lock:
            if self._closed or self.dead is not None:
                return
            if self._jobs:
                at_rest = self._paused_in_flight or len(self._streams) == len(self._waiting)
                if at_rest and self._worker is None:
                    self._worker = asyncio.get_running_loop().create_task(self._run_job())
                return
            if self.paused or self._worker is not None:
                return
            waiting, self._waiting = list(self._waiting.values()), {}
        for request in waiting:
            asyncio.get_running_loop().create_task(self._sample(request))

    async def _run_job(self) -> None:
        """Run one job, while the engine is at rest."""
        await self.engine.rest()
        with self._lock:
            work, future = self._jobs.popleft() if self._jobs else (None, None)
        if work is not None and future is not None and future.set_running_or_notify_cancel():
            self._working = future
            try:
                done = work(self.engine)
                future.set_result(await done if inspect.isawaitable(done) else done)
            except BaseException as error:  # raised in the caller that waits for the job
                future.set_exception(error)
            self._working = None
        self._worker = None
        self._dispatch()

    def _die(self, error: Exception) -> None:
        """Mark the engine as dead; all requests and jobs fail, and further ones are refused."""
        if self.dead is not None:
            return
        if not isinstance(error, EngineDead):
            logger.error("the engine failed", exc_info=error)
            what = f"{type(error).__name__}: {first_line(error)}"
            error = EngineDead(f"engine: {self.engine.capabilities.name}: {what}")
        self.dead = error
        self._fail_all(error)

    def _fail_all(self, error: EngineDead) -> None:
        with self._lock:
            by_stream: dict[CompletionStream, list[str]] = {}
            for name, stream in self._streams.items():
                by_stream.setdefault(stream, []).append(name)
            jobs = list(self._jobs)
            self._jobs.clear()
        for stream, names in by_stream.items():
            arrival: Arrival = Failure([_own_id(name) for name in names if self._remove(name) is not None], error)
            stream.put(arrival)
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
        """Check for a stalled engine; call it about every second.

        Raises EngineDead: samples run without progress for `stall_s`, or one job has run for `job_s`.
        """
        running = self.load[0]
        now, signs = time.monotonic(), (self._working, self.updates.progress, running, astuple(self.engine.counters))
        idle = self._working is None and (not running or self._paused_in_flight)
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
        """End the engine; outstanding requests and jobs fail with EngineDead. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.updates.abort()
        self._fail_all(EngineDead("engine: its queue is closed; use another one"))
        self.engine.close()
        self._loop.close(CLOSE_S)


def _own_id(name: str) -> str:
    return name.partition(":")[2]
