"""Sees to it that a worker ends whole: engine, and every process that the engine has started.

The guard is a tiny process between the parent and the host. It leads the session and process group of the worker,
adopts what loses its parent in it, and never does anything that could hang. It ends the group (TERM, and KILL after a
while)

    * when the host ends, however: vLLM's workers outlive the process that made them,
    * when the parent says "end", or is gone: its end of the pipe closes, also at SIGKILL.

Named shared memory of libraries (vLLM's queues between tensor-parallel workers) outlives processes that are killed. The
guard remembers what its descendants have mapped, and removes what nobody maps any more at the end: only what libraries
name so, and what was not there before the worker. Models and data sets that users keep in /dev/shm are mapped as well.

When the guard itself is killed the kernel kills the host (PDEATHSIG: that signal comes with the end of the parent's
*thread*, and the guard has only one), and the parent kills the group.

    guard -> parent    "host <pid>", then "ended <returncode>", each on a line
    parent -> guard    "end": TERM, later KILL          "kill": KILL at once
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

POLL_S = 0.02
"""How often ending processes are looked at."""
LOOK_S = 2.0
"""How often the guard looks whether the parent lives, as a forked sibling of ours may hold the pipe open, and at what
its descendants have mapped."""
SHARED_MEMORY = Path("/dev/shm")
LIBRARIES_NAMES = re.compile(r"psm_\w+|sem\.\S+|nccl-\S+|torch_\d+_\S+|\S*-cpushm_\d+")
"""Named memory of Python's multiprocessing, its semaphores, NCCL, torch's tensors between processes, vLLM on a CPU."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> None:
    """Entry point of a worker's first process.

    Args:
        arguments: descriptor of the pipe to the parent, descriptor of the host's socket, parent's pid, seconds
            between TERM and KILL, cores of the host ("" leaves them as they are).
    """
    pipe, connection, parent = int(arguments[0]), int(arguments[1]), int(arguments[2])
    grace_s, cores = float(arguments[3]), [int(core) for core in arguments[4].split(",") if core]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    me, before = os.getpid(), _named()
    host = os.fork()
    if host == 0:
        os.close(pipe)
        _become_host(me, connection, cores)
    os.close(connection)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say(pipe, f"host {host}\n")
    _watch(pipe, parent, host, grace_s, before)


def _become_host(guard: int, connection: int, cores: Sequence[int]) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    from swift.rollout.engines.worker.host import serve  # torch is imported below this line

    serve(connection)


def _watch(pipe: int, parent: int, host: int, grace_s: float, before: dict[str, int]) -> None:
    """Until the host or the parent ends, or the parent says so; then nothing is left."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    poller.register(woken, select.POLLIN)
    word: bytes | None = None
    segments: set[str] = set()
    while _ended(host) is None and word is None and os.getppid() == parent:
        segments |= _mapped(descendants(os.getpid()))
        ready = dict(poller.poll(1000 * LOOK_S))
        if woken in ready:
            os.read(woken, 4096)
        if pipe in ready:
            word = _hear(pipe)
    if _ended(host) is not None:
        _say(pipe, f"ended {_codes[host]}\n")
    segments |= _mapped(descendants(os.getpid()))
    _end_group(pipe, kill=b"kill" in (word or b""), grace_s=grace_s)
    _remove(segments, before)
    if word is not None:
        _say(pipe, f"ended {_codes.get(host, -signal.SIGKILL)}\n")
    os._exit(0)


def _end_group(pipe: int, *, kill: bool, grace_s: float) -> None:
    """TERM to all, KILL to what is left after a while or once the parent is in a hurry."""
    if not Path("/proc/self/stat").exists():  # no Linux: the group is all that can be found, and includes this process
        os.killpg(0, signal.SIGKILL)
    deadline = time.monotonic() + grace_s
    for process in [] if kill else descendants(os.getpid()):
        _signal(process, signal.SIGTERM)
        _signal(process, signal.SIGCONT)  # a stopped process takes no other signal
    while not _reap():  # only the kernel knows the end: processes change parents while /proc is read
        kill = kill or time.monotonic() >= deadline or _in_a_hurry(pipe)
        for process in descendants(os.getpid()) if kill else []:
            _signal(process, signal.SIGKILL)
        time.sleep(POLL_S)


def _mapped(processes: Iterable[int]) -> set[str]:
    """Names of the shared memory that these processes use; files in folders below it are no such memory."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                path = Path("".join(line.split(maxsplit=5)[5:]))
                if path.parent == SHARED_MEMORY and not path.name.endswith("(deleted)"):
                    found.add(path.name)
    return found


def _named() -> dict[str, int]:
    """Files directly in shared memory, with their inodes."""
    try:
        with os.scandir(SHARED_MEMORY) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except OSError:  # this system has none
        return {}


def _remove(segments: set[str], before: dict[str, int]) -> None:
    """Remove those that libraries have made since `before`, and that nobody uses any more."""
    left = {name for name in segments if LIBRARIES_NAMES.fullmatch(name) and _is_new(name, before)}
    if left:
        left -= _mapped(int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    for name in left:
        with contextlib.suppress(OSError):  # gone meanwhile
            (SHARED_MEMORY / name).unlink()


def _is_new(name: str, before: dict[str, int]) -> bool:
    """Whether this user has made the file of that name since `before`."""
    try:
        found = (SHARED_MEMORY / name).lstat()
    except OSError:  # gone meanwhile
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and before.get(name) != found.st_ino


def _in_a_hurry(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0]) and b"kill" in _hear(pipe)


def descendants(process: int) -> list[int]:
    """Children, their children and so on, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = entry.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found: list[int] = []
    queue = [process]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


_codes: dict[int, int] = {}


def _reap() -> bool:
    """Collect what has ended; whether there is no child any more, and hence, as orphans are adopted, no descendant."""
    try:
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return False
            _codes[process] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return True


def _ended(process: int) -> int | None:
    _reap()
    return _codes.get(process)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _say(pipe: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the parent is gone, which the caller sees anyway
        os.write(pipe, text.encode())


def _hear(pipe: int) -> bytes:
    try:
        return os.read(pipe, 4096)
    except OSError:
        return b""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
