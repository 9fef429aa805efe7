"""images/*.png: drawn at saves, on a thread so that no step waits, and a last time however the run ends."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from swift.observability.jsonl import read_log

LOGGING, ALERTS = "logging.jsonl", "alerts.jsonl"
IMAGES = "images"

REST = 10
"""Pause after a drawing, in multiples of its duration: drawing slows the steps of the trainer down."""

logger = logging.getLogger(__name__)


class Curves:
    """Draws the curves of a run from its logging.jsonl; a context manager that ends with the last drawing."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="curves")
        self._drawing: Future[None] | None = None
        self._rests_until = 0.0

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pool.shutdown()
        try:
            self._draw()
        except Exception:
            if error is None:
                raise
            logger.warning("the curves are not drawn", exc_info=True)  # the error that ended the run is raised instead

    def draw(self) -> None:
        """Draw the rows logged so far, unless a drawing runs or has just ended; a failure is a warning."""
        if (self._drawing is not None and not self._drawing.done()) or time.monotonic() < self._rests_until:
            return
        if self._drawing is not None and (failure := self._drawing.exception()) is not None:
            logger.warning("the curves were not drawn", exc_info=failure)
        self._drawing = self._pool.submit(self._draw)

    def _draw(self) -> None:
        from swift.observability.plots import Marks, write_plots  # imports matplotlib

        began = time.monotonic()
        if rows := read_log(self._run_dir / LOGGING):
            alerts = [alert["step"] for alert in read_log(self._run_dir / ALERTS)]
            names = (path.name.partition("-")[2] for path in self._run_dir.glob("checkpoint-*"))
            saved = [int(name) for name in names if name.isdecimal()]
            write_plots(rows, self._run_dir / IMAGES, Marks(self._run_dir.name, alerts, saved))
        now = time.monotonic()
        self._rests_until = now + REST * (now - began)
