"""What `swift doctor` finds in a run, for the page: with its steps, and at a small share of the time for a live run.

A process of its own computes it, since it may take half a minute, in which the page has to answer:
`python -m swift.viewing.diagnosis RUN` prints it as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from swift.errors import ConfigError
from swift.observability.doctor import examined
from swift.observability.findings import CAUSES

REST = 20
"""Pause after a diagnosis of a run that goes on, in multiples of its duration."""
NICE = 10
"""Added to the niceness of its process."""


class Diagnosis:
    """The causes of a run, looked for at the first call, and again if the run has logged more steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  `close` does
        self._found: dict[str, Any] = {"causes": [], "problem": "", "waits": True}
        self._last_step: int | None = None
        self._began = self._rests_until = 0.0

    def __call__(self, last_step: int | None) -> dict[str, Any]:
        """What is known by now: `causes`, as `swift doctor --json true` tells them, each with its `sentence`;
        `problem`: why there are none; `waits`: whether none were looked for yet.

        last_step: the newest that is logged.
        """
        with self._lock:
            now = time.monotonic()
            if self._child is None and last_step != self._last_step and now >= self._rests_until:
                self._start(last_step, now)
            elif self._child is not None and self._child.poll() is not None:
                self._end(self._child.returncode, now)
            return self._found

    def close(self) -> None:
        """End its process."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._printed.close()

    def _start(self, last_step: int | None, now: float) -> None:
        self._last_step, self._began = last_step, now
        self._printed.seek(0)
        self._printed.truncate()
        command = [sys.executable, "-m", __name__, str(self._folder)]
        self._child = subprocess.Popen(command, stdout=self._printed, start_new_session=True)

    def _end(self, code: int, now: float) -> None:
        self._child, self._rests_until = None, now + REST * (now - self._began)
        self._printed.seek(0)
        lines = self._printed.read().splitlines()  # libraries may print, too
        failed = {"causes": [], "problem": f"exit code {code}; run `swift doctor {self._folder}`"}
        self._found = {**(failed if code or not lines else json.loads(lines[-1])), "waits": False}


def causes_of(folder: Path) -> dict[str, Any]:
    """What `Diagnosis` tells of a run's folder."""
    try:
        causes = examined(folder).causes()
    except ConfigError as error:
        return {"causes": [], "problem": str(error)}
    return {"causes": [{**cause, "sentence": CAUSES[cause["cause"]]} for cause in causes], "problem": ""}


if __name__ == "__main__":
    os.nice(NICE)
    print(json.dumps(causes_of(Path(sys.argv[1]))))
