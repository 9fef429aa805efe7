"""The event loop of sampling: in the thread that asks for it, or on a thread of its own while the trainer trains.

    run(coroutine)     until it is done
    begin(coroutine)   goes on by itself; only on a thread
    await idle()       everything else that could run has run, and now waits

An engine in this process is stepped by a coroutine that waits for `idle` before each step: whatever is ready (turns,
scores, new requests) comes first, in the order in which it was begun, so that runs repeat however fast anything was.
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
"""How often a waiting thread looks whether the loop's thread lives."""

T = TypeVar("T")


class RolloutLoop:
    """See the module's docstring. threaded: on a thread of its own with this name, started when it is needed."""

    def __init__(self, *, threaded: bool = False, name: str = "rollout") -> None:
        self.threaded, self.name = threaded, name
        self._loop = EventLoop()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def thread(self) -> threading.Thread | None:
        """The loop's own, once it has begun."""
        return self._thread

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the loop's thread soon; nothing on a loop that is closed."""
        self._start()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. Raises what it raises; EngineError: the loop's thread has ended."""
        if not self.threaded:
            return self._loop.run_until_complete(work)
        return self.wait(self.begin(work))

    def do(self, function: Callable[[], object]) -> None:
        """Call a function on the loop's thread and wait for it. Raises as `run`."""

        async def work() -> None:
            function()

        self.run(work())

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Let a coroutine run on the loop's thread."""
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
        """What a coroutine that was begun returns or raises."""
        while not future.done() and self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(TimeoutError, CancelledError):
                return future.result(POLL_S)
        if not future.done() or future.cancelled():
            raise EngineError(f"{self.name}: closed with work unfinished")
        return future.result()

    @property
    def alive(self) -> bool:
        """Whether it was not closed."""
        return not self._loop.is_closed()

    def close(self, limit_s: float) -> bool:
        """Cancel what runs and end the thread; whether it has ended within so long. Repeatable."""
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
    """Until nothing else on this loop is ready to run."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, EventLoop)
    await loop.idle()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventLoop(asyncio.SelectorEventLoop):
    """An event loop that knows when it is about to wait."""

    def __init__(self) -> None:
        self._idlers: list[asyncio.Future[None]] = []
        super().__init__(_Selector(self))

    def idle(self) -> asyncio.Future[None]:
        """Done when nothing else is ready to run."""
        waiting: asyncio.Future[None] = self.create_future()
        self._idlers.append(waiting)
        return waiting

    def about_to_wait(self) -> bool:
        """Whether somebody wanted to know."""
        idlers, self._idlers = self._idlers, []
        for one in idlers:
            if not one.done():
                one.set_result(None)
        return bool(idlers)


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Is asked with a time-out of zero while anything is ready to run."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self._owner = loop

    def select(self, timeout: float | None = None) -> Any:
        waits = timeout is None or timeout > 0
        return super().select(0 if waits and self._owner.about_to_wait() else timeout)
