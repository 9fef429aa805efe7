"""A short start of the process, and a console without the messages of libraries."""

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
"""Loggers of libraries; some do not propagate to the root logger."""

EARLY = logging.handlers.MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
"""Buffers the last messages of libraries until there is a log file."""
EARLY.buffer = deque(maxlen=1000)  # type: ignore[assignment]


def hush_libraries() -> None:
    """Libraries that are imported log to the file of the process; to the console only with `--debug true`."""
    logging.captureWarnings(True)
    for logger in map(logging.getLogger, LIBRARIES):
        if os.environ.get("SWIFT_DEBUG", "0") in ("", "0"):
            logger.handlers = [handler for handler in logger.handlers if type(handler) is not logging.StreamHandler]
        if EARLY not in logger.handlers:
            logger.addHandler(EARLY)


@contextlib.contextmanager
def collector_resting() -> Iterator[None]:
    """Import and load without the garbage collector, and exclude the loaded objects from later collections.

    Imports of libraries create a million objects that stay; repeated collections of them take a quarter of the start.
    Reference cycles dropped inside the block are not freed before the process ends.
    """
    was_enabled = gc.isenabled()
    atexit.register(gc.unfreeze)  # else extension modules report frozen objects as leaks
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
