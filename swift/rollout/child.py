"""A command that a run starts, such as the servers of an environment, and that ends with the run.

It is the leader of a new process group: `close` ends the group, and a watcher process in it ends it if the run is
killed. Its output is written to a file, once the run has a folder.
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
"""Number of last lines in the message of a command that has ended."""
KEPT_LINES = 1000
"""Maximum number of lines that are kept until the run has a folder."""
ENDS_WITH_RUN = 'exec 3<&0; { cat <&3; kill -KILL 0; } >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'
"""Shell: kill the group when standard input, a pipe from the run, ends; become the command."""
LAUNCH_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables of torchrun, beside TORCHELASTIC_*: they describe ranks of the trainer, not commands or engines."""
OWN_VARIABLES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "SWIFT_EXIT_DIR")
"""Variables of swift for training processes, which commands must not inherit."""
GRACE_S = 10.0
"""Time for the command to end after an interrupt, in seconds."""


def is_of_launch(name: str) -> bool:
    """Whether a variable was set by torchrun."""
    return name in LAUNCH_VARIABLES or name.startswith("TORCHELASTIC_")


class Child:
    """See the module's docstring.

    Args:
        name: name of the command, for messages.
        command: words of the command.
        folder: working folder; None is that of this process.
        variables: environment variables, besides those of this process.
        advice: advice of the error after the command has ended.

    Raises:
        ResourceError: the command cannot be started.
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
                ["sh", "-c", ENDS_WITH_RUN, "sh", *command],
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
        """Write its output to `path`, including earlier output."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._file = path.open("a", encoding="utf-8", buffering=1)
            self._file.writelines(self._lines)

    @property
    def code(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def last_lines(self) -> str:
        """Its last lines, for messages."""
        with self._lock:
            lines = [line.strip() for line in self._lines if line.strip()]
        return f"its last lines: {' | '.join(lines[-SHOWN_LINES:]) or 'nothing'}"

    def check(self) -> None:
        """Raises EngineError, with its last lines, if it has ended."""
        code = self.code
        if code is None:
            return
        self._reader.join(1.0)
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        raise EngineError(f"{self.name}: {ended}; {self._advice}; {self.last_lines}")

    def close(self) -> None:
        self.interrupt()
        self.end(GRACE_S)

    def interrupt(self) -> None:
        """Interrupt the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def end(self, limit_s: float) -> None:
        """Wait for the command to end, then kill the whole group. Idempotent."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):  # all processes of the group have ended
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
