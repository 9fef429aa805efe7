"""Ends what a process leaves behind. A script of its own: `python -I -S guard.py WARD MARKER [FOLDER]`.

When the process WARD, which starts the guard, has ended in any way or calls `finish`, every process whose environment
holds `MARKER` is killed, shared-memory files that these alone had mapped are unlinked, and `FOLDER` is removed.
Semaphore and shared-memory trackers of Python get `GRACE_S` to clean up themselves.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.1
LOOK_S = 1.0
GRACE_S = 1.0
LIMIT_S = 8.0
TRACKER = b"multiprocessing.resource_tracker"


def has(pid: int, marker: bytes) -> bool:
    """Whether a process is alive and has the marker in its environment."""
    with contextlib.suppress(OSError):
        return marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def marked(marker: bytes) -> list[int]:
    """Live processes with the marker in their environment."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and has(pid, marker)]


def born(pid: int) -> str:
    """When a process started, which with its number names it for good; "" if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def family(ward: int, marker: bytes, known: dict[int, str]) -> dict[int, str]:
    """Children of the ward with the marker, those of `known` that live, and all below them.

    Some overwrite their environment with a title: when their parent or the ward has ended, only `known` has them.
    """

    def children(pid: int) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    found: dict[int, str] = {}
    todo = [pid for pid, start in known.items() if start and born(pid) == start]
    todo += [pid for pid in children(ward) if has(pid, marker)]
    while todo:
        pid = todo.pop()
        found[pid] = born(pid)
        todo += [one for one in children(pid) if one not in found]
    return found


def kill_titled(pid: int, title: bytes) -> None:
    """Kill one process, if that is how it calls itself: the number may be another's by now."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
            os.kill(pid, signal.SIGKILL)


def is_tracker(pid: int) -> bool:
    """Whether it is one that cleans up when its users are gone."""
    with contextlib.suppress(OSError):
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def mapped(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = line.partition("/dev/shm/")[2]
                if path and "/" not in path and not path.endswith(" (deleted)"):
                    found.add(path)
    return found


def end(marker: bytes, known: dict[int, str] | None = None) -> None:
    """Kill everything with the marker and all that is `known`, and unlink the memory that was theirs alone."""
    began, segments = time.monotonic(), set()
    while time.monotonic() - began < LIMIT_S:
        pids = {*marked(marker), *(pid for pid, start in (known or {}).items() if start and born(pid) == start)}
        if not pids:
            break
        patient = time.monotonic() - began < GRACE_S
        segments |= mapped(list(pids))
        for pid in pids:
            if not (patient and is_tracker(pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    everybody = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    for name in segments - mapped(everybody):
        if name.startswith(("psm_", "sem.", "torch_")) or "cpushm" in name:
            with contextlib.suppress(OSError):
                Path("/dev/shm", name).unlink()


def start(marker: str, folder: str = "") -> subprocess.Popen[bytes]:
    """A guard of this process."""
    words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), marker, folder]
    return subprocess.Popen(words, start_new_session=True, env={})


def finish(guard: subprocess.Popen[bytes], marker: str) -> None:
    """Have a guard end now what it watches; it knows processes that cannot be found any more."""
    guard.send_signal(signal.SIGUSR2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(LIMIT_S + 2.0)
    guard.kill()
    guard.wait()
    end(marker.encode())  # if it was too young to understand, or was killed


def main() -> None:
    """Wait for the end of the ward."""
    ward, marker, folder = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3] if len(sys.argv) > 3 else ""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    called: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))
    known: dict[int, str] = {}
    looked_at = 0.0
    while os.getppid() == ward and not called:
        if time.monotonic() - looked_at > LOOK_S:
            known, looked_at = family(ward, marker, known), time.monotonic()
        time.sleep(POLL_S)
    end(marker, family(ward, marker, known))
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
