"""Keeps a process as it was while vLLM works in it: the trainer lives here too.

Besides what `engines/process.py` undoes, it destroys torch.distributed at its end and leaves names of shared memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

SEGMENTS_IN_RANKS = "//"
"""Prefix of the shared-memory names of an engine over training ranks: vLLM takes what follows the colon of `env://`,
and the variable that it keeps this in is gone once the engine is made."""


class SharedGroups:
    """The groups that vLLM makes in torch.distributed: one set per process, for all engines in it.

    The last engine that leaves removes them; the default group goes with them only if the first engine made it.
    """

    def __init__(self) -> None:
        self._engines = 0
        self._made_default = False

    def enter(self) -> None:
        """An engine is about to be made."""
        if self._engines == 0:
            self._made_default = not default_group_exists()
        self._engines += 1

    def leave(self, *destroy: Callable[[], None]) -> None:
        """An engine has ended. destroy: vLLM's functions that remove its groups, and the default group at the end."""
        self._engines -= 1
        if self._engines > 0:
            return
        default = dist.destroy_process_group

        def destroy_other(group: Any = None) -> None:
            if group is not None and group is not dist.group.WORLD:
                default(group)

        if not self._made_default:
            dist.destroy_process_group = destroy_other
        try:
            for step in destroy:
                step()
        finally:
            dist.destroy_process_group = default


groups = SharedGroups()
"""Those of this process."""


def default_group_exists() -> bool:
    """Whether torch.distributed is initialised, by whomever."""
    return dist.is_available() and dist.is_initialized()


def available_bytes() -> int:
    """Main memory that can be had without swapping, within the limits of the control group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        limit = int((root / "memory.max").read_text())
        free = min(free, limit - int((root / "memory.current").read_text()))
    return max(0, free)


def remove_segments(idents: Iterable[str]) -> None:
    """Unlink the shared memory by which the parts of one engine talk; processes that have mapped it keep it.

    Left to vLLM, the names stay when a process is killed, and those of an engine over training ranks are the same for
    every run: the next one could not start.
    """
    folder = Path("/dev/shm")
    if folder.is_dir():
        for ident in idents:
            for segment in folder.glob(f"{ident.strip('/')}-*cpushm*"):
                segment.unlink(missing_ok=True)
