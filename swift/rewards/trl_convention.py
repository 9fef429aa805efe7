"""How TRL's GRPOTrainer (1.16) calls a reward function, for functions that `--reward_funcs` names by import path.

Every argument is a keyword: `prompts`, `completions`, `completion_ids`, all columns of the dataset, `trainer_state`,
`log_extra(column, values)` and `log_metric(name, value)`. If the data holds chats, a prompt is a list of messages and a
completion the list of those that follow it; if it holds texts, both are texts. swift leaves out keywords that a
function does not take, and passes its own (`finish_reason`, `group_id`, ...) to functions that name them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from swift.data.columns import RESERVED
from swift.rewards.payload import is_ordered
from swift.types import Completion, Prompt

TRL_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
NOT_COLUMNS = frozenset({"prompt", "completion"})
"""Columns that TRL does not pass on, beside those it replaces."""

TRAINER_METRICS = frozenset(
    {"loss", "policy_loss", "grad_norm", "learning_rate", "kl", "entropy", "reward", "reward_std", "step_time"}
    | {"attempt", "epoch", "step", "max_steps", "num_tokens"}
)
"""Metrics of the trainer, whose names a function cannot log."""

TURNS = "trl_turns"
"""Keyword under which prompts and completions are sent to the workers."""

Turns = tuple[Any, Any]
"""A prompt and a completion as TRL passes them."""


def turns_of(prompt: Prompt, completion: Completion) -> Turns:
    """The prompt and the completion of a sample: messages if the row is a chat or an environment answers."""
    if (episode := completion.episode) is not None:
        return episode.messages[: episode.start], episode.messages[episode.start :]
    if prompt.is_chat:
        return prompt.messages, [{"role": "assistant", "content": completion.text}]
    return prompt.messages[-1]["content"], completion.text


@dataclass
class Logged:
    """The log of one call: `columns` of completions.jsonl, one value per completion; `metrics` of the log step."""

    columns: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a column to completions.jsonl; values that JSON cannot hold are converted to text."""
        if not is_ordered(values):
            raise TypeError(
                f"log_extra({column!r}) got {type(values).__name__}, not a list with one value per completion"
            )
        self.columns[column] += json.loads(json.dumps(list(values), default=_plain))

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to the mean of the log step."""
        self.metrics[name].append(float(value))


def trl_keywords(keywords: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """TRL's keywords made from swift's; of swift's own only those in `named`, the parameters of the function."""
    prompts, completions = zip(*keywords[TURNS], strict=True)
    columns = {name: value for name, value in keywords.items() if name not in RESERVED | NOT_COLUMNS or name in named}
    return {
        **columns,
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": keywords["response_token_ids"],
        "trainer_state": keywords["trainer_state"],
    }


def logged_means(metrics: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The mean of each metric that functions logged, under `logged/` if the trainer has a metric of that name."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for metrics_of_group in metrics:
        for name, logged in metrics_of_group.items():
            values[f"logged/{name}" if name in TRAINER_METRICS else name] += logged
    return {name: fmean(logged) for name, logged in values.items()}


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
