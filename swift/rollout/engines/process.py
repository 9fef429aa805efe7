"""Keeps a process as it was while an engine is made or works in it: the trainer may live there too.

vLLM moves the random generators of Python, NumPy and torch, replaces `torch.set_num_threads`, sets environment
variables that torchrun's children read (LOCAL_WORLD_SIZE) or inherit (LD_PRELOAD), and freezes the garbage collector's
heap. Each of these is undone here, at the call that does it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

STACK_FRAMES = 4
T = TypeVar("T")


def stack_of(thread: threading.Thread | None) -> str:
    """The innermost calls of a thread, in one line; of the main thread with None."""
    frame = sys._current_frames().get((thread or threading.main_thread()).ident or 0)
    where = [f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in traceback.extract_stack(frame)]
    return " < ".join(reversed(where[-STACK_FRAMES:]))


def on_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin `work` on a thread of its own, which keeps nobody from ending and is left behind if it hangs."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # belongs to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def random_state() -> Callable[[], None]:
    """A call that puts all random generators of the process back to where they stand now."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)

    return restore


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """All random generators of the process continue afterwards where they stood before."""
    restore = random_state()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def same_environment(during: Mapping[str, str]) -> Iterator[None]:
    """Environment variables, heap and `torch.set_num_threads` are afterwards what they were; `during` holds inside."""
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    os.environ.update(during)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        torch.set_num_threads = set_num_threads
        gc.unfreeze()


def bind_to_cores(cores: Sequence[int]) -> None:
    """Keep all threads of this process on some CPU cores, one thread of torch for each; () changes nothing."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(len(cores))
