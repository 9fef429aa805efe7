"""Two network namespaces with a cable between them: as near to two machines as one machine gets."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def possible() -> bool:
    """Whether this user may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"swift-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made.returncode == 0


@dataclass
class TwoHosts:
    """Hosts 0 and 1 with addresses of their own; nothing else is reachable from them."""

    number: int = field(default_factory=lambda: os.getpid() % 250 + 1)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> TwoHosts:
        for host in (0, 1):
            run("ip", "netns", "add", self.name(host))
            run("ip", "-n", self.name(host), "link", "set", "lo", "up")
        run("ip", "link", "add", self.cable(0), "type", "veth", "peer", "name", self.cable(1))
        for host in (0, 1):
            run("ip", "link", "set", self.cable(host), "netns", self.name(host))
            run("ip", "-n", self.name(host), "addr", "add", f"{self.address(host)}/24", "dev", self.cable(host))
            run("ip", "-n", self.name(host), "link", "set", self.cable(host), "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + 15
        for process in self.started:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for host in (0, 1):
            subprocess.run(["ip", "netns", "delete", self.name(host)], capture_output=True, check=False)

    def name(self, host: int) -> str:
        return f"swift-{os.getpid()}-{host}"

    def cable(self, host: int) -> str:
        return f"sw{os.getpid() % 100000}x{host}"

    def address(self, host: int) -> str:
        return f"10.77.{self.number}.{host + 1}"

    def cut(self) -> None:
        """Unplug the cable: packets are lost, nobody is told."""
        run("ip", "-n", self.name(1), "link", "set", self.cable(1), "down")

    def processes(self, *only: int) -> dict[int, str]:
        """What runs on the hosts: process id -> command line."""
        found = {}
        for host in only or (0, 1):
            listed = subprocess.run(
                ["ip", "netns", "pids", self.name(host)], capture_output=True, text=True, check=True
            )
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return {pid: words for pid, words in found.items() if words}  # a zombie has none

    def start(self, host: int, command: list[str], *, folder: Path, **variables: Any) -> subprocess.Popen[str]:
        """Run a command on a host; its output goes to `<folder>/host-<n>.log`."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # of earlier tests
        environ = {**own, "GLOO_SOCKET_IFNAME": self.cable(host), "OMP_NUM_THREADS": "1"}
        environ |= {name: str(value) for name, value in variables.items()}
        with (folder / f"host-{host}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name(host), *command],
                env=environ, stdout=log, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self.started.append(process)
        return process


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
