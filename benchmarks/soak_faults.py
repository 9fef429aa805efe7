"""The faults of a soak (`soak.py`): what is drawn, how each begins and ends, and the processes that it may meet."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

TICKETS = {
    "reward": ["slow", "hang", "raise", "nan", "count", "exit"],
    "awaited": ["hang", "block", "raise"],
    "engine": ["slow", "hang", "raise", "oom", "exit"],
    "trainer": ["oom", "nan", "hang"],
}
"""Faults inside of processes, which `soak_plugin.py` makes: place -> kinds."""
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
REPLIES = ["silence", "garbage", "status", "cut", "bytes"]
"""Damages of `soak_proxy.py`."""
TICKET_S = 120.0
"""Time in which a ticket must be taken, else it is withdrawn."""
LEAVE_S = 10.0
"""Time for a process to follow SIGTERM; other processes than the trainer may ignore it."""
CLOCK_S = [-86400, -3600, 3600, 86400]
NETWORK = "soak-server"
"""Network namespace of the server; the interfaces `soak0` here and `soak1` there join it with the soak's."""


@dataclass
class Fault:
    """kind: of the effect; target: kind of process, place, or thing that it meets; seconds: how long it shall last.

    lasted_s, remark: how long it did, and what there is to say about it, when it is over.
    """

    kind: str
    target: str
    seconds: float = 0.0
    pid: int | None = None
    lasted_s: float = 0.0
    remark: str = ""


def draw(rng: random.Random, targets: list[str], *, server: bool) -> Fault:
    """A fault. targets: the kinds of process that are there."""
    families = {"signal": 9, "ticket": 7, "clock": 1, "disk": 1, **({"network": 2, "replies": 3} if server else {})}
    match rng.choices(list(families), list(families.values()))[0]:
        case "signal":
            kind = rng.choice(list(SIGNALS))
            return Fault(kind, rng.choice(targets), rng.choice([1, 5, 25]) if kind == "stop" else 0)
        case "ticket":
            place = rng.choice(list(TICKETS))
            return Fault(rng.choice(TICKETS[place]), place)
        case "clock":
            return Fault("clock", "all", rng.choice(CLOCK_S))
        case "network":
            return Fault("cut", "network", rng.choice([1, 4, 12]))
        case "replies":
            return Fault(rng.choice(REPLIES), "replies", rng.choice([0.2, 1, 3]))
    return Fault("full", "disk", 10)


def kind_of(process: psutil.Process, tops: dict[int, str]) -> str | None:
    """The kind of a process below the commands `tops`; None for short-lived helpers."""
    if process.pid in tops:
        return tops[process.pid]
    words = process.cmdline()
    line = " ".join(words)
    marks = {
        "EngineActor": "engine actor", "spawn_main": "reward worker", "resource_tracker": "resource tracker",
        "raylet/raylet": "raylet", "gcs_server": "gcs_server", "engines/guard.py": "guard", " rlhf ": "rank",
    }  # fmt: skip
    return next((kind for mark, kind in marks.items() if mark in line), None)


def processes(tops: dict[int, str]) -> dict[str, list[psutil.Process]]:
    """The processes below the commands, themselves included, by kind. tops: process id -> kind."""
    found: dict[str, list[psutil.Process]] = {}
    for pid in tops:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if kind := kind_of(process, tops):
                        found.setdefault(kind, []).append(process)
    return found


def there(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Injector:
    """Begins and ends faults. faults: the folder of tickets; disk: the small file system of the run."""

    faults: Path
    disk: Path
    rng: random.Random

    def begin(self, fault: Fault, tops: dict[int, str]) -> bool:
        """Whether it has begun: False if no process is there that it could meet."""
        if fault.kind in SIGNALS:
            candidates = processes(tops).get(fault.target, [])
            if not candidates:
                return False
            fault.pid = self.rng.choice(candidates).pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(fault.pid, SIGNALS[fault.kind])
        elif fault.target in TICKETS:
            self._ticket(fault).touch()
        elif fault.kind == "clock":
            whole = self.faults / "clock.new"
            whole.write_text(str(int(fault.seconds)))
            whole.replace(self.faults / "clock")
        elif fault.target == "disk":
            fault.pid = next(iter(tops))  # the trainer or its launcher
            fill(self.disk / "filler")
        elif fault.target == "network":
            subprocess.run(["ip", "link", "set", "soak0", "down"], check=True)
        else:
            (self.faults / "replies").write_text(fault.kind)
        return True

    def lasts(self, fault: Fault, since_s: float) -> bool:
        """Whether its effect goes on, so many seconds after its beginning."""
        if fault.kind in ("kill", "terminate"):
            follows = fault.kind == "kill" or fault.target in ("trainer", "launcher")
            limit_s = float("inf") if follows else LEAVE_S
            return since_s < limit_s and there(fault.pid or 0)
        if fault.target in TICKETS:
            return since_s < TICKET_S and self._ticket(fault).exists()
        if fault.target == "disk" and not there(fault.pid or 0):
            return False
        return fault.kind != "clock" and since_s < fault.seconds

    def end(self, fault: Fault) -> None:
        """Undo what is left of it."""
        if fault.kind == "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(fault.pid or 0, signal.SIGCONT)
        elif fault.kind == "terminate" and there(fault.pid or 0):
            fault.remark = "ignored the signal"
        elif fault.target in TICKETS and self._ticket(fault).exists():
            self._ticket(fault).unlink(missing_ok=True)
            fault.remark = "met nobody"
        elif fault.target == "disk":
            (self.disk / "filler").unlink()
        elif fault.target == "network":
            subprocess.run(["ip", "link", "set", "soak0", "up"], check=True)
        elif fault.target == "replies":
            (self.faults / "replies").unlink()

    def _ticket(self, fault: Fault) -> Path:
        return self.faults / f"{fault.target}.{fault.kind}.1"


def fill(path: Path) -> None:
    """Take all that is free on a file system."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


def join_network() -> None:
    """Make the network namespace of the server: 10.211.0.2 there, 10.211.0.1 here."""
    for words in (
        f"netns add {NETWORK}", f"link add soak0 type veth peer name soak1 netns {NETWORK}",
        "addr add 10.211.0.1/24 dev soak0", "link set soak0 up", f"-n {NETWORK} addr add 10.211.0.2/24 dev soak1",
        f"-n {NETWORK} link set soak1 up", f"-n {NETWORK} link set lo up",
    ):  # fmt: skip
        subprocess.run(["ip", *words.split()], check=True)
    time.sleep(0.1)
