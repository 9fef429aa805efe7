"""Stops transformers.Trainer after every optimizer step until it is this contender's turn again."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from harness.contest import Gate, Stopwatch, memory


class TurnCallback(TrainerCallback):
    """A turn lasts from one log row to the next: generation, reward, training, optimizer and logging.

    Both sides log every step, so this is one full round of their own loops.

    Args:
        gate: the way to the parent.
        num_completions: completions of a step.
    """

    def __init__(self, gate: Gate, num_completions: int) -> None:
        self.gate = gate
        self.num_completions = num_completions
        self.watch = Stopwatch()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Loaded; wait for the first turn."""
        self.gate.send(ready=True)
        self._wait(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> Any:
        """The step is over."""
        if not logs or "learning_rate" not in logs:
            return control
        tokens = logs["completions/mean_length"] * self.num_completions
        self.gate.send(tokens=tokens, **self.watch.read(), **memory())
        self._wait(control)
        return control

    def _wait(self, control: Any) -> None:
        control.should_training_stop = not self.gate.turn()
        self.watch = Stopwatch()
