"""Metrics of TRL: prefixes for several evaluation sets, and a token count that continues after a resume."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class OwnMetrics:
    """Mixin before a trainer of TRL, whose own metrics (accuracy and the like) lack the name of the dataset."""

    state: Any
    _dataset = ""

    @property
    def _total_train_tokens(self) -> int:
        """TRL's counter, kept in the state that checkpoints save."""
        return int(self.state.num_input_tokens_seen)

    @_total_train_tokens.setter
    def _total_train_tokens(self, value: int) -> None:
        self.state.num_input_tokens_seen = int(value)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Trainer's: with several datasets it calls itself for each, with `eval_<name>` as prefix."""
        self._dataset = metric_key_prefix.removeprefix("eval").lstrip("_")
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """As TRL's, which adds its metrics of the evaluation to `logs`, with the name of the dataset."""
        for name in ("_metrics", "_stored_metrics"):  # TRL's trainers have one or the other, which has the prefix
            metrics: Any = getattr(self, name, {})
            if self._dataset and any(key.startswith("eval_") for key in logs) and "eval" in metrics:
                metrics["eval"] = defaultdict(list, {self._renamed(k): values for k, values in metrics["eval"].items()})
        super().log(logs, *arguments, **named)  # type: ignore[misc]

    def _renamed(self, name: str) -> str:
        prefix = "eval_" if name.startswith("eval_") else ""
        return f"{prefix}{self._dataset}_{name.removeprefix('eval_')}"
