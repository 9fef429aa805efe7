"""The worker pool: who runs which call, what a late or dead worker costs, and how it is replaced.

One daemon thread owns everything: workers, sockets, queue, clocks. Other threads hand over calls through
a lock-protected inbox and a wake-up byte. The rules:

* A call is one function (or several quick built-ins in a row) on the samples of one payload. It ends
  exactly once per function, with an `Outcome` given to its callback on the pool's thread.
* A worker runs one synchronous call at a time, or up to `OVERLAP` awaited ones.
* The clock of a function starts with the worker's "started". When it runs out the worker is killed with
  all its children and replaced; a call that was alone there has timed out. Awaited calls that shared
  the worker are queued again, each alone, because which of them blocked the loop cannot be known.
* A worker that dies costs the call it was running (outcome "crash"), and is replaced as well.
* A worker that cannot be started `MAX_START_FAILURES` times in a row, or that reports a plugin it cannot
  load, breaks the pool: all calls fail with that error, now and later.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, ResourceError, RewardError, SwiftError
from swift.rewards.processes import Reaper, kill_tree, spawn
from swift.rewards.protocol import Decoder, LoadSpec, Outcome, encode

START_LIMIT_S = 120.0
MAX_START_FAILURES = 3
OVERLAP = 64
LOG_LIMIT_BYTES = 64 << 20
_CANCEL_GRACE_S = 0.5
_POLL_S = 0.1
_READ_BYTES = 1 << 20

Callback = Callable[[int, Outcome], None]
"""Called with (position of the function, outcome) on the pool's thread; must be quick."""


@dataclass
class Call:
    """Work for one worker.

    Attributes:
        functions: positions in `LoadSpec.functions`, run in this order.
        payload: pickled {"completions", "keywords"} of one or more whole groups.
        samples: indexes into the payload, or None for all of it.
        seed: for the random generators.
        is_async: the (single) function is awaited.
        callback: receives one outcome per function.
        on_broken: receives the error when the pool cannot run anything any more.
        alone: shares its worker with no other call.
    """

    functions: list[int]
    payload: bytes
    samples: list[int] | None
    seed: int
    is_async: bool
    callback: Callback
    on_broken: Callable[[SwiftError], None]
    alone: bool = False


@dataclass
class _Running:
    call: Call
    left: list[int]
    deadline: float
    started: bool = False


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    start_deadline: float
    ready: bool = False
    running: dict[int, _Running] = field(default_factory=dict)
    decoder: Decoder = field(default_factory=Decoder)
    outgoing: bytearray = field(default_factory=bytearray)

    @property
    def is_open(self) -> bool:
        """Whether any call at all could be given to it now."""
        calls = [item.call for item in self.running.values()]
        return self.ready and len(calls) < OVERLAP and all(call.is_async and not call.alone for call in calls)

    def can_take(self, call: Call) -> bool:
        return self.is_open and (not self.running or (call.is_async and not call.alone))


