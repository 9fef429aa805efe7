"""Repetition penalty: share of repeated n-grams (arXiv:2502.03373)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from swift.flags import flag
from swift.plugin.registry import ORM, orms

# Scripts written without spaces: Chinese characters, Hiragana, Katakana (also half width).
_SCRIPTS = r"\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
_WORD = re.compile(rf"[{_SCRIPTS}]|[^\s{_SCRIPTS}]+")


@dataclass(kw_only=True)
class RepetitionParameters:
    """Settings of the reward."""

    GROUP: ClassVar[str] = "Reward"

    repetition_n_grams: int = flag(3, at_least=1, everyday=False)
    """repetition: words per n-gram."""

    repetition_max_penalty: float = flag(-1.0, at_most=0, everyday=False)
    """repetition: reward of a text that only repeats itself."""


def words(text: str) -> list[str]:
    """Lower-case words by whitespace; a run of Chinese or Japanese script is one word per character."""
    return _WORD.findall(text.lower())


@orms.register("repetition", parameters=RepetitionParameters)
@dataclass(kw_only=True, eq=False)
class RepetitionPenalty(RepetitionParameters, ORM):
    """p (1 - distinct N-grams / N-grams), p = `repetition_max_penalty`; 0 for a text of fewer than N words."""

    judges = "penalty"

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """One reward per completion."""
        return [self._score(words(text)) for text in completions]

    def _score(self, tokens: list[str]) -> float:
        count = len(tokens) - self.repetition_n_grams + 1
        if count < 1:
            return 0.0
        distinct = len({tuple(tokens[start : start + self.repetition_n_grams]) for start in range(count)})
        return self.repetition_max_penalty * (1.0 - distinct / count)
