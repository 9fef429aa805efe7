"""A `swift view` process on a free port."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

LIMIT_S = 60


class ViewProcess:
    """A context manager that ends it; `line` is what it prints when it is ready."""

    def __init__(self, *words: Any, wait: bool = True) -> None:
        command = [sys.executable, "-m", "swift", "view", *map(str, words)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.line = self._first_line() if wait else ""

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.wait()[1]
        return line

    @property
    def url(self) -> str:
        """Of the ready line."""
        word, url = self.line.split()
        assert word == "ready"
        return url

    def __enter__(self) -> ViewProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def end(self, signum: int = signal.SIGINT) -> tuple[int, str]:
        """Exit code and stderr after a signal."""
        self._process.send_signal(signum)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, errors = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, errors
