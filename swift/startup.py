"""What keeps the start of a process short."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


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
