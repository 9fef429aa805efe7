"""Stops transformers.Trainer after every optimizer step until it is this contender's turn again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from swift.bench.contest import Gate, Stopwatch, memory


class TurnCallback(TrainerCallback):
    """A turn lasts from one log row to the next: generation, reward, training, optimizer and logging.

    Both sides log every step, so this is one full round of their own loops.

    Args:
        gate: the way to the parent.
        num_completions: completions of a step.
        expected_tokens: tokens of a step where lengths are forced.
        begin: called when a turn begins.
        more: further figures of the turn that ended.
    """

    def __init__(
        self,
        gate: Gate,
        num_completions: int,
        expected_tokens: int | None = None,
        *,
        begin: Callable[[], None] = lambda: None,
        more: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.gate = gate
        self.num_completions = num_completions
        self.expected_tokens = expected_tokens
        self.begin, self.more = begin, more
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
        if self.expected_tokens is not None and abs(tokens - self.expected_tokens) > 0.5:
            raise RuntimeError(f"{tokens:.0f} tokens were sampled, the work has {self.expected_tokens}")
        self.gate.send(tokens=tokens, **self.watch.read(), **self.more(), **memory())
        self._wait(control)
        return control

    def _wait(self, control: Any) -> None:
        control.should_training_stop = not self.gate.turn()
        self.watch = Stopwatch()
        self.begin()
