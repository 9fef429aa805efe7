"""The reward workers: pebble's process pool, with what reward functions need around it.

pebble starts the processes, hands tasks to them, kills the worker of a task that is late and replaces workers that
ended. Added here:

* A worker leads a session of its own; when it is killed or has ended, its children are killed too (`_Process`).
* A task that shares its worker and is lost costs nobody anything yet: awaited calls are run again, each alone. What is
  lost alone has the outcome "timeout" or "crash". Every function of a call gets exactly one outcome.
* Awaited calls gather: a task takes all that wait, and at most half of the workers serve awaited calls.
* Workers that end `MAX_START_FAILURES` times in a row before they run anything, and a plugin that a worker cannot load,
  break the pool: all calls fail with that error, now and later.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from swift.errors import RewardError, SwiftError
from swift.rewards import worker
from swift.rewards.worker import Job, LoadSpec, Outcome, Payload

logger = logging.getLogger("swift.rewards")

MAX_START_FAILURES = 3
MAX_AWAITED = 64
LOG_LIMIT_BYTES = 64 << 20
_GATHER_S = 0.01

Callback = Callable[[int, Outcome], None]
"""Called with (position of the function, outcome) on a thread of the pool; must be quick."""


@dataclass(eq=False)
class Call:
    """Work for one worker.

    Attributes:
        functions: positions in `LoadSpec.functions`, run in this order.
        payload: what is scored.
        samples: indexes into the payload, or None for all of it.
        seed: for the random generators.
        is_async: the (single) function is awaited.
        callback: receives one outcome per function.
        on_broken: receives the error when the pool cannot run anything any more.
    """

    functions: list[int]
    payload: Payload
    samples: list[int] | None
    seed: int
    is_async: bool
    callback: Callback
    on_broken: Callable[[SwiftError], None]


@dataclass(eq=False)
class _Task:
    """Calls that share a worker until they are done; `tries` counts the pools that broke under it."""

    calls: list[Call]
    tries: int = 0

    @property
    def is_async(self) -> bool:
        return self.calls[0].is_async


_starting = threading.Lock()


class _Process(SpawnProcess):
    """A worker as pebble handles it: killed at once, with all that it started."""

    _ended = False

    def start(self) -> None:
        """Starts the process without the trainer's `__main__`, which would be imported there."""
        main = sys.modules["__main__"]
        with _starting:
            spec, file = main.__spec__, main.__dict__.pop("__file__", None)
            main.__spec__ = None
            try:
                super().start()
            finally:
                main.__spec__ = spec
                if file is not None:
                    main.__file__ = file

    def terminate(self) -> None:
        """Kills the process, its group, and its descendants in other groups."""
        if self.pid is None:
            return
        strays = descendants(self.pid)
        self._ended = True
        _kill(os.killpg, self.pid)
        for pid in [self.pid, *strays]:  # a process that has just begun leads no group yet
            _kill(os.kill, pid)

    def is_alive(self) -> bool:
        """As of `Process`; what is left of the group of a process that has ended is killed."""
        alive = super().is_alive()
        if not alive and not self._ended and self.pid is not None:
            self._ended = True
            _kill(os.killpg, self.pid)
        return alive


def _kill(how: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, signal.SIGKILL)


