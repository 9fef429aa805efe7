"""An asyncio loop on a thread of its own that says when it has nothing left to run."""

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
"""Folders of what environments call."""


class Loop:
    """Runs environments while another thread samples."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.idle = False
        self.threads = 0
        """Functions that run on threads and are waited for."""
        self._asked = self._begun = 0
        self._late = False
        self._since: float | None = None  # it runs something; None while it waits
        self.given_up = False
        self._loop = _EventLoop(self)
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the loop's thread, unless it was given up; from any thread."""
        if self.given_up:
            return
        with self.changed:
            self._asked += 1
        self._loop.call_soon_threadsafe(self._begin, function, arguments)

    def settle(self, limit_s: float) -> None:
        """Wait until what was asked for has run as far as it goes by itself.

        What blocks the loop's thread, or one of its own, is waited for once, then only when it has come back.
        """
        with self.changed:
            limit = 0 if self._late else limit_s
            self._late = not self.changed.wait_for(
                lambda: self.idle and not self.threads and self._asked == self._begun, limit
            )

    def give_up(self, limit_s: float) -> str | None:
        """Give the loop up if one function has blocked it for so long; where that is, or None.

        The thread ends when the function returns, and so do the coroutines.
        """
        with self.changed:
            if self._since is None or time.monotonic() - self._since < limit_s:
                return None
            self.given_up = True
        frames = traceback.extract_stack(sys._current_frames()[self._thread.ident or 0])
        place = next((one for one in reversed(frames) if not one.filename.startswith(LIBRARIES)), frames[-1])
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
    """Gives each function of `asyncio.to_thread` a thread of its own: a slow one holds up no other, and no exit."""

    def __init__(self, home: Loop) -> None:
        super().__init__(_Selector(home))
        self._home = home

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # it cannot be stopped any more

        def work() -> None:
            try:
                done.set_result(func(*args))
            except BaseException as error:  # raised where it is awaited
                done.set_exception(error)

        awaited = asyncio.wrap_future(done, loop=self)
        self._count(1)
        awaited.add_done_callback(lambda _: self._count(-1))  # on the loop's thread, before it is idle again
        threading.Thread(target=work, name="environment", daemon=True).start()
        return awaited

    def _count(self, more: int) -> None:
        with self._home.changed:
            self._home.threads += more


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Notes when the loop is about to wait: nothing is ready to run then."""

    def __init__(self, home: Loop) -> None:
        super().__init__()
        self._home = home

    def select(self, timeout: float | None = None) -> Any:
        with self._home.changed:
            self._home._since = None
            self._home.idle = timeout is None or timeout > 0
            if self._home.idle:
                self._home.changed.notify_all()
        try:
            return super().select(timeout)
        finally:
            with self._home.changed:
                self._home.idle, self._home._since = False, time.monotonic()
