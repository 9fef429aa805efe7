"""The end of the process after that of its command: threads and exit handlers of plugins and libraries have a limit.

Python waits for every thread that is no daemon, then for the handlers of `atexit`, each as long as it takes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

LIMIT_S = 60.0
"""Enough for a tracker that sends what it has left."""


def leave_in_time(code: int) -> None:
    """From now on the process ends with this code at most `LIMIT_S` after its main thread."""
    with contextlib.suppress(RuntimeError):  # no more threads can be started
        threading.Thread(target=_end, args=(code,), name="end of the process", daemon=True).start()


def _end(code: int) -> None:
    threading.main_thread().join()
    time.sleep(LIMIT_S)
    names = ", ".join(repr(one.name) for one in threading.enumerate() if not one.daemon and one.is_alive())
    what = f"thread {names}" if names else "an exit handler of a plugin or library"
    print(f"swift: warning: exit: {what} still runs {LIMIT_S:g} s after the end; stopped", file=sys.stderr, flush=True)
    os._exit(code)
