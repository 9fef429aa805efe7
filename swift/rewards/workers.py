"""The reward workers: pebble's process pool, with what reward functions need around it.

pebble starts the processes, hands tasks to them, kills the worker of a task that is cancelled and replaces workers that
ended. Added here:

* A task that is late is cancelled, by a clock that does not jump.
* A worker leads a session of its own and adopts orphans; when it is killed or has ended, its family goes too
  (`_Process`).
* Awaited calls gather: a task takes all that wait, and at most half of the workers serve awaited calls. If such a
  worker is lost, each of its calls is run again alone.
* Workers that end `MAX_START_FAILURES` times in a row before they run anything, and a plugin that a worker cannot load,
  break the pool: all calls raise that error, now and later.

All bookkeeping happens on the thread of one event loop; `submit` hands coroutines to it.
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
_GATHER_S = 0.01
_LOOK_S = 0.5
_POLL_S = 0.1
_LEFT = 256
"""Exit status 0 of a worker; none ends by itself."""

T = TypeVar("T")

_starting = threading.Lock()


class _Process(SpawnProcess):
    """A worker as pebble handles it: killed at once, with all that it started."""

    _ended = False

    def start(self) -> None:
        """Starts the process without the trainer's `__main__`, which would be imported there.

        Raises:
            OSError: the pool was stopped before.
        """
        main = sys.modules["__main__"]
        with _starting:
            if self._ended:
                raise OSError("the pool is stopped")  # pebble's sign that its pool is over
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
        """In the process; returns when the trainer has gone."""
        try:
            super().run()
        finally:
            worker.end_family()

    @property
    def exitcode(self) -> int | None:
        """As of `Process`; a reward function's `os._exit(0)` is not taken for the end of an idle worker by pebble."""
        status = super().exitcode
        return _LEFT if status == 0 else status

    def terminate(self) -> None:
        """Kills the process and its family; one that has not begun never will."""
        with _starting:
            ended, self._ended = self._ended, True
        if self.pid is not None and not ended:
            self._end([self.pid])  # a process that has just begun leads no group yet

    def is_alive(self) -> bool:
        """As of `Process`; what is left of a process that has ended is killed."""
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
    """Fresh interpreters: no memory, no accelerator of the trainer. Remembers the processes that it started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_Process] = []
        self._stopped = False

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        process = _Process(*args, **kwargs)
        with _starting:
            process._ended = self._stopped
            self.started = [*(one for one in self.started if one.pid is None or one.exitcode is None), process]
        return process

    def stop(self) -> None:
        """Kills the processes; none begins any more."""
        with _starting:
            self._stopped = True
        for process in self.started:
            process.terminate()


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
        """Kills the workers; those that begin must go first, because pebble takes their semaphores away."""
        self.processes.stop()
        self.context.stop()
        self.processes.join()

    async def watch(self) -> None:
        """Ends tasks that pebble forgets because they were queued while the pool broke."""
        while self.processes.active and not self.ended.done():
            await asyncio.sleep(_LOOK_S)
        self.end()


@dataclass(eq=False)
class _Gathering:
    """Awaited calls that share a task."""

    jobs: list[Job] = field(default_factory=list)
    task: asyncio.Task[list[Outcome]] | None = None


class _Lost(Exception):
    """The worker of a task was killed or has died; `outcome` is that of each of its calls."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.detail)
        self.outcome = outcome


