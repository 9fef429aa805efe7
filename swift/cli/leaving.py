"""The end of the process after that of its command: threads and exit handlers of plugins and libraries have a limit.

Python waits for every thread that is no daemon, then for the handlers of `atexit`, each as long as it takes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from swift.errors import printable

TELL_S = 5.0
LIMIT_S = 60.0
"""Enough for a tracker that sends what it has left."""


def leave_in_time(code: int) -> None:
    """From now on the process ends with this code at most `LIMIT_S` after its main thread."""
    with contextlib.suppress(RuntimeError):  # no more threads can be started
        threading.Thread(target=_end, args=(code,), name="end of the process", daemon=True).start()


def _end(code: int) -> None:
    threading.main_thread().join()
    time.sleep(TELL_S)
    _tell(f"note: exit: {_waited_for()} still runs {TELL_S:g} s after the end; stopped after {LIMIT_S:g} s")
    time.sleep(LIMIT_S - TELL_S)
    _tell(f"warning: exit: {_waited_for()} still runs {LIMIT_S:g} s after the end; stopped")
    os._exit(code)


def _waited_for() -> str:
    names = ", ".join(repr(one.name) for one in threading.enumerate() if not one.daemon and one.is_alive())
    return f"thread {names}" if names else "an exit handler of a plugin or library"


def _tell(line: str) -> None:
    print(printable(f"swift: {line}"), file=sys.stderr, flush=True)
