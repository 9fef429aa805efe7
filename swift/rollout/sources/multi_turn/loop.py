"""An asyncio event loop on a background thread that signals when it is idle."""

from __future__ import annotations

import asyncio
import selectors
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
"""Folders of libraries, whose frames are skipped in messages."""


class EnvironmentLoop:
    """The event loop of environments; another thread samples."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.idle = False
        self.threads = 0
        """Number of awaited functions that run on threads."""
        self._queued = self._begun = 0  # calls of `call`, and those that have begun
        self._timed_out = False
        self._since: float | None = None  # start of the present callbacks; None while it is idle
        self.given_up = False
        self._loop = _EventLoop(self)
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the loop's thread, from any thread; no effect on an abandoned loop."""
        if self.given_up:
            return
        with self.changed:
            self._queued += 1
        self._loop.call_soon_threadsafe(self._begin, function, arguments)

    def wait_until_idle(self, limit_s: float) -> None:
        """Wait until the loop is idle, for `limit_s` at most.

        After a timeout it does not wait again until the loop has been idle.
        """
        with self.changed:
            limit = 0 if self._timed_out else limit_s
            self._timed_out = not self.changed.wait_for(
                lambda: self.idle and not self.threads and self._queued == self._begun, limit
            )

    def give_up(self, limit_s: float) -> str | None:
        """Abandon the loop if a function has blocked it for `limit_s`; returns the place of that function, or None.

        The thread and its coroutines end when the function returns.
        """
        with self.changed:
            if self._since is None or time.monotonic() - self._since < limit_s:
                return None
            self.given_up = True
        frames = traceback.extract_stack(sys._current_frames()[self._thread.ident or 0])
        place = next((frame for frame in reversed(frames) if not frame.filename.startswith(LIBRARIES)), frames[-1])
        self._loop.call_soon_threadsafe(self._loop.stop)
        return f"{place.filename}:{place.lineno}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _begin(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        with self.changed:
            self._begun += 1
        function(*arguments)

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()


class _EventLoop(asyncio.SelectorEventLoop):
    """Runs each function of `asyncio.to_thread` on a new daemon thread, which delays neither others nor the exit."""

    def __init__(self, owner: EnvironmentLoop) -> None:
        super().__init__(_Selector(owner))
        self._owner = owner

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # a thread cannot be cancelled

        def work() -> None:
            try:
                done.set_result(func(*args))
            except BaseException as error:  # raised in the coroutine that awaits it
                done.set_exception(error)

        awaited = asyncio.wrap_future(done, loop=self)
        self._count(1)
        awaited.add_done_callback(lambda _: self._count(-1))  # on the loop's thread, before it is idle again
        threading.Thread(target=work, name="environment", daemon=True).start()
        return awaited

    def _count(self, more: int) -> None:
        with self._owner.changed:
            self._owner.threads += more


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Records when the loop is idle: `select` is about to wait."""

    def __init__(self, owner: EnvironmentLoop) -> None:
        super().__init__()
        self._owner = owner

    def select(self, timeout: float | None = None) -> Any:
        with self._owner.changed:
            self._owner._since = None
            self._owner.idle = timeout is None or timeout > 0
            if self._owner.idle:
                self._owner.changed.notify_all()
        try:
            return super().select(timeout)
        finally:
            with self._owner.changed:
                self._owner.idle, self._owner._since = False, time.monotonic()
