"""Applies the rules of `swift.observability.health_rules` to the log lines of a run.

Once the number of a rule has been wrong for so many lines in a row, or for lines that cover so many optimizer steps,
the rule raises an alert, and again after `REPEAT_STEPS` if it stays wrong. Lines without the number neither count nor
reset. A pure state machine, whose state is saved with checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swift.observability.health_rules import COMPARISONS, RULES, WARM_UP_STEPS, Line, Memory, Rule

REPEAT_STEPS = 50
"""An alert is raised at most once in so many optimizer steps."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A broken rule: `value` is the number of the line at `step`."""

    step: int
    rule: str
    value: float
    sentence: str


class HealthMonitor:
    """Checks the log lines of a run, in order.

    most_tokens: `max_completion_length`. stalest: optimizer steps that a token may be old.
    """

    def __init__(
        self, rules: Mapping[str, Rule] = RULES, *, most_tokens: float = math.inf, stalest: float = math.inf
    ) -> None:
        self._rules, self._most_tokens, self._stalest = rules, most_tokens, stalest
        self._last_step = 0
        self._wrong: dict[str, list[int]] = {}  # rule and name -> wrong lines in a row, first step that they cover
        self._raised: dict[str, int] = {}  # rule and name -> step of the last alert
        self._memory = Memory()

    def update(
        self, step: int, logs: Mapping[str, Any], *, diagnosis: Callable[[], Sequence[str]] = lambda: ()
    ) -> list[Alert]:
        """The alerts of a training log line; most often none.

        diagnosis: possible causes of equal rewards, from the reward functions; appended to `equal_rewards`.
        """
        line = Line(step, logs, self._memory, self._most_tokens, self._stalest)
        alerts = []
        for rule_name, rule in self._rules.items():
            for name, value, detail in rule.readings(line):
                key = f"{rule_name} {name}"
                if not COMPARISONS[rule.comparison](value, rule.limit):
                    self._wrong.pop(key, None)
                    continue
                lines, first = self._wrong.get(key, [0, self._last_step + 1])
                self._wrong[key] = [lines + 1, first]
                enough = step - first + 1 >= rule.steps if rule.steps else lines + 1 >= rule.lines
                if not enough or (key in self._raised and step - self._raised[key] < REPEAT_STEPS):
                    continue
                self._raised[key] = step
                sentence = rule.sentence.format(name=name, value=value, percent=100 * value, detail=detail)
                if rule_name == "equal_rewards" and (causes := "; ".join(diagnosis())):
                    sentence += f" ({causes})"
                alerts.append(Alert(step, rule_name, value, sentence))
        line.remember()
        self._last_step = step
        return alerts

    def state_dict(self) -> dict[str, Any]:
        """A state of plain values."""
        memory = asdict(self._memory)
        return {"last_step": self._last_step, "wrong": self._wrong, "raised": self._raised, "memory": memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state` in a new process, whose host memory is measured anew."""
        self._last_step, self._wrong, self._raised = state["last_step"], dict(state["wrong"]), dict(state["raised"])
        self._memory = Memory(**{**state["memory"], "rss": [], "warm": self._last_step + WARM_UP_STEPS})
