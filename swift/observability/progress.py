"""The progress of a run on the console: a bar on a terminal, one line per log step anywhere else.

Both show reward, completion length, speed, step time and the time left. Only rank 0 makes one of these.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from swift.errors import format_seconds, printable

_BAR_REFRESHES_PER_S = 4
_BAR_WIDTH = 10
_LEFT_WIDTH = len("59m59s left")


def status(logs: Mapping[str, float]) -> str:
    """The chosen few of a log line's values, those that are there: reward, length, tok/s, step time."""
    parts = []
    if "reward" in logs:
        spread = f"±{logs['reward_std']:.2f}" if "reward_std" in logs else ""
        parts.append(f"reward {logs['reward']:.3f}{spread}")
    elif "loss" in logs:
        parts.append(f"loss {logs['loss']:.4f}")
    for key, text in (
        ("teacher_kl", "teacher_kl {:.3f}"),
        ("completions/mean_length", "len {:.0f}"),
        ("tokens_per_s", "{:.0f} tok/s"),
        ("step_time", "{:.2f} s/step"),
    ):
        if key in logs:
            parts.append(text.format(logs[key]))
    return " | ".join(parts)


class Progress:
    """Shows how far a run of `max_steps` is, of which `start_step` were done before.

    stream: None means stderr. terminal: whether to draw a bar; None means if the stream is a terminal. record: called
    with every line that stays on the screen, for the log file. clock: monotonic seconds.

    Attributes:
        step: optimizer steps done. num_lines: lines shown so far.
    """

    def __init__(
        self,
        max_steps: int,
        *,
        start_step: int = 0,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        record: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_steps = max_steps
        self._start_step = start_step
        self.step = start_step
        self.num_lines = 0
        self._stream = stream or sys.stderr
        self._record = record
        self._clock = clock
        self._began = clock()
        self._status = ""
        is_terminal = self._stream.isatty() if terminal is None else terminal
        self._bar: Any = None
        self._task: Any = None
        if is_terminal:
            self._bar, self._task = self._make_bar()

    def _make_bar(self) -> tuple[Any, Any]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        def fixed(width: int) -> Column:  # on a narrow terminal the status is cut, the count and the time are not
            return Column(no_wrap=True, min_width=width)

        bar = RichProgress(
            BarColumn(bar_width=_BAR_WIDTH, table_column=fixed(_BAR_WIDTH)),
            MofNCompleteColumn(table_column=fixed(2 * len(str(self._max_steps)) + 1)),
            TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[left]}", table_column=fixed(_LEFT_WIDTH)),
            console=Console(file=self._stream, force_terminal=True),
            refresh_per_second=_BAR_REFRESHES_PER_S,
            transient=False,
        )
        task = bar.add_task("", total=self._max_steps, completed=self._start_step, status="", left="")
        bar.start()
        return bar, task

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar."""
        return self._bar is not None

    def line(self, text: str, *, cut: bool = False) -> None:
        """Show a line that stays, above the bar: the plan, a note, a warning. `cut`: to the width of a terminal."""
        text = printable(text)
        self.num_lines += 1
        self._record(text)
        if self._bar is not None:
            width = {"no_wrap": True, "overflow": "ellipsis"} if cut else {"soft_wrap": True}
            self._bar.console.print(text, markup=False, highlight=False, **width)
        else:
            print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        """Show a warning."""
        self.line(f"swift: warning: {text}")

    def advance(self, step: int) -> None:
        """An optimizer step is done."""
        self.step = step
        if self._bar is not None:
            self._bar.update(self._task, completed=step, left=self._left(), status=self._status)

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        """The values of a log step, as in logging.jsonl: into the bar, or as a line; evaluation always is a line."""
        self.step = max(self.step, step)
        evaluation = {key.removeprefix("eval_"): value for key, value in logs.items() if key.startswith("eval_")}
        if evaluation:
            self.line(f"step {step}/{self._max_steps} | evaluation | {status(evaluation)}", cut=True)
            return
        text = status(logs)
        if not text:
            return
        self._status = text
        line = " | ".join(part for part in (f"step {step}/{self._max_steps}", text, self._left()) if part)
        self._record(line)
        self.num_lines += 1
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.update(self._task, completed=step, status=text, left=self._left())

    def pulse(self, text: str) -> None:
        """Show the state of a step under way: in the bar until the step ends, or as a line; not in the log file."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.update(self._task, status=text)

    def _left(self) -> str:
        done = self.step - self._start_step
        if done <= 0 or self.step >= self._max_steps:
            return ""
        seconds = (self._clock() - self._began) / done * (self._max_steps - self.step)
        return f"{format_seconds(seconds)} left"

    def close(self) -> None:
        """Stop the bar and restore the terminal; a second call does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
