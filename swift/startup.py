"""What keeps the start and the end of a process short. Nothing here changes what a run does.

* `defer`: packages that others import only because they are installed run when somebody looks into them.
* `collector_resting`: libraries and weights load without rounds of the garbage collector.
* `QuickEnd`: a process that held torch ends without taking a million objects apart one by one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_KNOWN = frozenset(("__class__", "__file__", "__loader__", "__name__", "__package__", "__reduce_ex__", "__spec__"))
"""What a deferred module knows without running: what the import system, `inspect` and `pickle` ask of every module."""


class DeferredModule(ModuleType):
    """Stands in `sys.modules` for a package that nobody has used yet; the first use imports it.

    The import is the ordinary one: the stand-in leaves `sys.modules` first, so locks, errors and submodules are the
    import system's own, and a package that fails to import fails again at the next `import`. Who holds the stand-in
    (`import datasets` at the head of a module) goes on through it to the real module.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in _KNOWN:
            return object.__getattribute__(self, name)
        return getattr(_real(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_real(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_real(self), name)

    def __dir__(self) -> list[str]:
        return dir(_real(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return importlib.import_module, (self.__name__,)


def _real(stand_in: ModuleType) -> ModuleType:
    """The module that `stand_in` stands for, imported if nobody has done so."""
    name = stand_in.__name__
    if sys.modules.get(name) is stand_in:
        sys.modules.pop(name, None)
    return importlib.import_module(name)


def defer(*names: str) -> None:
    """Puts off the import of top-level packages until an attribute of theirs is used.

    It helps where other code says `import package` and seldom uses it; `from package import name` imports at once.
    What is already imported, and what is not installed, stays as it is.
    """
    for name in names:
        if name in sys.modules:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            continue
        stand_in = DeferredModule(name)
        known = {
            "__spec__": spec,
            "__file__": spec.origin,
            "__loader__": spec.loader,
            "__package__": spec.parent,
        }
        for attribute, value in known.items():
            object.__setattr__(stand_in, attribute, value)
        sys.modules[name] = stand_in


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


class QuickEnd:
    """Ends the process after Python's own exit handlers, before it frees what the kernel frees at once.

    After a training run that teardown takes a quarter of the whole processor time of a short one. `arm` registers a
    handler before anybody else, so it runs after all others: threads have been joined, executors, loggers and engines
    have closed. It writes out what files and C libraries still hold. Where others had registered handlers before (a
    debugger, coverage), where torch was never loaded, or where the command ended without a code of its own, the
    process ends as usual.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None

    def arm(self) -> None:
        """Call first thing in a process."""
        if getattr(atexit, "_ncallbacks", lambda: 1)() == 0:
            atexit.register(self._leave)

    def _leave(self) -> None:
        if self.exit_code is None or "torch" not in sys.modules:
            return
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except (OSError, ValueError):
            return  # the interpreter's own end reports it
        write_out_files()
        os._exit(self.exit_code)


def write_out_files() -> None:
    """Writes out what open files of this process still hold in Python's and in C's buffers.

    A file that takes it no more (a full disk) is named on stderr.
    """
    gc.unfreeze()  # what is frozen is not listed
    objects, lost = gc.get_objects(), set[str]()
    for kinds in ((io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)):  # the first write into the second
        for one in objects:
            if type(one) in kinds:
                try:
                    one.flush()
                except ValueError:  # it is closed
                    continue
                except OSError as error:
                    name = str(getattr(one, "name", "a file"))
                    if error.errno not in (errno.EPIPE, errno.EBADF) and name not in lost:  # else nobody reads it
                        lost.add(name)
                        sys.stderr.write(f"{name}: {error.strerror}; what was written to it last is lost\n")
    ctypes.CDLL(None).fflush(None)
