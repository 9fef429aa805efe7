"""Signals that stop a command: from a scheduler, the keyboard, or a closing terminal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

INSISTING = (signal.SIGTERM, signal.SIGINT)
"""A person who insists repeats these; shells and schedulers repeat the others by themselves."""
STOP = (*INSISTING, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@contextlib.contextmanager
def answered(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Stop signals are handled by `handler` inside the block, on the main thread; SIGHUP under `nohup` stays ignored.

    Forks of this process keep the default action: a pool ends its workers with SIGTERM.
    """
    owner = os.getpid()

    def answer(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    former = {number: signal.signal(number, answer) for number in STOP if number not in ignored}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before or signal.SIG_DFL)  # None: a handler of a C library


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Children that this thread starts inside the block block SIGHUP, SIGQUIT and SIGUSR1.

    A closing terminal, or a signal to all processes of a job, would end them while the current step needs them. They
    end with this process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOP) - set(INSISTING))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
