"""What `swift doctor` finds in a run, for the page: with its steps, and at a small share of the time for a live run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from swift.errors import ConfigError
from swift.observability.diagnosis import to_json
from swift.observability.doctor import examined
from swift.observability.findings import CAUSES

REST = 20
"""Pause after a diagnosis of a run that goes on, in multiples of its duration."""


class Diagnosis:
    """The causes of a run, found at the first call, and again if the run has logged more steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._found: dict[str, Any] = {}
        self._last_step: int | None = None
        self._rests_until = 0.0

    def __call__(self, last_step: int | None) -> dict[str, Any]:
        """`causes`, as `swift doctor --json true` tells them, each with its `sentence`; `problem`: why there are none.

        last_step: the newest that is logged.
        """
        with self._lock:
            began = time.monotonic()
            if not self._found or (last_step != self._last_step and began >= self._rests_until):
                self._found, self._last_step = self._ask(), last_step
                now = time.monotonic()
                self._rests_until = now + REST * (now - began)
            return self._found

    def _ask(self) -> dict[str, Any]:
        try:
            causes = to_json(examined(self._folder).findings, {})["causes"]
        except ConfigError as error:
            return {"causes": [], "problem": str(error)}
        return {"causes": [{**cause, "sentence": CAUSES[cause["cause"]]} for cause in causes], "problem": ""}
