"""Callbacks of the trainer: stop at a signal (of GRPO too), early stopping, logging.jsonl and the console's lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback, TrainerCallback

from swift.errors import NumericError, format_seconds
from swift.observability.jsonl import JsonlWriter
from swift.trainers.distributed import Collectives

if TYPE_CHECKING:
    from swift.observability.curves import Curves
    from swift.trainers.session import SignalTrap

NON_FINITE_LIMIT = 3
"""Number of consecutive log lines with a non-finite loss after which the run ends (exit 6)."""

LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens")
"""Metrics in the training lines of every method; evaluation lines have all metrics that begin with eval_."""


@dataclass(eq=False)
class StopOnSignal(TrainerCallback):
    """Ends the run after the current step, with a checkpoint, if any process has received a signal."""

    trap: SignalTrap
    collectives: Collectives
    interrupted: bool = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after every optimizer step; the last one is always saved, whatever `--save_strategy` is."""
        stops = self.collectives.any(self.trap.caught is not None)
        if state.global_step >= state.max_steps:
            control.should_save = control.should_save or args.eval_strategy != "epoch"
        elif stops:
            self.interrupted = control.should_save = control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step is saved after its evaluation, which may make it the best."""
        if state.global_step >= state.max_steps:
            control.should_save = True


@dataclass(eq=False)
class EpochEnds(TrainerCallback):
    """Of a stream: evaluates and saves after each epoch, if settings say so, and ends the run with the stream.

    ends: see `swift.trainers.row_stream.Epochs`. rows: of a step, on all processes.
    """

    ends: Sequence[int]
    rows: int
    evaluates: bool
    saves: bool

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The stream is read ahead of a step, so an end that the step has reached is known."""
        if self._reached(state):
            control.should_evaluate = control.should_evaluate or self.evaluates
            control.should_save = control.should_save or self.saves

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called where the stream or the run ends, after a step that may have been evaluated."""
        control.should_save = control.should_training_stop = True
        control.should_evaluate = self.evaluates and not self._reached(state)

    def _reached(self, state: Any) -> bool:
        return any(0 <= state.global_step * self.rows - end < self.rows for end in self.ends)


class EarlyStop(EarlyStoppingCallback):
    """As transformers', with a checkpoint of the last step; a resumed run continues the count."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reads the count from the checkpoint; patience and threshold are those of this start."""
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.get(type(self).__name__) or self.state()
        self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Called after the evaluation of each dataset; only a dataset with the metric counts."""
        name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
        if name in metrics:
            super().on_evaluate(args, state, control, metrics, **kwargs)
            control.should_save = control.should_save or control.should_training_stop


class LogLines(TrainerCallback):
    """Writes logging.jsonl (`path`), where `attempt` is the number of this start, and prints one line per log step.

    curves: drawn again at saves. logged: further metrics of training lines. shown: metrics that the console has beside
    the loss, with their names there. Step and number of lines are those for `swift.observability.pulse`.
    """

    has_bar = False

    def __init__(
        self,
        path: Path,
        attempt: int,
        say: Callable[[str], None],
        curves: Curves | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        logged: Sequence[str] = (),
        shown: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.writer, self.attempt, self.say, self.curves, self.clock = JsonlWriter(path), attempt, say, curves, clock
        self.logged, self.shown = (*LOGGED, *logged), shown
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.last_eval_losses: dict[str, float] = {}
        self._started = self._logged = (0.0, 0)  # time and step of the start and of the last log line
        self._non_finite = 0
        self.step = self.num_lines = 0
        self._passes, self._all_passes = 0, 1
        self._beside: str | None = "preparation"  # what is done beside training

    def doing(self) -> str:
        """What the run does between two lines, in words; any thread may call it."""
        if self._beside is not None:
            return self._beside
        return f"micro-batch {self._passes + 1}/{self._all_passes}"

    def pulse(self, text: str) -> None:
        """Show what a step does that takes long."""
        print(text, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clocks."""
        self._started = self._logged = (self.clock(), state.global_step)
        self.step, self._all_passes, self._beside = state.global_step, args.gradient_accumulation_steps, None

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after every micro-batch but the last of a step."""
        self._passes += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after every optimizer step, before evaluation and saving."""
        self.step, self._passes = state.global_step, 0
        self._beside = "evaluation" if control.should_evaluate else "checkpoint" if control.should_save else None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after the evaluation of each dataset."""
        self._beside = "checkpoint" if control.should_save else None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Called on every rank; rank 0 writes. Trainer's closing summary is not a log line.

        Raises:
            NumericError: the loss stays non-finite.
        """
        logs = logs or {}
        evaluation = {name: value for name, value in logs.items() if name.startswith("eval_")}
        if "loss" in logs:
            self._check(float(logs["loss"]), state.global_step)
        if not state.is_world_process_zero or not ("loss" in logs or evaluation):
            return
        values = evaluation or {name: logs[name] for name in self.logged if name in logs}
        row = {**values, "step": state.global_step, "max_steps": state.max_steps, "attempt": self.attempt}
        if evaluation:
            self.last_eval_losses |= {name: evaluation[name] for name in losses_of(evaluation)}
        else:
            row["step_time"] = self._step_time(state.global_step)
            self.last_loss = float(logs["loss"])
            self.first_loss = self.last_loss if self.first_loss is None else self.first_loss
        self.writer.write(row)
        self.num_lines += 1
        self.say(self._line(row, evaluation=bool(evaluation)))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draws the curves after a checkpoint."""
        self._beside = None
        if self.curves is not None:
            self.curves.draw()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the file."""
        self._beside = ""
        self.writer.close()

    def _check(self, loss: float, step: int) -> None:
        self._non_finite = 0 if math.isfinite(loss) else self._non_finite + 1
        if self._non_finite >= NON_FINITE_LIMIT:
            raise NumericError(
                f"loss: {loss}: not finite in {NON_FINITE_LIMIT} log lines in a row, the last at step {step}; "
                "lower --learning_rate, or use --torch_dtype float32"
            )

    def _step_time(self, step: int) -> float:
        """Seconds per step since the last line."""
        then, before = self._logged
        self._logged = (self.clock(), step)
        return (self._logged[0] - then) / max(1, step - before)

    def _line(self, row: Mapping[str, Any], *, evaluation: bool) -> str:
        head = f"step {row['step']}/{row['max_steps']}"
        of = next(iter(losses_of(row)), "eval_loss") if evaluation else "loss"
        prefix = of.removesuffix("loss")
        more = [f"{word} {row[prefix + name]:.4g}" for name, word in self.shown if prefix + name in row]
        if evaluation:
            return " | ".join([head, f"evaluation{dataset_suffix(of)}", f"loss {row.get(of, math.nan):.4f}", *more])
        elapsed, done = self.clock() - self._started[0], row["step"] - self._started[1]
        steps = row["max_steps"] - row["step"]
        left = [f"{format_seconds(elapsed / max(1, done) * steps)} left"] if steps else []
        rate, speed = f"lr {row['learning_rate']:.2e}", f"{row['step_time']:.2f} s/step"
        return " | ".join([head, f"loss {row['loss']:.4f}", *more, rate, speed, *left])


def losses_of(evaluation: Mapping[str, Any]) -> list[str]:
    """Names of the losses of whole evaluations, which have a runtime."""
    return [n for n in evaluation if n.endswith("loss") and f"{n.removesuffix('loss')}runtime" in evaluation]


def dataset_suffix(name: str) -> str:
    """The dataset in the name of an evaluation's loss, as " of <name>"; "" if there is only one."""
    dataset = name.removeprefix("eval_").removesuffix("loss").rstrip("_")
    return f" of {dataset}" if dataset else ""
