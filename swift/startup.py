"""What keeps the start of a process short, and its console free of what libraries say."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import logging.handlers
import os
import sys
from collections import deque
from collections.abc import Iterator

LIBRARIES = ("transformers", "datasets", "accelerate", "huggingface_hub", "trl", "peft", "bitsandbytes", "py.warnings")
"""Loggers of libraries; some hand nothing to the root logger."""

EARLY = logging.handlers.MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
"""Keeps what libraries say, the last of it, until there is a log file."""
EARLY.buffer = deque(maxlen=1000)  # type: ignore[assignment]


def hush_libraries() -> None:
    """Libraries that are imported log to the file of the process; to the console only with `--debug true`."""
    logging.captureWarnings(True)
    for logger in map(logging.getLogger, LIBRARIES):
        if os.environ.get("SWIFT_DEBUG", "0") in ("", "0"):
            logger.handlers = [one for one in logger.handlers if type(one) is not logging.StreamHandler]
        if EARLY not in logger.handlers:
            logger.addHandler(EARLY)


@contextlib.contextmanager
def collector_resting() -> Iterator[None]:
    """Import and load without the garbage collector, and leave what was loaded out of its later rounds.

    A million objects come and stay while libraries are imported; to look for garbage among them again and again
    takes a quarter of the start. Only reference cycles dropped inside the block are never freed before the end.
    """
    was_enabled = gc.isenabled()
    atexit.register(gc.unfreeze)  # extension modules count what is left at the end as leaks, and say so
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
