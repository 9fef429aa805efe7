"""stdout and stderr of a run that continues after its console is gone: a closed terminal, a full disk, `| head`."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Descriptor(io.FileIO):
    """A descriptor that is redirected to /dev/null after its first failed write, for writes of libraries too."""

    def write(self, data: Any, /) -> int:
        """Writes, without raising."""
        try:
            return super().write(data)
        except OSError:
            discard(self.fileno())
            return len(data)


def discard(descriptor: int) -> None:
    """Redirects a descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:  # else it was closed
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)


def survive_console(*names: str) -> None:
    """From now on writes to these of stdout and stderr do not fail; streams that the caller of `main` has set stay.

    A closed standard stream (`>&-`) is redirected to /dev/null: else the next opened file would get its descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            discard(number)
        if name != "stdin" and (name in names or stream is None) and stream is getattr(sys, f"__{name}__"):
            safe = io.TextIOWrapper(
                io.BufferedWriter(_Descriptor(number, "w", closefd=False)),
                encoding=stream.encoding if stream else "utf-8",
                errors="backslashreplace",
                line_buffering=stream.line_buffering if stream else True,
                write_through=stream.write_through if stream else False,
            )
            setattr(sys, name, safe)
