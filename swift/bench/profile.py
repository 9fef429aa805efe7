"""Where the seconds of a step go: timers around its phases, and torch's own profiler for its operators.

Timers are exclusive: inside of another one they count to the inner phase alone, so that phases add up to the step and
"other" is the rest. They are put around the methods that `watch` names, in this process only.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

PHASES = (
    "prefill",
    "decode",
    "sample tokens",
    "reward wait",
    "forward",
    "backward",
    "clip",
    "optimizer",
    "log",
    "other",
)
"""In the order of a step. forward: collating, the model's pass, head, loss. other: scheduling, advantages, Trainer."""

OPERATORS_SHOWN = 12


class Phases:
    """Exclusive seconds by phase since `restart`, of the thread that made it.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._stack = ["other"]
        self.restart()

    def restart(self) -> None:
        """Forget what was counted."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = self._clock()

    def seconds(self) -> dict[str, float]:
        """Of each phase so far; they add up to the time since `restart`."""
        self._count()
        return dict(self._seconds)

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Count to `phase` while inside; other threads are not counted."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._count()
        self._stack.append(phase)
        try:
            yield
        finally:
            self._count()
            self._stack.pop()

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted to `phase`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.inside(phase):
                return function(*args, **kwargs)

        return timed

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now


def watch(phases: Phases) -> None:
    """Put timers around the methods of swift, accelerate and transformers that make up a step."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from swift.observability.metrics import MetricStore
    from swift.rollout.engines.decoding import BatchRun, DirectRun, OwnCacheRun
    from swift.trainers.grpo_trainer import GRPOTrainer

    for owner, method, phase in (
        (BatchRun, "step", "decode"),
        (BatchRun, "_prefill", "prefill"),
        (DirectRun, "_begin", "prefill"),
        (OwnCacheRun, "_prefill", "prefill"),
        (BatchRun, "_sample", "sample tokens"),
        (GRPOTrainer, "training_step", "forward"),
        (Accelerator, "backward", "backward"),
        (GRPOTrainer, "_clip_grad_norm", "clip"),
        (AcceleratedOptimizer, "step", "optimizer"),
        (GRPOTrainer, "log", "log"),
    ):
        setattr(owner, method, phases.around(phase, getattr(owner, method)))
    timer = MetricStore.timer

    @contextmanager
    def watched(self: Any, phase: str) -> Iterator[None]:
        with timer(self, phase), phases.inside("reward wait") if phase == "reward" else nullcontext():
            yield

    MetricStore.timer = watched  # type: ignore[method-assign, assignment]


class Operators:
    """torch's profiler over every second turn: operators by their own processor time.

    The other turns are without it, so that phases are timed undisturbed.
    """

    def __init__(self) -> None:
        self._turns = 0
        self._profiler: Any = None

    def begin(self) -> None:
        """A turn begins."""
        self._turns += 1
        if self._turns % 2 == 0:
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CPU])
            self._profiler.__enter__()

    def end(self) -> dict[str, Any]:
        """It is over: operators with their share of all operators' time and calls, the largest first."""
        if self._profiler is None:
            return {}
        self._profiler.__exit__(None, None, None)
        events, self._profiler = self._profiler.key_averages(), None
        total = sum(event.self_cpu_time_total for event in events) or 1
        largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:OPERATORS_SHOWN]
        return {
            "operators": [
                {"name": event.key, "share": event.self_cpu_time_total / total, "calls": event.count}
                for event in largest
            ]
        }
