"""The log file of one process: Python's logging and warnings, and the lines of the console."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

from swift.errors import printable
from swift.observability.secrets import mask_text
from swift.startup import EARLY, LIBRARIES, hush_libraries

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _LogFile(logging.FileHandler):
    """On a full disk, lines of the log are lost without an error; other writers report the disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignores errors of the disk."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file, whose last lines may not fit."""
        with contextlib.suppress(OSError):
            super().close()


class _Lines(logging.Formatter):
    """Without secrets, and with control characters escaped, so that a terminal can show the file."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(mask_text(super().format(record)))


class RankLog:
    """Appends to logs/attempt-<k>/rank-<r>.log until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(_Lines(_FORMAT))
        self._handler.setLevel(logging.INFO)
        root = logging.getLogger()
        separate = [logging.getLogger(name) for name in (*LIBRARIES, "vllm")]
        self._loggers = [root, *(logger for logger in separate if not logger.propagate)]
        for logger in self._loggers:
            logger.addHandler(self._handler)
        hush_libraries()
        EARLY.setTarget(self._handler)
        EARLY.flush()
        for logger in separate:
            logger.removeHandler(EARLY)
        self._own = logging.getLogger("swift")
        self._level = self._own.level
        self._own.setLevel(logging.INFO)

    def line(self, text: str) -> None:
        """Write one line that was shown on the console; it is not shown again."""
        record = logging.LogRecord("console", logging.INFO, "", 0, text, None, None)
        self._handler.handle(record)

    def close(self) -> None:
        """Detach from logging and close the file."""
        for logger in self._loggers:
            logger.removeHandler(self._handler)
        self._own.setLevel(self._level)
        self._handler.close()
        logging.captureWarnings(False)
