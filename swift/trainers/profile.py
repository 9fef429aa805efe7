"""`--profile_steps`: torch's profiler around some optimizer steps, their rollouts included."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

if TYPE_CHECKING:
    from swift.observability.metrics import MetricStore

FOLDER = "profile"
ROWS = 30
"""Operations in the table."""


class StepProfiler(TrainerCallback):
    """Writes `profile/rank-N.json.gz`, a trace for ui.perfetto.dev, and `profile/rank-N.txt`, a table of operations.

    steps: `FIRST:LAST`. rank: of this process. metrics: whose phases are ranges of the trace. say: prints a line.
    """

    def __init__(
        self, steps: str, run_dir: Path, rank: int, metrics: MetricStore, say: Callable[[str], object] = print
    ) -> None:
        self.first, self.last = map(int, steps.split(":"))
        self.file, self.say = run_dir / FOLDER / f"rank-{rank}", say
        self._profile: profile | None = None
        self._begun = 0.0
        outer = metrics.around

        @contextlib.contextmanager
        def named(phase: str) -> Iterator[None]:
            mark: AbstractContextManager[Any] = contextlib.nullcontext()
            if self._profile is not None:
                mark = record_function(f"phase: {phase}")
            with outer(phase), mark:
                yield

        metrics.around = named

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step of this start."""
        if state.global_step + 1 == self.first:
            self._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a step; the rollout of the next one comes after it."""
        if self._profile is not None and state.global_step >= self.last:
            self._end(state.global_step)
        elif state.global_step + 1 == self.first:
            self._begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """If the run ends before."""
        if self._profile is not None:
            self._end(state.global_step)

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._begun = time.monotonic()
        self._profile = profile(activities=activities)
        self._profile.start()

    def _end(self, step: int) -> None:
        profiled, self._profile = self._profile, None
        assert profiled is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.monotonic() - self._begun
        profiled.stop()
        self.file.parent.mkdir(exist_ok=True)
        profiled.export_chrome_trace(f"{self.file}.json.gz")
        averages = profiled.key_averages()
        on_device = sum(event.self_device_time_total for event in averages) / 1e6
        order = "self_cuda_time_total" if on_device else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        busy = f"kernels take {on_device:.3g} s of {seconds:.3g} s" if on_device else f"{seconds:.3g} s"
        Path(f"{self.file}.txt").write_text(f"steps {self.first} to {step}: {busy}\n\n{table}", encoding="utf-8")
        self.say(
            f"profile: steps {self.first} to {step}, {busy}: {self.file}.txt, {self.file}.json.gz (ui.perfetto.dev)"
        )
