"""Processes of `--atropos_env`: message API, policy server, environments, each with its own process group and log.

    start(...)   starts a process
    check()      raises if a process has died, with its name and its last lines
    close()      ends all processes in reverse order of their start

A thread watches the processes. If one has died and `check` is not called within `NOTICE_S`, because the trainer waits
for that process, the thread ends the run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import httpx

from swift.errors import ConfigError, EngineError, end_process
from swift.rollout.child import GRACE_S, Child

LOOK_S = 0.2
"""Interval between two checks of the processes, in seconds."""
NOTICE_S = 10.0
"""Time for the trainer to call `check` after a process has died, in seconds."""


@dataclass(eq=False)
class Processes:
    """Processes of this run, by name."""

    _children: dict[str, Child] = field(default_factory=dict)
    _may_end: set[str] = field(default_factory=set)
    _folders: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)
    _logs: Path | None = None
    _watching: threading.Thread | None = None
    _raised: threading.Event = field(default_factory=threading.Event)
    _closing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        advice: str = "correct the command",
        may_end: bool = False,
    ) -> None:
        """Start a process.

        Args:
            name: name of the process in messages and of its log.
            command: words of the command; no shell runs it.
            variables: environment variables, besides those of this process.
            advice: advice of the error after its death.
            may_end: whether it may end with code 0 before `close`.

        Raises:
            ResourceError: it cannot be started.
        """
        child = Child(name, command, variables={"PYTHONUNBUFFERED": "1", **(variables or {})}, advice=advice)
        with self._lock:
            self._children[name] = child
            self._may_end |= {name} if may_end else set()
        if self._logs is not None:
            child.log_to(self._logs / f"{name}.log")
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="processes", daemon=True)
            self._watching.start()

    def new_folder(self, prefix: str) -> Path:
        """A folder that `close` removes."""
        self._folders.append(tempfile.TemporaryDirectory(prefix=prefix))
        return Path(self._folders[-1].name)

    def log_to(self, folder: Path) -> None:
        """Write the output of all processes to `folder`, including earlier output."""
        self._logs = folder
        for name, child in self._children.items():
            child.log_to(folder / f"{name}.log")

    def wait_until(self, is_ready: Callable[[], bool], name: str, limit_s: float, advice: str = "") -> None:
        """Wait until a started process is ready; `advice` is for the error after the time limit.

        Raises EngineError: a process has died, or `limit_s` has passed.
        """
        limit = time.monotonic() + limit_s
        while not is_ready():
            self.check()
            if time.monotonic() > limit:
                raise EngineError(f"{name}: not ready within {limit_s:g} s; {advice}{self._children[name].last_lines}")
            time.sleep(LOOK_S)

    def check(self) -> None:
        """Raises EngineError: a process has died."""
        if (died := self._dead_child()) is not None:
            self._raised.set()
            died.check()

    def close(self) -> None:
        """End all processes, environments first; repeatable."""
        self._closing.set()
        with self._lock:
            children, self._children = list(self._children.values())[::-1], {}
        for child in children:
            child.interrupt()
        limit = time.monotonic() + GRACE_S
        for child in children:
            child.end(max(0.0, limit - time.monotonic()))
        for folder in self._folders:
            folder.cleanup()

    def _dead_child(self) -> Child | None:
        with self._lock:
            children = list(self._children.items())
        ended = ((name, child) for name, child in children if child.code is not None)
        return next((child for name, child in ended if child.code or name not in self._may_end), None)

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            if (died := self._dead_child()) is None:
                continue
            if not self._raised.wait(NOTICE_S) and not self._closing.is_set():
                try:
                    died.check()
                except EngineError as error:
                    self.close()
                    end_process(error)
            return


def library() -> Path | None:
    """The folder that holds atroposlib, in this environment or where `make install` puts it; None without one."""
    spec = find_spec("atroposlib")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parents[1]
    folder = Path(sys.prefix, "atropos")
    return folder if (folder / "atroposlib").is_dir() else None


def with_library(variables: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Environment variables with which a process can import atroposlib."""
    paths = (os.environ.get("PYTHONPATH"), library())
    return {**variables, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}


def answers(url: str) -> bool:
    """Whether a GET of the URL returns status 200."""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """A free port of the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def words(command: str, variables: Mapping[str, str]) -> list[str]:
    """Split a command into words, and substitute `$NAME` and `${NAME}` of these variables.

    Raises ConfigError: a quotation mark is missing, or the program does not exist.
    """
    try:
        found = [string.Template(word).safe_substitute(variables) for word in shlex.split(command)]
    except ValueError as error:
        raise ConfigError(f"--atropos_env: {command}: {error}; correct the quotation marks") from error
    if not found or shutil.which(found[0]) is None:
        raise ConfigError(f"--atropos_env: {command}: no such program; correct the command")
    return found
