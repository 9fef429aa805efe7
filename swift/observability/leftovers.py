"""What runs that were killed have left on this machine, with the command that removes it."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swift.errors import counted
from swift.observability.machine import Check

SHARED = Path("/dev/shm")
SEGMENTS = ("psm_*", "torch_*", "*cpushm*")
FOLDERS = ("swift-ray-*", "swift-rollout-*", "swift-engines-*", "swift-teacher-*", "swift-adapters-*")
TITLES = ("-m swift ", "/bin/swift ", "ray::", "raylet", "VLLM::", "swift-rl")
"""Parts of the command lines of processes that runs start."""
PROC = Path("/proc")


def leftovers() -> Iterator[Check]:
    """Processes without a parent, shared memory that no process has mapped, temporary folders that none uses."""
    orphans = sorted(_orphans())
    segments, folders = _unused(SHARED, SEGMENTS), _unused(Path(tempfile.gettempdir()), FOLDERS)
    if orphans:
        found = f"{counted(len(orphans), 'process')} of earlier runs or servers whose console is gone"
        shown = " ".join(map(str, orphans))
        yield Check(
            "processes",
            "warning",
            found,
            f"if none of them is wanted (`ps -p {shown.replace(' ', ',')}`): kill {shown}",
        )
    if segments:
        size = sum(path.stat().st_size for path in segments if path.exists())
        found = f"{counted(len(segments), 'segment')} that no process uses, {size / 2**20:.0f} MiB"
        yield Check("shared memory", "warning", found, _remove(segments))
    if folders:
        yield Check(
            "temporary folders", "warning", f"{counted(len(folders), 'folder')} that no process uses", _remove(folders)
        )
    if not (orphans or segments or folders):
        yield Check("leftovers", "ok", "none of earlier runs")


def _remove(paths: list[Path]) -> str:
    return f"rm -r {' '.join(shlex.quote(str(path)) for path in paths)}"


def _read(path: Path) -> str:
    """A file of /proc; "" if its process has ended or belongs to another user."""
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _processes() -> list[Path]:
    return [path for path in PROC.iterdir() if path.name.isdigit()] if PROC.is_dir() else []


def _orphans() -> Iterator[int]:
    for process in _processes():
        stat = _read(process / "stat").rpartition(")")[2].split()
        command = _read(process / "cmdline")
        mine = _owner(process) == os.getuid() and int(process.name) != os.getpid()
        if mine and stat[1:2] == ["1"] and any(title in command for title in TITLES):
            yield int(process.name)


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


def _unused(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Own files or folders of these names that no process has mapped or opened, or names."""
    found = [path for name in patterns for path in folder.glob(name) if _owner(path) == os.getuid()]
    if not found:
        return []
    used = [text for process in _processes() for text in _mentions(process)]
    return sorted(path for path in found if not any(str(path) in text for text in used))


def _mentions(process: Path) -> Iterator[str]:
    """Where a process names files that it uses; nothing if it has ended or belongs to another user."""
    yield from (_read(process / name) for name in ("maps", "cmdline", "environ"))
    with contextlib.suppress(OSError):
        for one in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield str(one.readlink())
