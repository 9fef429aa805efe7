"""A time limit for the exit of the process: threads and exit handlers of plugins and libraries may hang.

Python waits without limit for every thread that is not a daemon, then for the handlers of `atexit`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from swift.errors import printable

WARN_S = 5.0
LIMIT_S = 60.0
"""Seconds after the end of the main thread: a warning, and the end. A tracker has time to send its last values."""


def leave_in_time(code: int) -> None:
    """From now on the process ends with this code at most `LIMIT_S` after its main thread."""
    with contextlib.suppress(RuntimeError):  # no more threads can be started
        threading.Thread(target=_end, args=(code,), name="end of the process", daemon=True).start()


def _end(code: int) -> None:
    threading.main_thread().join()
    time.sleep(WARN_S)
    _print(f"note: exit: {_waited_for()} still runs {WARN_S:g} s after the end; stopped after {LIMIT_S:g} s")
    time.sleep(LIMIT_S - WARN_S)
    _print(f"warning: exit: {_waited_for()} still runs {LIMIT_S:g} s after the end; stopped")
    os._exit(code)


def _waited_for() -> str:
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread.is_alive()]
    names = ", ".join(repr(thread.name) for thread in threads)
    return f"thread {names}" if names else "an exit handler of a plugin or library"


def _print(line: str) -> None:
    print(printable(f"swift: {line}"), file=sys.stderr, flush=True)
