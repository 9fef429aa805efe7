"""A command that a run starts for itself, such as the servers of an environment, and that ends with the run.

It leads a process group of its own: `close` ends the group, and so does a guard in it when the run is killed. What it
prints goes to a file, as soon as the run has a folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from swift.errors import EngineError, ResourceError

SHOWN_LINES = 20
"""Last lines of a command that has ended."""
KEPT_LINES = 1000
"""Lines that are kept until there is a file for them."""
GUARDED = 'exec 3<&0; { cat <&3; kill -KILL 0; } >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'
"""Shell: kill the group when standard input, a pipe from the run, ends; become the command."""
LAUNCH_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""torchrun's, beside TORCHELASTIC_*: they describe the trainer's ranks, of which a command or an engine is none."""
OWN_VARIABLES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "SWIFT_EXIT_DIR")
"""Ours of a training process; a command with them would take itself for one."""
GRACE_S = 10.0
"""How long the command may take to end when it is asked to."""


def is_of_launch(name: str) -> bool:
    """Whether a variable was set by torchrun."""
    return name in LAUNCH_VARIABLES or name.startswith("TORCHELASTIC_")


class Child:
    """See the module's docstring.

    Args:
        name: of the command, for messages.
        command: its words.
        folder: where it starts; None is the working folder.
        variables: added to the environment.
        advice: what to do when it ends with an error.

    Raises:
        ResourceError: it cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
        advice: str = "correct the command",
    ) -> None:
        self.name, self._advice = name, advice
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        inherited = {
            name: value for name, value in os.environ.items() if name not in OWN_VARIABLES and not is_of_launch(name)
        }
        try:
            self._process = subprocess.Popen(
                ["sh", "-c", GUARDED, "sh", *command],
                cwd=folder,
                env={**inherited, **(variables or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(f"{name}: {shlex.join(command)}: cannot be started ({error}); correct it") from error
        self._reader = threading.Thread(target=self._read, name=f"output of {name}", daemon=True)
        self._reader.start()

    def log_to(self, path: Path) -> None:
        """From now on its output goes to `path`, with what it has printed so far."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._file = path.open("a", encoding="utf-8", buffering=1)
            self._file.writelines(self._lines)

    @property
    def code(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def said(self) -> str:
        with self._lock:
            lines = [line.strip() for line in self._lines if line.strip()]
        return f"its last lines: {' | '.join(lines[-SHOWN_LINES:]) or 'nothing'}"

    def check(self) -> None:
        """Raises EngineError, with its last lines, when it has ended."""
        code = self.code
        if code is None:
            return
        self._reader.join(1.0)
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        raise EngineError(f"{self.name}: {ended}; {self._advice}; {self.said}")

    def close(self) -> None:
        self.interrupt()
        self.end(GRACE_S)

    def interrupt(self) -> None:
        """Ask the whole group to end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def end(self, limit_s: float) -> None:
        """End the whole group, which has so long to end by itself; repeatable."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(1.0)
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._lock:
                self._lines.append(line)
                if self._file is not None:
                    self._file.write(line)
