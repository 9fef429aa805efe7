"""Weights of parts of answers in the loss, such as calls of tools: `--loss_scale hermes`, `react` and `qwen`.

The loss is the sum of weight x cross-entropy, divided by the number of trained tokens, as in ms-swift. A part is
tokenised apart. The weight of a token is kept in the high bits of its label, so that packing, streams and collators
need not know of it; a weight of 0 is a label that the loss ignores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from swift.trainers.rows import IGNORED

SHIFT = 40
"""Bits of a label that are a token id."""

KEYWORDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "react": {
        "Action:": (2, 2),
        "Action Input:": (2, 2),
        "Thought:": (1, 1),
        "Final Answer:": (1, 1),
        "Observation:": (2, 0),
    },
    "qwen": {"✿FUNCTION✿:": (2, 2), "✿ARGS✿:": (2, 2), "✿RETURN✿:": (1, 1), "✿RESULT✿:": (2, 0)},
}
"""Weight of a keyword, and of what follows up to the next one."""

CALLS = re.compile("(<tool_call>.+?</tool_call>)", re.DOTALL)
CALL = 2
"""Weight of a call in `hermes`."""


def parts_of(name: str, text: str) -> list[tuple[str, int]]:
    """The parts of an answer, and their weights.

    >>> parts_of("hermes", "I look.<tool_call>f</tool_call>")
    [('I look.', 1), ('<tool_call>f</tool_call>', 2)]
    >>> parts_of("react", "Thought: a Action: f")
    [('Thought:', 1), (' a ', 1), ('Action:', 2), (' f', 2)]
    """
    if name == "hermes":
        found = [(part, CALL if CALLS.fullmatch(part) else 1) for part in CALLS.split(text)]
    else:
        words = KEYWORDS[name]
        first, *rest = re.split(f"({'|'.join(map(re.escape, words))})", text)
        found = [(first, 1)]
        for word, content in zip(rest[::2], rest[1::2], strict=True):
            found += zip((word, content), words[word], strict=True)
    return [(part, weight) for part, weight in found if part]


def named(loss: str) -> str | None:
    """The weights that a `--loss_scale` names, if any."""
    return next((name for name in loss.split("+") if name in ("hermes", *KEYWORDS)), None)


def with_weight(token: int, weight: int) -> int:
    """The label of a token of this weight."""
    return token + (weight - 1 << SHIFT) if weight else IGNORED


class WeightedTokens:
    """Mixin before SFTTrainer: weighs the log-probs of its loss, if `weighs`."""

    def __init__(self, *, weighs: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.weighs = weighs

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """As SFTTrainer's."""
        if self.weighs:
            labels: Tensor = inputs["labels"]
            weights = (labels >> SHIFT).clamp(min=0)[:, 1:] + 1
            inputs = {**inputs, "labels": torch.where(labels < 0, labels, labels & (1 << SHIFT) - 1)}
            model = _weighing(model, weights)
        return super().compute_loss(model, inputs, *arguments, **named)  # type: ignore[misc]


def _weighing(model: Any, weights: Tensor) -> Callable[..., Any]:
    def forward(**inputs: Any) -> Any:
        outputs = model(**inputs)
        outputs.log_probs = outputs.log_probs * weights
        return outputs

    return forward