class WorkerPool:
    """`num_workers` processes that run reward functions.

    Args:
        spec: what each worker loads.
        num_workers: processes kept alive, >= 1.
        log_path: file for everything the workers print (appended, kept below 64 MiB); None discards it.

    `start()` returns at once; calls wait until a worker is ready. Use as a context manager, or `close()`.
    """

    def __init__(self, spec: LoadSpec, *, num_workers: int, log_path: Path | None) -> None:
        self._timeout_s = spec.timeout_s
        self._load_message = encode(("load", spec))
        self._num_workers = num_workers
        self._log_path = log_path
        self._log_moved = False
        self._lock = threading.Lock()
        self._inbox: deque[Call] = deque()
        self._queue: deque[Call] = deque()
        self._workers: list[_Worker] = []
        self._ids = itertools.count()
        self._broken: SwiftError | None = None
        self._start_failures = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._reaper: Reaper | None = None
        self.replaced = 0
        """Workers killed or lost and replaced so far."""

    def start(self) -> None:
        """Starts the workers in the background; harmless when they run already."""
        with self._lock:
            if self._thread is not None or self._closing:
                return
            self._selector = selectors.DefaultSelector()
            self._wake_read, self._wake_write = socket.socketpair()
            self._wake_read.setblocking(False)
            self._wake_write.setblocking(False)
            self._selector.register(self._wake_read, selectors.EVENT_READ, None)
            self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Queues a call; starts the pool when it is not running.

        Raises:
            RuntimeError: after `close()`.
        """
        self.start()
        with self._lock:
            if self._closing:
                raise RuntimeError("the reward workers are closed")
            self._inbox.append(call)
        self._wake()

    def log_to(self, path: Path) -> None:
        """From now on the workers print to `path`; a worker that is busy turns to it after its call."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._log_path = path
            self._log_moved = self._thread is not None
        if self._log_moved:
            self._wake()

    def pids(self) -> list[int]:
        """Process ids of the present workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def close(self) -> None:
        """Kills the workers; calls that were queued or running end with a `RewardError`. Repeatable."""
        with self._lock:
            self._closing = True
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._wake()
        thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> WorkerPool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wake(self) -> None:
        # A full pipe already wakes the thread; a closed one means that there is nobody to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"\0")

    # ---- everything below runs on the pool's thread -------------------------------------------------

    def _serve(self) -> None:
        self._reaper = Reaper()
        try:
            while not self._closing:
                self._take_inbox()
                self._top_up()
                self._dispatch()
                for key, events in self._selector.select(self._wait_s()):
                    self._handle(key.data, events)
                self._check_clocks()
        finally:
            self._shut_down()

    def _take_inbox(self) -> None:
        with self._lock:
            self._queue.extend(self._inbox)
            self._inbox.clear()
            moved, self._log_moved = self._log_moved, False
        if moved:
            for worker in list(self._workers):
                self._send(worker, encode(("log", str(self._log_path))))

    def _wait_s(self) -> float | None:
        """Until the next deadline, at most `_POLL_S` while a worker could die unnoticed."""
        busy = any(worker.running or not worker.ready for worker in self._workers)
        return _POLL_S if busy else None

    def _top_up(self) -> None:
        if self._broken is not None:
            self._fail_all(self._broken)
            return
        try:
            while len(self._workers) < self._num_workers:
                self._spawn()
        except OSError as error:
            self._broken = ResourceError(f"reward workers: cannot start a process: {error}")
            self._fail_all(self._broken)

    def _spawn(self) -> None:
        self._trim_log()
        if self._log_path is None:
            process, connection = spawn(subprocess.DEVNULL)
        else:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                process, connection = spawn(log)
        worker = _Worker(process, connection, time.monotonic() + START_LIMIT_S)
        if self._reaper is not None:
            self._reaper.add(process.pid)
        self._workers.append(worker)
        self._selector.register(connection, selectors.EVENT_READ, worker)
        self._send(worker, self._load_message)

    def _trim_log(self) -> None:
        """Keeps a function that prints without end from filling the disk."""
        if self._log_path is not None and self._log_path.exists():
            size = self._log_path.stat().st_size
            if size > LOG_LIMIT_BYTES:
                os.truncate(self._log_path, 0)
                note = f"[{size} bytes of worker output dropped]\n"
                with self._log_path.open("a", encoding="utf-8") as log:
                    log.write(note)

    def _dispatch(self) -> None:
        waiting: deque[Call] = deque()
        while self._queue and any(worker.is_open for worker in self._workers):
            call = self._queue.popleft()
            able = [worker for worker in self._workers if worker.can_take(call)]
            if able:
                # Awaited calls gather in one worker and leave the others to the blocking ones.
                self._assign(max(able, key=lambda worker: len(worker.running)), call)
            else:
                waiting.append(call)
        self._queue.extendleft(reversed(waiting))

    def _assign(self, worker: _Worker, call: Call) -> None:
        call_id = next(self._ids)
        # Until the worker says "started" only the transfer of the payload can take time.
        worker.running[call_id] = _Running(call, list(call.functions), time.monotonic() + START_LIMIT_S)
        message = ("call", call_id, call.functions, call.payload, call.samples, call.seed)
        self._send(worker, encode(message))

    def _send(self, worker: _Worker, frame: bytes) -> None:
        worker.outgoing += frame
        self._flush(worker)

    def _flush(self, worker: _Worker) -> None:
        while worker.outgoing:
            try:
                sent = worker.socket.send(worker.outgoing)
            except BlockingIOError:
                break
            except OSError:  # it died; the reading side notices and says so
                worker.outgoing.clear()
                break
            del worker.outgoing[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        self._selector.modify(worker.socket, wanted, worker)

    def _handle(self, worker: _Worker | None, events: int) -> None:
        if worker is None:
            with contextlib.suppress(BlockingIOError):
                while self._wake_read.recv(4096):
                    pass
            return
        if worker not in self._workers:
            return
        if events & selectors.EVENT_WRITE:
            self._flush(worker)
        if events & selectors.EVENT_READ and not self._read(worker):
            self._lose(worker)

    def _read(self, worker: _Worker) -> bool:
        """Reads and handles what has arrived; False when the worker has closed its end."""
        try:
            data = worker.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for message in worker.decoder.feed(data):
            self._on_message(worker, *message)
        return bool(data)

    def _on_message(self, worker: _Worker, kind: str, *content: Any) -> None:
        if kind == "ready":
            worker.ready = True
            self._start_failures = 0
        elif kind == "failed":
            problem_kind, problems = content
            self._broken = (ConfigError if problem_kind == "config" else RewardError)(*problems)
        elif kind == "started":
            running = worker.running[content[0]]
            grace = _CANCEL_GRACE_S if running.call.is_async else 0.0
            running.deadline = time.monotonic() + self._timeout_s + grace
            running.started = True
        elif kind == "done":
            self._finish(worker, *content)

    def _finish(self, worker: _Worker, call_id: int, function: int, outcome: Outcome) -> None:
        running = worker.running[call_id]
        running.left.remove(function)
        running.started = False
        running.deadline = time.monotonic() + START_LIMIT_S
        if not running.left:
            del worker.running[call_id]
            self._trim_log()
        running.call.callback(function, outcome)

    def _check_clocks(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if not worker.ready and now > worker.start_deadline:
                self._lose(worker)
            elif any(now > item.deadline for item in worker.running.values()):
                self._expire(worker)
            elif worker.process.poll() is not None and not self._read_rest(worker):
                # A grandchild may hold the socket open: the end of the process itself counts.
                self._lose(worker)

    def _read_rest(self, worker: _Worker) -> bool:
        """Handles what a dead worker still said; True when there was something, so look again later."""
        num_running = len(worker.running)
        self._read(worker)
        return len(worker.running) < num_running

    def _expire(self, worker: _Worker) -> None:
        self._remove(worker)
        detail = f"time-out after {self._timeout_s:g} s; worker replaced"
        self._settle(worker, Outcome("timeout", detail=detail, seconds=self._timeout_s))

    def _lose(self, worker: _Worker) -> None:
        self._remove(worker)
        status = worker.process.returncode
        if not worker.ready:
            self._start_failures += 1
            if self._start_failures >= MAX_START_FAILURES and self._broken is None:
                self._broken = RewardError(
                    f"reward workers: {describe_exit(status)}: {self._start_failures} workers in a row ended "
                    f"before they were ready; see {self._log_path or 'their output'}"
                )
        self._settle(worker, Outcome("crash", detail=f"worker {describe_exit(status)}; worker replaced"))

    def _settle(self, worker: _Worker, outcome: Outcome) -> None:
        """Ends or re-queues what the removed worker was running."""
        shared = len(worker.running) > 1
        for running in worker.running.values():
            call = running.call
            if shared or not running.started:
                again = replace(call, functions=running.left, alone=True)
                if not shared and call.alone and not running.started:
                    # Alone and never begun, twice: the payload itself kills workers.
                    self._give(running, outcome)
                    continue
                self._queue.appendleft(again)
            else:
                self._give(running, outcome)

    def _give(self, running: _Running, outcome: Outcome) -> None:
        """The function that was running gets the outcome; those after it are queued again."""
        first, *rest = running.left
        if rest:
            self._queue.appendleft(replace(running.call, functions=rest))
        running.call.callback(first, outcome)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        worker.socket.close()
        kill_tree(worker.process)
        if self._reaper is not None:
            self._reaper.discard(worker.process.pid)
        if worker.ready:
            self.replaced += 1

    def _fail_all(self, error: SwiftError) -> None:
        for worker in list(self._workers):
            self._remove(worker)
            self._queue.extend(running.call for running in worker.running.values())
        while self._queue:
            self._queue.popleft().on_broken(error)

    def _shut_down(self) -> None:
        with self._lock:
            self._closing = True
            self._queue.extend(self._inbox)
            self._inbox.clear()
        self._fail_all(self._broken or RewardError("reward workers: closed: the run has ended"))
        if self._reaper is not None:
            self._reaper.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def describe_exit(status: int | None) -> str:
    """How a process ended, in words: "killed by SIGSEGV", "exited with status 3"."""
    if status is None:
        return "does not end"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
