"""Guard process that cleans up after its parent. Run as a script: `python -I -S guard.py PARENT MARKER [FOLDER]`.

When the parent has ended in any way or calls `finish`, the guard kills every process whose environment has `MARKER`,
unlinks the shared-memory files that only these processes had mapped, and removes `FOLDER`. Python's trackers of
semaphores and shared memory get `GRACE_S` to clean up first.

Ray ends a driver whose raylet or GCS server has ended, with exit code 1 and no more than a line of its own; then the
guard prints the error.
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
DRIVER_LOGS = "session_2*/logs/python-core-driver-*.log"
ENDED_BY_RAY = {
    b"connection to the plasma store is failed. Terminate the process": "raylet",
    b"Failed to connect to GCS within": "GCS server",
}
"""In the last lines of a driver's log -> what it was ended with."""
LAST_BYTES = 4096


def has_marker(pid: int, marker: bytes) -> bool:
    """Whether a process is alive and has the marker in its environment."""
    with contextlib.suppress(OSError):
        return marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def marked(marker: bytes) -> list[int]:
    """Processes with the marker in their environment; their ids."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and has_marker(pid, marker)]


def start_time(pid: int) -> str:
    """Start time of a process, which tells it from a later process with the same id; "" if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def descendants(parent: int, marker: bytes, known: dict[int, str]) -> dict[int, str]:
    """Process id -> start time: children of `parent` with the marker, those of `known` still running, and all below.

    Some processes overwrite their environment with a title; when their own parent has ended, only `known` has them.
    """

    def children(pid: int) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    found: dict[int, str] = {}
    todo = [pid for pid, start in known.items() if start and start_time(pid) == start]
    todo += [pid for pid in children(parent) if has_marker(pid, marker)]
    while todo:
        pid = todo.pop()
        found[pid] = start_time(pid)
        todo += [child for child in children(pid) if child not in found]
    return found


def kill_titled(pid: int, title: bytes) -> None:
    """Kill a process if its command line begins with `title`: its id may belong to another process by now."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
            os.kill(pid, signal.SIGKILL)


def is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker of Python, which cleans up when its users have ended."""
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
    """Kill all processes with the marker and those of `known`; unlink the shared memory that only they had mapped."""
    began, segments = time.monotonic(), set()
    while time.monotonic() - began < LIMIT_S:
        pids = {*marked(marker), *(pid for pid, start in (known or {}).items() if start and start_time(pid) == start)}
        if not pids:
            break
        in_grace = time.monotonic() - began < GRACE_S
        segments |= mapped(list(pids))
        for pid in pids:
            if not (in_grace and is_tracker(pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    remaining = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    for name in segments - mapped(remaining):
        if name.startswith(("psm_", "sem.", "torch_")) or "cpushm" in name:
            with contextlib.suppress(OSError):
                Path("/dev/shm", name).unlink()


def ended_with(folder: str) -> str:
    """The process with which Ray has ended the driver whose files are in this folder; "" if it has not."""
    last = b""
    for log in Path(folder).glob(DRIVER_LOGS):
        with contextlib.suppress(OSError):
            last += log.read_bytes()[-LAST_BYTES:]
    return next((name for words, name in ENDED_BY_RAY.items() if words in last), "")


def start(marker: str, folder: str = "") -> subprocess.Popen[bytes]:
    """Start a guard of this process."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), marker, folder]
    return subprocess.Popen(command, start_new_session=True, env={})


def finish(guard: subprocess.Popen[bytes], marker: str) -> None:
    """Make a guard clean up now: it has recorded processes that have lost the marker."""
    guard.send_signal(signal.SIGUSR2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(LIMIT_S + 2.0)
    guard.kill()
    guard.wait()
    end(marker.encode())  # if the guard had not installed its signal handler yet, or was killed


def main() -> None:
    """Wait for the end of the parent or for `finish`, then clean up."""
    parent, marker, folder = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3] if len(sys.argv) > 3 else ""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    finishing: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: finishing.append(number))
    known: dict[int, str] = {}
    looked_at = 0.0
    while os.getppid() == parent and not finishing:
        if time.monotonic() - looked_at > LOOK_S:
            known, looked_at = descendants(parent, marker, known), time.monotonic()
        time.sleep(POLL_S)
    if folder and not finishing and (lost := ended_with(folder)):
        with contextlib.suppress(OSError):  # the console is gone
            print(
                f"swift: error: ray: its {lost} has ended (killed, or no memory was left), and Ray ended this process "
                "with it; resume from the last checkpoint (--resume_from_checkpoint last)",
                file=sys.stderr,
                flush=True,
            )
    end(marker, descendants(parent, marker, known))
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
