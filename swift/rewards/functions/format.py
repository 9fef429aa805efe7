"""Does the text have the asked-for shape? Pure pattern rules, 1.0 or 0.0."""

from __future__ import annotations

import re
from typing import Any

from swift.plugin.registry import ORM

_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
_STRICT = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_REACT = re.compile(r"<think>.*?</think>\s*Action:.*?Action Input:.*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def _with_opening(completions: list[str], opened: list[bool] | None) -> list[str]:
    """The texts with the `<think>` that the prompt's template wrote in front of them, where it did."""
    if opened is None:
        return completions
    return ["<think>" + text if flag else text for text, flag in zip(completions, opened, strict=True)]


class Format(ORM):
    """1.0 for `<think>...</think>`, optional whitespace, `<answer>...</answer>`, then only whitespace.

    Empty blocks and tags repeated inside a block pass. `prompt_opens_think` says per sample whether the
    prompt itself ended with `<think>`.
    """

    def __call__(
        self, completions: list[str], prompt_opens_think: list[bool] | None = None, **kwargs: Any
    ) -> list[float]:
        """One reward per completion."""
        texts = _with_opening(completions, prompt_opens_think)
        return [float(_FORMAT.fullmatch(text) is not None) for text in texts]


class FormatStrict(ORM):
    """As `Format`, with each of the four tags exactly once and no blank block."""

    def __call__(
        self, completions: list[str], prompt_opens_think: list[bool] | None = None, **kwargs: Any
    ) -> list[float]:
        """One reward per completion."""
        return [float(_is_strict(text)) for text in _with_opening(completions, prompt_opens_think)]


class ReActFormat(ORM):
    """1.0 if the text starts with `<think>...</think>`, then `Action:` ... `Action Input:` ..."""

    def __call__(
        self, completions: list[str], prompt_opens_think: list[bool] | None = None, **kwargs: Any
    ) -> list[float]:
        """One reward per completion."""
        texts = _with_opening(completions, prompt_opens_think)
        return [float(_REACT.match(text) is not None) for text in texts]


def _is_strict(text: str) -> bool:
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    match = _STRICT.fullmatch(text)
    return match is not None and all(block.strip() for block in match.groups())
