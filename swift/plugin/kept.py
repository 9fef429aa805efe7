"""Process settings that are restored after the import of a plugin, because a run depends on them.

A plugin may change settings that are not in `SETTINGS`, such as environment variables, threads of torch and its
deterministic mode. Random streams are not restored: a run seeds them after the import.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("swift.plugin")

STREAMS = ("stdin", "stdout", "stderr")


def _read_mask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _read_handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}  # type: ignore[misc]


def _set_handlers(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _read_clock() -> tuple[Any, ...]:
    return time.time, time.monotonic, time.perf_counter, time.sleep


def _set_clock(functions: tuple[Any, ...]) -> None:
    time.time, time.monotonic, time.perf_counter, time.sleep = functions


def _read_torch() -> tuple[Any, ...] | None:
    """Gradients, type and device that tensors have by default; None without torch, which then has its own defaults."""
    if (torch := sys.modules.get("torch")) is None:
        return None
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()


def _set_torch(state: tuple[Any, ...] | None) -> None:
    torch = sys.modules["torch"]
    grad, dtype, device = state or (True, torch.float32, torch.device("cpu"))
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device.type == "cpu" else device)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the working folder": (os.getcwd, os.chdir),
    "the umask": (_read_mask, os.umask),
    "signal handlers": (_read_handlers, _set_handlers),
    "the clock": (_read_clock, _set_clock),
    "torch's gradients, default type or device": (_read_torch, _set_torch),
}
"""Name -> the functions that read and set it."""


@dataclass(frozen=True)
class TorchKept:
    """The settings of torch when this object was made, of this thread and of all threads."""

    before: tuple[Any, ...] | None = field(default_factory=_read_torch)

    def put_back(self) -> None:
        """Restores the settings, with a note if any was changed."""
        if _read_torch() != self.before:
            _set_torch(self.before)
            logger.warning(
                "note: torch's gradients, default type or device: changed by a plugin or library during the run, which "
                "depends on them: put back; change them in the functions that need it, and back"
            )


@contextlib.contextmanager
def process_kept(subject: str) -> Iterator[None]:
    """Restores the settings of the process that the block changes, with a note. subject: the start of the note."""
    modules, loaded = sys.modules, dict(sys.modules)
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    streams = [(getattr(sys, name), os.dup(number)) for number, name in enumerate(STREAMS)]
    try:
        yield
    finally:
        changed = ["sys.modules"] if sys.modules is not modules or loaded.keys() - modules.keys() else []
        if changed:
            sys.modules = modules
            modules.update(loaded)  # modules that were imported a second time lack the changes of other modules
        for number, (stream, copy) in enumerate(streams):
            if _put_back(number, stream, copy):
                changed.append(f"sys.{STREAMS[number]}")
        for name, (read, write) in SETTINGS.items():
            torch_is_new = before[name] is None
            if (now := read()) != before[name]:
                write(before[name])
                changed += [] if torch_is_new and read() == now else [name]
        if changed:
            logger.warning(
                "note: %s: changed %s while it was imported, which a run depends on: put back; change it in the "
                "functions that need it",
                subject,
                ", ".join(changed),
            )


def _put_back(number: int, stream: Any, copy: int) -> bool:
    """Restores a standard stream and its descriptor; returns whether either was changed. Closes the copy."""
    try:
        same = os.path.sameopenfile(number, copy)
    except OSError:
        same = False  # it is closed
    if not same:
        os.dup2(copy, number)
    os.close(copy)
    name = STREAMS[number]
    same = same and getattr(sys, name) is stream and not getattr(stream, "closed", False)
    if getattr(stream, "closed", False):
        mode = "r" if number == 0 else "w"
        stream = open(number, mode, buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    setattr(sys, name, stream)
    return not same
