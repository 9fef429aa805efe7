"""Callbacks of transformers.Trainer: at the start of training and after optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil
from transformers import TrainerCallback

if TYPE_CHECKING:
    from swift.trainers.grpo.trainer import GRPOTrainer


class PipelineCallback(TrainerCallback):
    """Counts each step in the pipeline, and commits its metrics. epoch: the position in the data set, in epochs."""

    def __init__(self, trainer: GRPOTrainer, *, epoch: Callable[[], float]) -> None:
        self.trainer, self.epoch = trainer, epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After every optimizer step, before Trainer logs, evaluates and saves."""
        trainer = self.trainer
        pipeline = trainer.pipeline
        if trainer.collectives.is_main:
            trainer.metrics.add_many(pipeline.staleness(state.global_step - 1) | pipeline.engine_health())
            own = psutil.Process()
            trainer.metrics.add("perf/rss_gib", own.memory_info().rss / 2**30)
            trainer.metrics.add("perf/children_rss_gib", sum(map(_rss, own.children())) / 2**30)
            if pipeline.overlaps:
                trainer.metrics.add_phase("wait_train", pipeline.idle_s())
                trainer.metrics.add_phase("wait_rollout", trainer.metrics.seconds("generate", "reward"))
        pipeline.step_done(state.global_step)
        state.epoch = self.epoch()
        trainer.metrics.commit()
        control.should_log |= state.global_step >= state.max_steps
        if trainer.report is not None:
            trainer.report.progress.advance(state.global_step)
        return control


def _rss(process: psutil.Process) -> int:
    """Bytes of main memory of a process; 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class AtTheStart(TrainerCallback):
    """Calls `work` once the model is sharded and, after a restart, has its weights; on all ranks."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step."""
        self.work()


class EveryFewSteps(TrainerCallback):
    """Calls `work` with the number of steps done after every `interval` optimizer steps, on all ranks."""

    def __init__(self, interval: int, work: Callable[[int], None]) -> None:
        self.interval = interval
        self.work = work

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After `PipelineCallback`."""
        if state.global_step % self.interval == 0:
            self.work(state.global_step)
