"""Protects the state of a process in which an engine starts or samples; the trainer may run in it too.

vLLM advances the random generators of Python, NumPy and torch, replaces `torch.set_num_threads`, sets environment
variables that torchrun's children read (LOCAL_WORLD_SIZE) or inherit (LD_PRELOAD), and freezes the heap of the garbage
collector. The context managers here restore these after the calls that change them.
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
    """The innermost frames of a thread in one line; None is the main thread."""
    frame = sys._current_frames().get((thread or threading.main_thread()).ident or 0)
    frames = traceback.extract_stack(frame)[-STACK_FRAMES:]
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in reversed(frames))


def on_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` on a new daemon thread, which does not keep the process from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by the future
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def random_state() -> Callable[[], None]:
    """Save the state of all random generators of the process; returns the function that restores it."""
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
    """Context that restores the state of all random generators of the process at its end."""
    restore = random_state()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def same_environment(during: Mapping[str, str]) -> Iterator[None]:
    """Context that restores environment variables, heap and `torch.set_num_threads`; `during` is set inside."""
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
    """Bind all threads of this process to CPU cores, with one torch thread for each; () has no effect."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(len(cores))