async def _late(task: Future[Any], limit_s: float) -> None:
    """Returns when a task has run for its limit; pebble's own limits go by the wall clock, which may jump."""
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
        self._log: str | None = None  # what the workers print is lost
        self._loop: asyncio.AbstractEventLoop  # while `_thread` runs it
        self._thread: threading.Thread | None = None
        self._pool: _Pool | None = None
        self._gathering: _Gathering | None = None
        self._lanes = asyncio.Semaphore(max(1, num_workers // 2))
        self._watch: asyncio.Task[None] | None = None
        self._start_failures = 0
        self._broken: SwiftError | None = None
        self.replaced = 0
        """Workers killed or lost and replaced so far."""

    def start(self) -> None:
        """Starts the workers in the background and returns at once; harmless when they run already."""
        if self._thread is None and self._broken is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
            self._thread.start()
            atexit.register(self.close)
            if self._spec.functions:
                self._loop.call_soon_threadsafe(lambda: self._broken or self._working_pool())

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine, which may use `call` and `call_awaited`, beside the others; starts the pool."""
        self.start()
        if self._thread is None:
            coroutine.close()
            assert self._broken is not None, "an open pool has started"
            raise self._broken
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def log_to(self, path: Path) -> None:
        """From now on the workers print to `path` (appended, kept below 64 MiB), each from its next call on."""
        self._log = str(path)

    def close(self) -> None:
        """Kills the workers; calls that were queued or running raise a `RewardError`. Repeatable."""
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
        """Runs calls on one worker: "timeout" or "crash" is the outcome of all if it was killed or lost.

        A SwiftError, here and below: the pool cannot run anything any more.
        """
        try:
            return await self._task(jobs, self.timeout_s + grace_s)
        except _Lost as lost:
            return [lost.outcome] * len(jobs)

    async def call_awaited(self, job: Job) -> Outcome:
        """Runs an awaited call, together with those that wait now; otherwise as `call`."""
        gathering = self._gathering
        if gathering is None or gathering.task is None:
            gathering = self._gathering = _Gathering()
            gathering.task = self._loop.create_task(self._run_gathered(gathering))
        place = len(gathering.jobs)
        gathering.jobs.append(job)
        if place + 1 == MAX_AWAITED:
            self._gathering = None
        return (await gathering.task)[place]

    async def _run_gathered(self, gathering: _Gathering) -> list[Outcome]:
        async with self._lanes:
            await asyncio.sleep(_GATHER_S)
            if self._gathering is gathering:
                self._gathering = None
            try:
                return await self._task(gathering.jobs, self.timeout_s + worker.CANCEL_GRACE_S)
            except _Lost as lost:
                if len(gathering.jobs) == 1:
                    return [lost.outcome]
        # Which of them blocked the event loop cannot be known: each runs again alone.
        return await asyncio.gather(*(self._alone(job) for job in gathering.jobs))

    async def _alone(self, job: Job) -> Outcome:
        async with self._lanes:
            return (await self.call([job], grace_s=worker.CANCEL_GRACE_S))[0]

    async def _task(self, jobs: list[Job], limit_s: float) -> list[Outcome]:
        """One task of the pool, begun again when the pool breaks before it is done; `_Lost` if its own worker died."""
        for _ in range(MAX_START_FAILURES + 1):
            pool = self._working_pool()
            try:
                scheduled = pool.processes.schedule(worker.run, args=(jobs, self._log))
            except RuntimeError:  # it has just broken
                pool.end()
                continue
            future: asyncio.Future[Any] = asyncio.wrap_future(scheduled)
            late = self._loop.create_task(_late(scheduled, limit_s))
            await asyncio.wait([future, pool.ended, late], return_when=asyncio.FIRST_COMPLETED)
            if late.done() and not future.done() and not pool.ended.done():
                future.cancel()  # pebble kills the worker
                raise self._lost(TimeoutError())
            late.cancel()
            if not future.done() or future.cancelled() or isinstance(future.exception(), BrokenProcessPool):
                future.cancel()
                pool.end()
                continue
            error = future.exception()
            if isinstance(error, TimeoutError | ProcessExpired):
                raise self._lost(error)
            if error is not None:
                described = f"reward workers: {type(error).__name__}: {error}"
                self._broken = error if isinstance(error, SwiftError) else RewardError(described)
                raise self._broken
            self._start_failures = 0
            self._trim_log()
            return future.result()
        self.replaced += 1
        raise _Lost(Outcome("crash", detail="the workers ended whenever it ran"))

    def _lost(self, error: TimeoutError | ProcessExpired) -> _Lost:
        self.replaced += 1
        limit_s = self.timeout_s
        if isinstance(error, TimeoutError):
            return _Lost(Outcome("timeout", detail=f"time-out after {limit_s:g} s; worker replaced", seconds=limit_s))
        return _Lost(Outcome("crash", detail=f"worker {describe_exit(error.exitcode)}; worker replaced"))

    def _working_pool(self) -> _Pool:
        """The pool, or a new one if idle or starting workers died and broke it."""
        if self._broken is None and self._pool is not None and self._pool.ended.done():
            self._start_failures += 1
            threading.Thread(target=self._pool.stop, daemon=True).start()
            if self._start_failures == MAX_START_FAILURES:
                started = self._pool.context.started
                status = next((one.exitcode for one in started if one.exitcode is not None), None)
                self._broken = RewardError(
                    f"reward workers: {describe_exit(status)}: {MAX_START_FAILURES} workers in a row ended before they "
                    f"were ready; see {self._log or 'their output'}"
                )
            self._pool = None
        if self._broken is not None:
            raise self._broken
        if self._pool is None:
            context = _Context()
            processes = ProcessPool(
                max_workers=self._num_workers,
                initializer=worker.initialize,
                initargs=(self._spec, self._log),
                context=context,
            )
            self._pool = _Pool(context, processes, self._loop.create_future())
            self._watch = self._loop.create_task(self._pool.watch())  # its first look starts the processes
        return self._pool

    def _trim_log(self) -> None:
        """Keeps a function that prints without end from filling the disk."""
        path = Path(self._log) if self._log else None
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
        return f"exited with status {status % _LEFT}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
