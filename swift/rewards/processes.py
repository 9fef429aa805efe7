"""Starting and ending worker processes so that none is ever left behind.

Every worker leads its own session, so one signal reaches it and its children; children that moved to a
session of their own are found through /proc. A *reaper*, a minimal interpreter that holds a pipe to this
process, ends all workers if this process disappears without a word (SIGKILL, out of memory).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

ACCELERATOR_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)

# The worker sees the modules of this process: same sys.path, whatever the working folder is.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from swift.rewards.worker import main
main(int(sys.argv[1]))
"""

# The pipe ends with its last writer; a forked sibling may hold it open, hence the look at the parent.
_REAPER = """
import os, select, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
parent, alive, rest = int(sys.argv[1]), set(), b""
while os.getppid() == parent:
    if not select.select([0], [], [], 1.0)[0]:
        continue
    data = os.read(0, 65536)
    if not data:
        break
    *lines, rest = (rest + data).split(b"\\n")
    for line in lines:
        word, pid = line.split()
        (alive.add if word == b"add" else alive.discard)(int(pid))
for pid in alive:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
"""


def spawn(log: IO[bytes] | int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a worker in a session of its own; its output goes to `log`.

    Returns:
        The process, and our end of the socket to it (non-blocking).
    """
    ours, theirs = socket.socketpair()
    environment = {
        **os.environ,
        **dict.fromkeys(ACCELERATOR_VARIABLES, ""),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    path = [entry or str(Path.cwd()) for entry in sys.path]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), json.dumps(path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=environment,
        )
    ours.setblocking(False)
    return process, ours


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Ends a worker, its process group and all its descendants, and collects its exit status."""
    strays = descendants(process.pid)
    for target, kill in [(process.pid, os.killpg), *((pid, os.kill) for pid in strays)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(target, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it dies when it wakes
        process.wait(timeout=5)


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on of a process, as /proc shows them; [] without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def memory_limit() -> int | None:
    """Half of the memory this process may use, in bytes, at least 4 GiB; None when it cannot be told."""
    sizes = []
    with contextlib.suppress(OSError, ValueError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(name).read_text()))
    return max(min(sizes) // 2, 4 << 30) if sizes else None


class Reaper:
    """Ends the workers if this process dies; costs one small process per pool."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[Any] = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REAPER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def add(self, pid: int) -> None:
        """From now on `pid` (a process group) ends with this process."""
        self._tell(f"add {pid}\n")

    def discard(self, pid: int) -> None:
        """`pid` has ended; its number may belong to somebody else soon."""
        self._tell(f"drop {pid}\n")

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody killed the reaper: we go on without
                pipe.write(line)
                pipe.flush()

    def close(self) -> None:
        """Ends the reaper; workers still listed end with it."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()
