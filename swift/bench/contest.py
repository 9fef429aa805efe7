"""Two contenders, each in its own process, that take turns: A B A B ...

While one works the other waits for its turn on a socket, so both see the same machine at nearly the same moment
and neither shares a heap, a thread pool or a cache of compiled kernels with the other. Lines of JSON go both ways:

    child  -> {"ready": ...}            loaded
    parent -> {"go": true}              take one turn          parent -> {"go": false}    end
    child  -> {"seconds": ..., ...}     the turn is over
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.bench.work import Work

SIDES = ("swift", "trl")


class Gate:
    """The child's end: waits for its turns and reports them.

    Args:
        channel: the connected socket.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._file = channel.makefile("rw", encoding="utf-8")
        self._fresh = True

    def send(self, **message: Any) -> None:
        """Send one line."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def turn(self) -> bool:
        """Wait; whether to take a turn. Before the first one the memory peak of loading is forgotten."""
        line = self._file.readline()
        if self._fresh:
            self._fresh = False
            forget_peak()
        return bool(line) and json.loads(line)["go"]

    def serve(self, work: Callable[[], dict[str, Any] | None]) -> None:
        """Take turns of `work` until the end; what it returns goes into the report and wins over what is measured."""
        self.send(ready=True)
        while self.turn():
            watch = Stopwatch()
            more = work()
            self.send(**{**watch.read(), **memory(), **(more or {})})


class Stopwatch:
    """Seconds by the clock and seconds computed by this process and its workers, from its making on."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), processor_seconds(os.getpid())

    def read(self) -> dict[str, float]:
        """`seconds` and `processor_s` so far."""
        clock, processor = self._began
        if (cuda := _cuda()) is not None:
            cuda.synchronize()
        return {"seconds": time.perf_counter() - clock, "processor_s": processor_seconds(os.getpid()) - processor}


def processor_seconds(pid: int) -> float:
    """What a process and its living children have computed: says more than the clock on a machine that is busy."""
    import psutil

    parent, own = psutil.Process(pid), 0.0
    counted = parent.children(recursive=True)
    if pid == os.getpid():
        own = time.process_time()  # the kernel's table counts in hundredths, which is too coarse for a publication
    else:
        counted.append(parent)
    times = [process.cpu_times() for process in counted]
    return own + sum(one.user + one.system for one in times)


def _cuda() -> Any:
    """torch.cuda, if this process uses it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def forget_peak() -> None:
    """Let the peak of memory begin anew, that of resident memory where the system can do that (Linux)."""
    if (cuda := _cuda()) is not None:
        cuda.reset_peak_memory_stats()
    path = Path("/proc/self/clear_refs")
    if path.exists():
        with contextlib.suppress(PermissionError):  # then the peak of loading counts too, on every side
            path.write_text("5", encoding="ascii")


def memory() -> dict[str, float]:
    """Peak memory since `forget_peak`, resident memory of now, and what its own worker processes have now, in MiB."""
    import psutil

    workers = 0
    for child in psutil.Process().children(recursive=True):
        try:
            workers += child.memory_full_info().uss
        except psutil.Error:  # it ended meanwhile
            continue
    return {
        "peak_mib": peak_mib(),
        "resident_mib": psutil.Process().memory_info().rss / 2**20,
        "workers_mib": workers / 2**20,
    }


def peak_mib() -> float:
    """Peak memory of this process since `forget_peak`, else since its start: allocated on its GPU, else resident."""
    if (cuda := _cuda()) is not None:
        return cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Contender:
    """The parent's end of one child.

    Args:
        side: swift or trl.
        kind: which task, a function of `swift.bench.<side>_side`.
        work: what it works on.
        python: another interpreter; None is this one.
    """

    def __init__(self, side: str, kind: str, work: Work, python: str | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self.side, self.kind = side, kind
        with theirs:
            self._process = subprocess.Popen(
                _command(side, kind, work, theirs.fileno(), python),
                pass_fds=[theirs.fileno()],
                **place(work, other_interpreter=python is not None),
                stdout=self._output,
                stderr=self._output,
            )
        self._socket = ours
        self._file = ours.makefile("r", encoding="utf-8")

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            RuntimeError: the child ended, with the end of what it printed.
        """
        line = self._file.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._output.seek(0)
        tail = self._output.read().decode(errors="replace")[-4000:]
        raise RuntimeError(f"{self.side}/{self.kind} ended with {self._process.returncode}:\n{tail}")

    def turn(self) -> dict[str, Any]:
        """Let it take one turn; its report."""
        self._socket.sendall(b'{"go": true}\n')
        return self.receive()

    def close(self) -> None:
        """End it."""
        try:
            self._socket.sendall(b'{"go": false}\n')
            self._process.wait(60)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._file.close()
            self._socket.close()
            self._output.close()


def place(work: Work, *, other_interpreter: bool = False) -> dict[str, Any]:
    """Where a side is started, as arguments of `Popen`: it works on the CPU, or on one GPU.

    Another interpreter must not find this package, whose name is ms-swift's too: neither in the present folder nor on
    this one's path.
    """
    gpu = "" if work.device == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    if not other_interpreter:
        return {"env": environment}
    environment.pop("PYTHONPATH", None)
    return {"env": environment, "cwd": work.folder}


def _command(side: str, kind: str, work: Work, descriptor: int, python: str | None) -> list[str]:
    if python is None:
        return [sys.executable, "-m", "swift.bench.contender", side, kind, work.to_json(), str(descriptor)]
    from swift.bench.ms_swift import turns_command

    return turns_command(python, work, descriptor)


def alternate(
    kind: str,
    work: Work,
    *,
    pairs: int,
    warmup: int,
    sides: Sequence[str] = SIDES,
    kinds: Mapping[str, str] | None = None,
    pythons: Mapping[str, str] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Reports of each side's turns; who begins changes from pair to pair.

    Args:
        kind: the task.
        work: what both work on.
        pairs: measured turns of each side.
        warmup: turns before, not reported.
        sides: who takes part.
        kinds: the task of sides that have another one.
        pythons: the interpreter of sides that need one of their own.
    """
    contenders: list[Contender] = []
    reports: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    try:
        for side in sides:
            contenders.append(Contender(side, (kinds or {}).get(side, kind), work, (pythons or {}).get(side)))
        for contender in contenders:
            contender.receive()
        for number in range(warmup + pairs):
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                report = contender.turn()
                if number >= warmup:
                    reports[contender.side].append(report)
    finally:
        for contender in contenders:
            contender.close()
    return reports


def ask(side: str, kind: str, work: Work) -> dict[str, Any]:
    """One turn of one contender."""
    return alternate(kind, work, pairs=1, warmup=0, sides=[side])[side][0]


def set_threads(count: int | None) -> None:
    """Threads of every contender that starts from now on; None leaves them to torch.

    On a machine that others use as well, 1 gives steadier figures: two spinning threads on one free core can take
    ten times as long as one thread.
    """
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)


def seconds(reports: Sequence[dict[str, Any]], name: str = "seconds") -> list[float]:
    """One figure of every report."""
    return [float(report[name]) for report in reports]
