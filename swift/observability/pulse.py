"""The state of a step under way, between the lines of the progress: into the bar, or rarely as a line of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from swift.errors import format_seconds

LOOK_S = 1.0
"""Seconds between two looks."""
BAR_S = 5.0
"""Age of a step from which the bar shows its state."""
LINE_S = 30.0
"""Silence after which a line shows it where there is no bar; the next one comes after twice as long a silence."""


class Shows(Protocol):
    """What shows the progress of a run: optimizer steps done, lines shown so far, whether there is a bar."""

    step: int
    num_lines: int

    @property
    def has_bar(self) -> bool: ...  # noqa: D102

    def pulse(self, text: str) -> None: ...  # noqa: D102


class Pulse:
    """A context manager whose thread shows `doing`, the state of the run in a few words, "" for none.

    Example: `step 13 | sampling 40/64, rewards 12/64 | 35s`.
    """

    def __init__(
        self, progress: Shows, doing: Callable[[], str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._doing, self._clock = progress, doing, clock
        self._seen = (progress.step, progress.num_lines)
        self._step_began = self._line_at = clock()
        self._silence_s = LINE_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Show the state if it is time to."""
        now, seen = self._clock(), (self._progress.step, self._progress.num_lines)
        if seen[0] != self._seen[0]:
            self._step_began = now
        if seen[1] != self._seen[1]:
            self._line_at, self._silence_s = now, LINE_S
        self._seen = seen
        age_s, doing = now - self._step_began, self._doing()
        if not doing:
            return
        if self._progress.has_bar:
            if age_s >= BAR_S:
                self._progress.pulse(f"{doing} | {format_seconds(age_s)}")
        elif now - self._line_at >= self._silence_s:
            self._progress.pulse(f"step {seen[0] + 1} | {doing} | {format_seconds(age_s)}")
            self._line_at, self._silence_s = now, 2 * self._silence_s
