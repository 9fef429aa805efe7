"""The event loop of sampling: on the calling thread, or on a background thread while the trainer trains.

    run(coroutine)     runs it to completion
    begin(coroutine)   starts it in the background; only on a thread
    await idle()       returns once every other task of the loop waits

A coroutine steps an engine of this process, and awaits `idle` before each step. So all that is ready (turns, scores,
new requests) runs first, in the order in which it was started, and runs are reproducible whatever the timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from swift.errors import EngineError

POLL_S = 1.0
"""Interval at which a waiting thread checks that the loop's thread is alive, in seconds."""

T = TypeVar("T")


class RolloutLoop:
    """See the module's docstring. threaded: on a background thread of this name, started by the first use."""

    def __init__(self, *, threaded: bool = False, name: str = "rollout") -> None:
        self.threaded, self.name = threaded, name
        self._loop = EventLoop()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def thread(self) -> threading.Thread | None:
        """The background thread, once it is started."""
        return self._thread

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Schedule a function on the loop's thread; no effect on a closed loop."""
        self._start()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Raises its error, or EngineError: the loop's thread has ended."""
        if not self.threaded:
            return self._loop.run_until_complete(work)
        return self.wait(self.begin(work))

    def do(self, function: Callable[[], object]) -> None:
        """Call a function on the loop's thread and wait for it. Raises as `run`."""

        async def work() -> None:
            function()

        self.run(work())

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop's thread."""
        if self._loop.is_closed():
            work.close()
            raise EngineError(f"{self.name}: it is closed")
        self._start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _start(self) -> None:
        assert self.threaded
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
            self._thread.start()

    def wait(self, future: Future[T]) -> T:
        """Wait for a coroutine that was begun; returns its result or raises its error."""
        while not future.done() and self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(TimeoutError, CancelledError):
                return future.result(POLL_S)
        if not future.done() or future.cancelled():
            raise EngineError(f"{self.name}: closed with work unfinished")
        return future.result()

    def close(self, limit_s: float) -> bool:
        """Cancel all tasks and end the thread. Returns whether it has ended within the limit. Idempotent."""
        if self._loop.is_closed():
            return True
        if self._thread is None:
            self._loop.run_until_complete(_cancel_all())
        elif self._thread.is_alive():
            if not self._stopping:
                self._stopping = True
                self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
        self._loop.close()
        return True

    def _stop(self) -> None:
        ending = self._loop.create_task(_cancel_all())
        ending.add_done_callback(lambda _: self._loop.stop())


async def idle() -> None:
    """Wait until no other task or callback of this loop is ready to run."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, EventLoop)
    waiting: asyncio.Future[None] = loop.create_future()
    loop.idle_waiters.append(waiting)
    await waiting


async def _cancel_all() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # tasks that are cancelled may start others
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves `idle_waiters` when nothing else is ready to run."""

    def __init__(self) -> None:
        self.idle_waiters: list[asyncio.Future[None]] = []
        super().__init__(_Selector(self))


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Detects an idle loop: `select` gets a timeout of zero while anything is ready to run."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self._owner = loop

    def select(self, timeout: float | None = None) -> Any:
        waiters = self._owner.idle_waiters
        if waiters and (timeout is None or timeout > 0):
            self._owner.idle_waiters, timeout = [], 0
            for waiting in waiters:
                if not waiting.done():
                    waiting.set_result(None)
        return super().select(timeout)
