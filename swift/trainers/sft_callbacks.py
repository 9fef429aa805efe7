"""What `swift sft` hangs into TRL's trainer: its log, its checkpoints' seal and its answer to signals."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from swift.errors import NumericError
from swift.observability.files import write_json
from swift.observability.jsonl import JsonlWriter
from swift.trainers.checkpoint import commit_checkpoint, rotate, staging_folder

if TYPE_CHECKING:
    from swift.trainers.distributed import Collectives
    from swift.trainers.session import SignalTrap

NON_FINITE_LIMIT = 3
"""Log lines in a row with a loss that is no number after which the run ends (exit 6)."""

LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "mean_token_accuracy", "num_tokens")
"""What a training line says; evaluation lines say everything that begins with eval_."""


class StopOnSignal(TrainerCallback):
    """Ends the run after the current step, with a checkpoint, when any process was asked to stop.

    Args:
        trap: this process's signals.
        collectives: all processes stop at the same step.
    """

    def __init__(self, trap: SignalTrap, collectives: Collectives) -> None:
        self.trap, self.collectives = trap, collectives
        self.interrupted = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After every optimizer step; a run that is at its end anyway is not interrupted."""
        if self.collectives.any(self.trap.caught is not None) and state.global_step < state.max_steps:
            self.interrupted = True
            control.should_save = True
            control.should_training_stop = True
        return control


class SealCheckpoints(TrainerCallback):
    """Gives each checkpoint its settings and its manifest; one without a manifest does not count as saved.

    Args:
        collectives: rank 0 seals when all processes have written.
        settings: the content of args.json.
        limit: most checkpoints that stay; removal comes after the seal, so one valid checkpoint always exists.
    """

    def __init__(self, collectives: Collectives, settings: Mapping[str, Any], limit: int | None) -> None:
        self.collectives, self.settings, self.limit = collectives, dict(settings), limit
        self.last: Path | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The last step is always saved, whatever `--save_strategy` says."""
        if state.global_step >= state.max_steps:
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After Trainer wrote `checkpoint-<step>`."""
        run_dir = Path(args.output_dir)
        self.last = run_dir / f"checkpoint-{state.global_step}"
        self.collectives.barrier()
        if self.collectives.is_main:
            staging = staging_folder(run_dir, state.global_step)
            shutil.rmtree(staging, ignore_errors=True)  # left by a kill between the next line and the seal
            self.last.rename(staging)
            write_json(staging / "args.json", self.settings, indent=1)
            commit_checkpoint(staging, self.last, step=state.global_step)
            rotate(run_dir, self.limit, keep=state.best_model_checkpoint)
        self.collectives.barrier()


class LogLines(TrainerCallback):
    """Writes logging.jsonl and says one line per log step.

    Args:
        path: of logging.jsonl.
        attempt: number of this start.
        say: shows a line to the user.
        clock: monotonic seconds.
    """

    def __init__(
        self, path: Path, attempt: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.writer, self.attempt, self.say, self.clock = JsonlWriter(path), attempt, say, clock
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.last_eval_loss: float | None = None
        self._started = self._logged = (0.0, 0)  # time and step of the start and of the last log line
        self._non_finite = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clocks."""
        self._started = self._logged = (self.clock(), state.global_step)

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
        values = evaluation or {name: logs[name] for name in LOGGED if name in logs}
        row = {**values, "step": state.global_step, "max_steps": state.max_steps, "attempt": self.attempt}
        if evaluation:
            self.last_eval_loss = logs.get("eval_loss", self.last_eval_loss)
        else:
            row["step_time"] = self._step_time(state.global_step)
            self.last_loss = float(logs["loss"])
            self.first_loss = self.last_loss if self.first_loss is None else self.first_loss
        self.writer.write(row)
        self.say(self._line(row, evaluation=bool(evaluation)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The file is complete."""
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
        if evaluation:
            return f"{head}  evaluation: loss {row.get('eval_loss', math.nan):.4f}"
        elapsed, done = self.clock() - self._started[0], row["step"] - self._started[1]
        left = elapsed / max(1, done) * (row["max_steps"] - row["step"])
        return (
            f"{head}  loss {row['loss']:.4f}  lr {row['learning_rate']:.2e}  "
            f"{row['step_time']:.2f} s/step  {left:.0f} s left"
        )
