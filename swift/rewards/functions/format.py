"""Format of the text: pattern rules, 1.0 or 0.0."""

from __future__ import annotations

import re
from typing import Any

from swift.plugin.registry import ORM, orms

_FORMAT = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_REACT = re.compile(r"<think>.*?</think>\s*Action:.*?Action Input:.*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class _PatternReward(ORM):
    """1.0 for a text that has the form of `pattern`.

    `prompt_opens_think`: per sample, whether the prompt ended with `<think>`.
    """

    judges = "form"
    pattern: re.Pattern[str]

    def __call__(
        self, completions: list[str], prompt_opens_think: list[bool] | None = None, **kwargs: Any
    ) -> list[float]:
        """One reward per completion."""
        opened = prompt_opens_think or [False] * len(completions)
        texts = ["<think>" + text if flag else text for text, flag in zip(completions, opened, strict=True)]
        return [float(self.matches(text)) for text in texts]

    def matches(self, text: str) -> bool:
        """Whether the text has the form."""
        return self.pattern.fullmatch(text) is not None


@orms.register("format")
class Format(_PatternReward):
    """1.0 for `<think>...</think>`, optional whitespace, `<answer>...</answer>`, then only whitespace.

    Empty blocks and tags repeated inside a block pass.
    """

    pattern = _FORMAT


@orms.register("format_strict")
class FormatStrict(_PatternReward):
    """As `Format`, with each of the four tags exactly once and no blank block."""

    def matches(self, text: str) -> bool:
        """Whether the text has the form."""
        match = _FORMAT.fullmatch(text)
        return match is not None and all(text.count(tag) == 1 for tag in _TAGS) and all(map(str.strip, match.groups()))


@orms.register("react_format")
class ReActFormat(_PatternReward):
    """1.0 if the text starts with `<think>...</think>`, then `Action:` ... `Action Input:` ..."""

    pattern = _REACT