class _Context(SpawnContext):
    """Fresh interpreters: no memory, no accelerator of the trainer. Remembers the processes that it started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_Process] = []

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        self.started = [one for one in self.started if one.pid is None or one.exitcode is None]
        self.started.append(_Process(*args, **kwargs))
        return self.started[-1]


class WorkerPool:
    """`num_workers` processes that run reward functions.

    Args:
        spec: what each worker loads.
        num_workers: processes kept alive, >= 1.
        log_path: file for everything the workers print (appended, kept below 64 MiB); None discards it.

    `start()` returns at once; calls wait until a worker is ready. Use as a context manager, or `close()`.
    """

    def __init__(self, spec: LoadSpec, *, num_workers: int, log_path: Path | None) -> None:
        self._spec = spec
        self._num_workers = num_workers
        self._log = str(log_path) if log_path else None
        self._lock = threading.RLock()  # held for bookkeeping, never while a callback runs
        self._pool: ProcessPool | None = None
        self._context = _Context()
        self._tasks: set[_Task] = set()
        self._awaited: list[Call] = []
        self._gathering = False
        self._lanes = 0
        self._start_failures = 0
        self._broken: SwiftError | None = None
        self.replaced = 0
        """Workers killed or lost and replaced so far."""

    def start(self) -> None:
        """Starts the workers in the background; harmless when they run already."""
        with self._lock:
            if self._pool is None and self._broken is None:
                self._open()
                atexit.register(self.close)

    def submit(self, call: Call) -> None:
        """Queues a call; starts the pool when it is not running. A closed or broken pool fails the call."""
        self.start()
        if not call.is_async:
            self._launch(_Task([call]))
            return
        with self._lock:
            self._awaited.append(call)
            gathering, self._gathering = self._gathering, True
        if not gathering:
            timer = threading.Timer(_GATHER_S, self._launch_awaited)
            timer.daemon = True
            timer.start()

    def log_to(self, path: Path) -> None:
        """From now on the workers print to `path`, each from its next call on."""
        self._log = str(path)

    def pids(self) -> list[int]:
        """Process ids of the present workers."""
        return [one.pid for one in self._context.started if one.pid is not None and one.exitcode is None]

    def close(self) -> None:
        """Kills the workers; calls that were queued or running end with a `RewardError`. Repeatable."""
        self._break(RewardError("reward workers: closed: the run has ended"))
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()
            atexit.unregister(self.close)

    def __enter__(self) -> WorkerPool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> ProcessPool:
        self._context = _Context()
        self._pool = ProcessPool(
            max_workers=self._num_workers,
            initializer=worker.initialize,
            initargs=(self._spec, self._log),
            context=self._context,
        )
        _ = self._pool.active  # asking starts it
        return self._pool

    def _working_pool(self) -> ProcessPool | None:
        """The pool, or a new one when idle or starting workers died and broke it; None when that is hopeless."""
        if self._broken is not None or (self._pool is not None and self._pool.active):
            return self._pool if self._broken is None else None
        if self._pool is not None:
            self._start_failures += 1
            # This thread may be one of the old pool's own, for which `join` waits.
            threading.Thread(target=self._pool.join, daemon=True).start()
            self._pool = None
        if self._start_failures >= MAX_START_FAILURES:
            status = next((one.exitcode for one in self._context.started if one.exitcode is not None), None)
            self._broken = RewardError(
                f"reward workers: {describe_exit(status)}: {self._start_failures} workers in a row ended before they "
                f"were ready; see {self._log or 'their output'}"
            )
            return None
        return self._open()

    def _launch_awaited(self) -> None:
        """Gives the awaited calls that wait to a worker, if one more may serve such calls."""
        with self._lock:
            self._gathering = False
            calls = self._awaited[:MAX_AWAITED]
            if not calls or self._lanes >= max(1, self._num_workers // 2):
                return
            del self._awaited[:MAX_AWAITED]
        self._launch(_Task(calls))
        self._launch_awaited()

    def _launch(self, task: _Task) -> None:
        jobs = [
            Job(function, call.payload, call.samples, call.seed) for call in task.calls for function in call.functions
        ]
        timeout_s = self._spec.timeout_s + (worker.CANCEL_GRACE_S if task.is_async else 0.0)
        with self._lock:
            if task not in self._tasks:
                self._tasks.add(task)
                self._lanes += task.is_async
            attempt, pool = task.tries, self._working_pool()
            if pool is not None:
                try:
                    future = pool.schedule(worker.run, args=(jobs, self._log), timeout=timeout_s)
                except RuntimeError as error:  # it has just broken
                    future = ProcessFuture()
                    future.set_exception(BrokenProcessPool(str(error)))
        if pool is None:
            self._fail_all()
            return
        future.add_done_callback(lambda done: self._ended(task, attempt, done.exception() or done.result()))
        if not pool.active and not future.done():  # it broke before it knew of this task
            self._ended(task, attempt, BrokenProcessPool("the pool has ended"))

    def _ended(self, task: _Task, attempt: int, result: list[Outcome] | BaseException) -> None:
        """`_settle` on a thread of pebble's, where nobody would see an exception: it breaks the pool instead."""
        try:
            self._settle(task, attempt, result)
        except Exception as error:
            logger.exception("reward workers: cannot deliver a result")
            broken = RewardError(f"reward workers: {type(error).__name__}: {error}")
            for call in task.calls:
                call.on_broken(broken)
            self._break(broken)

    def _settle(self, task: _Task, attempt: int, result: list[Outcome] | BaseException) -> None:
        """A task has ended: outcomes for its calls, another try, or the end of the pool."""
        with self._lock:
            if task not in self._tasks or task.tries != attempt:
                return
            task.tries += 1
            again = isinstance(result, BrokenProcessPool) and task.tries < MAX_START_FAILURES + 1
            if not again:
                self._tasks.discard(task)
                self._lanes -= task.is_async
        if again:
            self._launch(task)
        elif isinstance(result, list):
            self._start_failures = 0
            self._trim_log()
            self._deliver(task, result)
        elif isinstance(result, TimeoutError | ProcessExpired | BrokenProcessPool):
            self._lose(task, result)
        else:
            broken = f"reward workers: {type(result).__name__}: {result}"
            error = result if isinstance(result, SwiftError) else RewardError(broken)
            for call in task.calls:
                call.on_broken(error)
            self._break(error)
        if task.is_async:
            self._launch_awaited()

    def _lose(self, task: _Task, error: BaseException) -> None:
        """The worker of a task was killed or has died."""
        self.replaced += 1
        if len(task.calls) > 1:  # awaited together: which of them blocked the loop cannot be known
            for call in task.calls:
                self._launch(_Task([call]))
            return
        limit_s = self._spec.timeout_s
        if isinstance(error, TimeoutError):
            outcome = Outcome("timeout", detail=f"time-out after {limit_s:g} s; worker replaced", seconds=limit_s)
        else:
            status = getattr(error, "exitcode", None)
            outcome = Outcome("crash", detail=f"worker {describe_exit(status)}; worker replaced")
        self._deliver(task, [outcome] * len(task.calls[0].functions))

    def _deliver(self, task: _Task, outcomes: Sequence[Outcome]) -> None:
        rest = iter(outcomes)
        for call in task.calls:
            for function in call.functions:
                call.callback(function, next(rest))

    def _break(self, error: SwiftError) -> None:
        with self._lock:
            self._broken = self._broken or error
        self._fail_all()

    def _fail_all(self) -> None:
        with self._lock:
            error = self._broken
            calls = [call for task in self._tasks for call in task.calls] + self._awaited
            self._tasks, self._awaited = set(), []
        assert error is not None
        for call in calls:
            call.on_broken(error)

    def _trim_log(self) -> None:
        """Keeps a function that prints without end from filling the disk."""
        path = Path(self._log) if self._log else None
        size = path.stat().st_size if path is not None and path.exists() else 0
        if path is not None and size > LOG_LIMIT_BYTES:
            os.truncate(path, 0)
            with path.open("a", encoding="utf-8") as log:
                log.write(f"[{size} bytes of worker output dropped]\n")


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on of a process, as /proc shows them; [] without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def worker_share(per_node: int | None) -> int:
    """This process's share of `reward_workers`, at least 1.

    Args:
        per_node: processes of a whole node; None means one per core, at most 8.
    """
    if per_node is None:
        per_node = min(8, len(os.sched_getaffinity(0)))
    return max(1, per_node // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def memory_limit() -> int | None:
    """Half of the memory this process may use, in bytes, at least 4 GiB; None when it cannot be told."""
    sizes = []
    with contextlib.suppress(OSError, ValueError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(name).read_text()))
    return max(min(sizes) // 2, 4 << 30) if sizes else None


def describe_exit(status: int | None) -> str:
    """How a process ended, in words: "killed by SIGSEGV", "exited with status 3"."""
    if status is None:
        return "has ended"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
