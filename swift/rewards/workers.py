"""Reward workers: pebble's process pool, with additions for reward functions.

pebble starts the processes, passes tasks to them, kills the worker of a cancelled task and replaces workers that ended.
Added here:

* A task that exceeds its limit is cancelled, by a monotonic clock.
* A worker leads a session of its own and adopts orphans; when it is killed or has ended, its family is killed, too
  (`_Process`).
* Awaited calls are batched: a task takes all that wait, and at most half of the workers serve awaited calls. If such a
  worker dies, each of its calls is run again alone.
* If workers end `MAX_START_FAILURES` times in a row before they run anything, or a worker cannot load a plugin, the
  pool is broken: all calls raise that error, now and later.

All state is changed on the thread of one event loop; `submit` passes coroutines to it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pebble import ProcessExpired, ProcessPool

from swift.errors import RewardError, SwiftError
from swift.rewards import worker
from swift.rewards.payload import Job, LoadSpec, Outcome
from swift.signals import kept_from_children

MAX_START_FAILURES = 3
MAX_AWAITED = 64
LOG_LIMIT_BYTES = 64 << 20
_BATCH_S = 0.01
_WATCH_S = 0.5
_POLL_S = 0.1
_EXITED = 256
"""Reported instead of exit status 0 of a worker; no worker ends by itself."""

T = TypeVar("T")

_starting = threading.Lock()


class _Process(SpawnProcess):
    """A worker as pebble handles it: killed at once, with all processes that it started."""

    _ended = False

    def start(self) -> None:
        """Starts the process without the trainer's `__main__`, which would otherwise be imported there.

        Raises:
            OSError: the pool was stopped before.
        """
        main = sys.modules["__main__"]
        with _starting:
            if self._ended:
                raise OSError("the pool is stopped")  # pebble stops its pool on this error
            spec, file = main.__spec__, main.__dict__.pop("__file__", None)
            main.__spec__ = None
            try:
                with kept_from_children():
                    super().start()
            finally:
                main.__spec__ = spec
                if file is not None:
                    main.__file__ = file

    def run(self) -> None:
        """Runs in the process; returns when the trainer has exited."""
        try:
            super().run()
        finally:
            worker.end_family()

    @property
    def exitcode(self) -> int | None:
        """As of `Process`, but never 0: pebble would take a function's `os._exit(0)` for the end of an idle worker."""
        status = super().exitcode
        return _EXITED if status == 0 else status

    def terminate(self) -> None:
        """Kills the process and its family; a process that has not begun is not started any more."""
        with _starting:
            ended, self._ended = self._ended, True
        if self.pid is not None and not ended:
            self._end([self.pid])  # a process that has just begun leads no group yet

    def is_alive(self) -> bool:
        """As of `Process`; kills the family of a process that has ended."""
        alive = super().is_alive()
        if not alive and not self._ended and self.pid is not None:
            self._end([])
        return alive

    def _end(self, pids: list[int]) -> None:
        assert self.pid is not None
        self._ended = True
        pids = [*pids, *worker.family(os.getpid(), self.pid)]
        for how, pid in [(os.killpg, self.pid), *((os.kill, pid) for pid in pids)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                how(pid, signal.SIGKILL)


class _Context(SpawnContext):
    """Starts fresh interpreters, without memory or accelerators of the trainer; `started` has the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_Process] = []
        self.stopped = False

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        process = _Process(*args, **kwargs)
        with _starting:
            process._ended = self.stopped
            running = (earlier for earlier in self.started if earlier.pid is None or earlier.exitcode is None)
            self.started = [*running, process]
        return process


@dataclass(eq=False)
class _Pool:
    """A pool of pebble's. `ended` is done when it runs nothing any more."""

    context: _Context
    processes: ProcessPool
    ended: asyncio.Future[Any]

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def stop(self) -> None:
        """Kills the workers, and starts no more, before `join` deletes the semaphores that a starting worker uses."""
        self.processes.stop()
        with _starting:
            self.context.stopped = True
        for process in self.context.started:
            process.terminate()
        self.processes.join()

    async def watch(self) -> None:
        """Sets `ended` when the pool breaks, for tasks that were queued meanwhile and that pebble never completes."""
        while self.processes.active and not self.ended.done():
            await asyncio.sleep(_WATCH_S)
        self.end()


@dataclass(eq=False)
class _AwaitedBatch:
    """Awaited calls that share a task."""

    jobs: list[Job] = field(default_factory=list)
    task: asyncio.Task[list[Outcome]] | None = None


class _WorkerDied(Exception):
    """The worker of a task was killed or has died; `outcome` is that of each of its calls."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.detail)
        self.outcome = outcome


async def _time_out(task: Future[Any], limit_s: float) -> None:
    """Returns when a task has run for its limit; pebble's own limits use the wall clock, which may jump."""
    while not task.running():
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(limit_s)


class WorkerPool:
    """`num_workers` processes that run reward functions, kept alive; at least 1."""

    def __init__(self, spec: LoadSpec, *, num_workers: int) -> None:
        self._spec = spec
        self.timeout_s = spec.timeout_s
        """Limit of a call."""
        self._num_workers = num_workers
        self.log: str | None = None
        """File that the workers append their output to (kept below 64 MiB), each from its next call on; None discards
        it."""
        self._loop: asyncio.AbstractEventLoop  # while `_thread` runs it
        self._thread: threading.Thread | None = None
        self._pool: _Pool | None = None
        self._batch: _AwaitedBatch | None = None
        self._awaited_slots = asyncio.Semaphore(max(1, num_workers // 2))
        self._watch: asyncio.Task[None] | None = None
        self._start_failures = 0
        self._broken: SwiftError | None = None
        self.replaced = 0
        """Number of workers that were killed or died, and were replaced."""

    def start(self) -> None:
        """Starts the workers in the background and returns at once; has no effect if they run already."""
        if self._thread is None and self._broken is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
            self._thread.start()
            atexit.register(self.close)
            if self._spec.functions:
                self._loop.call_soon_threadsafe(lambda: self._broken or self._working_pool())

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine, which may use `call` and `call_awaited`, concurrently with others; starts the pool."""
        self.start()
        if self._thread is None:
            coroutine.close()
            assert self._broken is not None, "an open pool has started"
            raise self._broken
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Kills the workers; queued and running calls raise a `RewardError`. Repeatable."""
        self._broken = self._broken or RewardError("reward workers: closed: the run has ended")
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._pool is not None:
            self._pool.end()
            self._pool.stop()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    async def call(self, jobs: list[Job], *, grace_s: float = 0.0) -> list[Outcome]:
        """Runs calls on one worker: the outcome of all is "timeout" or "crash" if it was killed or has died.

        Raises:
            SwiftError: here and below: the pool is broken.
        """
        try:
            return await self._task(jobs, self.timeout_s + grace_s)
        except _WorkerDied as error:
            return [error.outcome] * len(jobs)

    async def call_awaited(self, job: Job) -> Outcome:
        """Runs an awaited call in one task with other waiting calls; otherwise as `call`."""
        batch = self._batch
        if batch is None or batch.task is None:
            batch = self._batch = _AwaitedBatch()
            batch.task = self._loop.create_task(self._run_batch(batch))
        place = len(batch.jobs)
        batch.jobs.append(job)
        if place + 1 == MAX_AWAITED:
            self._batch = None
        return (await batch.task)[place]

    async def _run_batch(self, batch: _AwaitedBatch) -> list[Outcome]:
        async with self._awaited_slots:
            await asyncio.sleep(_BATCH_S)
            if self._batch is batch:
                self._batch = None
            try:
                return await self._task(batch.jobs, self.timeout_s + worker.CANCEL_GRACE_S)
            except _WorkerDied as error:
                if len(batch.jobs) == 1:
                    return [error.outcome]
        # The call that blocked the event loop cannot be identified: each runs again alone.
        return await asyncio.gather(*(self._alone(job) for job in batch.jobs))

    async def _alone(self, job: Job) -> Outcome:
        async with self._awaited_slots:
            return (await self.call([job], grace_s=worker.CANCEL_GRACE_S))[0]

    async def _task(self, jobs: list[Job], limit_s: float) -> list[Outcome]:
        """Runs one task, again if the pool breaks before it is done. Raises `_WorkerDied` if its own worker died."""
        for _ in range(MAX_START_FAILURES + 1):
            pool = self._working_pool()
            try:
                scheduled = pool.processes.schedule(worker.run, args=(jobs, self.log))
            except RuntimeError:  # it has just broken
                pool.end()
                continue
            future: asyncio.Future[Any] = asyncio.wrap_future(scheduled)
            time_limit = self._loop.create_task(_time_out(scheduled, limit_s))
            await asyncio.wait([future, pool.ended, time_limit], return_when=asyncio.FIRST_COMPLETED)
            if time_limit.done() and not future.done() and not pool.ended.done():
                future.cancel()  # pebble kills the worker
                raise self._worker_died(TimeoutError())
            time_limit.cancel()
            if not future.done() or future.cancelled() or isinstance(future.exception(), BrokenProcessPool):
                future.cancel()
                pool.end()
                continue
            error = future.exception()
            if isinstance(error, TimeoutError | ProcessExpired):
                raise self._worker_died(error)
            if error is not None:
                described = f"reward workers: {type(error).__name__}: {error}"
                self._broken = error if isinstance(error, SwiftError) else RewardError(described)
                raise self._broken
            self._start_failures = 0
            self._trim_log()
            return future.result()
        self.replaced += 1
        raise _WorkerDied(Outcome("crash", detail="the workers ended whenever it ran"))

    def _worker_died(self, error: TimeoutError | ProcessExpired) -> _WorkerDied:
        self.replaced += 1
        limit_s = self.timeout_s
        if isinstance(error, TimeoutError):
            return _WorkerDied(
                Outcome("timeout", detail=f"time-out after {limit_s:g} s; worker replaced", seconds=limit_s)
            )
        return _WorkerDied(Outcome("crash", detail=f"worker {describe_exit(error.exitcode)}; worker replaced"))

    def _working_pool(self) -> _Pool:
        """The pool, or a new one if idle or starting workers died and broke it."""
        if self._broken is None and self._pool is not None and self._pool.ended.done():
            self._start_failures += 1
            threading.Thread(target=self._pool.stop, daemon=True).start()
            if self._start_failures == MAX_START_FAILURES:
                started = self._pool.context.started
                status = next((process.exitcode for process in started if process.exitcode is not None), None)
                self._broken = RewardError(
                    f"reward workers: {describe_exit(status)}: {MAX_START_FAILURES} workers in a row ended before they "
                    f"were ready; see {self.log or 'their output'}"
                )
            self._pool = None
        if self._broken is not None:
            raise self._broken
        if self._pool is None:
            context = _Context()
            processes = ProcessPool(
                max_workers=self._num_workers,
                initializer=worker.initialize,
                initargs=(self._spec, self.log),
                context=context,
            )
            self._pool = _Pool(context, processes, self._loop.create_future())
            self._watch = self._loop.create_task(self._pool.watch())  # its first look starts the processes
        return self._pool

    def _trim_log(self) -> None:
        """Keeps a function that prints without end from filling the disk."""
        path = Path(self.log) if self.log else None
        size = path.stat().st_size if path is not None and path.exists() else 0
        if path is not None and size > LOG_LIMIT_BYTES:
            os.truncate(path, 0)
            with path.open("a", encoding="utf-8") as log:
                log.write(f"[{size} bytes of worker output dropped]\n")


def memory_limit() -> int:
    """Half of the memory this process may use, in bytes, at least 4 GiB."""
    sizes = [psutil.virtual_memory().total]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(name).read_text()))
    return max(min(sizes) // 2, 4 << 30)


def describe_exit(status: int | None) -> str:
    """How a process ended, in words: "killed by SIGSEGV", "exited with status 3"."""
    if status is None:
        return "has ended"
    if status >= 0:
        return f"exited with status {status % _EXITED}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
