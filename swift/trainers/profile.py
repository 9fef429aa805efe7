"""`--profile_steps`: torch's profiler around some optimizer steps, their rollouts included."""

from __future__ import annotations

import bisect
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

if TYPE_CHECKING:
    from swift.observability.metrics import MetricStore

FOLDER = "profile"
PHASE = "phase: "
ROWS, GAPS = 30, 15
"""Operations in the table, and gaps below it."""


class StepProfiler(TrainerCallback):
    """Writes `profile/rank-N.json.gz`, a trace for ui.perfetto.dev, and `profile/rank-N.txt`: operations and gaps.

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
                mark = record_function(PHASE + phase)
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
        idle = "\n".join(gap_lines(profiled.events() or [], DeviceType.CUDA if on_device else DeviceType.CPU))
        busy = f"kernels take {on_device:.3g} s of {seconds:.3g} s" if on_device else f"{seconds:.3g} s"
        text = f"steps {self.first} to {step}: {busy}\n\n{table}\n{idle}\n"
        Path(f"{self.file}.txt").write_text(text, encoding="utf-8")
        self.say(
            f"profile: steps {self.first} to {step}, {busy}: {self.file}.txt, {self.file}.json.gz (ui.perfetto.dev)"
        )


class Gap(NamedTuple):
    """A time in which no operation runs, in microseconds of the trace: between the operations `after` and `before`."""

    start: float
    end: float
    phase: str
    after: str
    before: str


def gaps_of(events: Iterable[Any], device: DeviceType) -> Iterator[Gap]:
    """The gaps between operations on a kind of device, in order. events: those of the profiler."""
    operations, phases = [], []
    for event in events:
        span = event.time_range.start, event.time_range.end, event.name
        if event.name.startswith(PHASE):  # on a GPU, of the operations that it has started, too
            phases += [span] * (event.device_type == DeviceType.CPU)
        elif event.device_type == device and not event.is_user_annotation:
            operations.append(span)
    phases.sort()
    end, after = math.inf, ""
    for start, stop, name in sorted(operations):
        if start > end:
            middle = (start + end) / 2
            begun = reversed(phases[: bisect.bisect(phases, (middle, math.inf, ""))])  # the innermost first
            phase = next((phase[len(PHASE) :] for _, last, phase in begun if last > middle), "")
            yield Gap(end, start, phase, after, name)
        if stop > end or not after:
            end, after = stop, name


def gap_lines(events: Sequence[Any], device: DeviceType) -> Iterator[str]:
    """The sum of gaps by phase, and the longest ones."""
    gaps = list(gaps_of(events, device))
    begin = min((event.time_range.start for event in events), default=0.0)
    phases: dict[str, float] = defaultdict(float)
    for gap in gaps:
        phases[gap.phase or "between phases"] += (gap.end - gap.start) / 1e6
    whole = ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in sorted(phases.items(), key=lambda one: -one[1]))
    yield f"gaps, in which no operation runs: {whole or 'none'}"
    yield f"{'ms':>10} {'at s':>10}  {'phase':<14}  {'after':<40}  before"
    for gap in sorted(gaps, key=lambda gap: gap.start - gap.end)[:GAPS]:
        ms, at_s = (gap.end - gap.start) / 1e3, (gap.start - begin) / 1e6
        yield f"{ms:>10.2f} {at_s:>10.3f}  {gap.phase:<14}  {gap.after[:40]:<40}  {gap.before[:40]}"
