"""Cosine reward: higher for short right answers and for long wrong ones (arXiv:2502.03373)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from swift.errors import ConfigError
from swift.flags import flag
from swift.plugin.registry import ORM, orms
from swift.rewards.functions.accuracy import MathAccuracy
from swift.rewards.functions.text import lengths


@dataclass(kw_only=True)
class CosineParameters:
    """Settings of the reward."""

    GROUP: ClassVar[str] = "Reward"

    cosine_min_len_value_wrong: float = flag(-0.5, everyday=False)
    """cosine: reward of a wrong answer of length 0."""

    cosine_max_len_value_wrong: float = flag(0.0, everyday=False)
    """cosine: reward of a wrong answer of length cosine_max_len."""

    cosine_min_len_value_correct: float = flag(1.0, everyday=False)
    """cosine: reward of a right answer of length 0."""

    cosine_max_len_value_correct: float = flag(0.5, everyday=False)
    """cosine: reward of a right answer of length cosine_max_len."""

    cosine_max_len: int | None = flag(at_least=1, everyday=False)
    """cosine: length in tokens from which the reward is constant."""


@orms.register("cosine", parameters=CosineParameters)
@dataclass(kw_only=True, eq=False)
class CosineReward(CosineParameters, ORM):
    """R = hi - (hi - lo)(1 - cos(pi t / T)) / 2 with t = min(n, T): hi at no tokens, lo at T and beyond.

    The parameters are the settings above; T is `cosine_max_len`, or `max_completion_length` if that is None.

    Raises:
        ConfigError: when T is not positive.
    """

    counts_ground_truths: ClassVar[bool] = True

    max_completion_length: int = 512

    def __post_init__(self) -> None:
        self.max_len = self.max_completion_length if self.cosine_max_len is None else self.cosine_max_len
        if self.max_len <= 0:
            raise ConfigError(f"--cosine_max_len: {self.max_len}: must be above 0")
        self.accuracy = MathAccuracy()
        self.counters = self.accuracy.counters

    def __call__(
        self,
        completions: list[str],
        solution: list[Any],
        response_token_ids: list[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """One reward per completion."""
        right = self.accuracy(completions, solution)
        self.extracted = self.accuracy.extracted
        counts = lengths(completions, response_token_ids)
        return [self._value(n, bool(ok)) for n, ok in zip(counts, right, strict=True)]

    def _value(self, num_tokens: int, right: bool) -> float:
        if right:
            hi, lo = self.cosine_min_len_value_correct, self.cosine_max_len_value_correct
        else:
            hi, lo = self.cosine_min_len_value_wrong, self.cosine_max_len_value_wrong
        t = min(num_tokens, self.max_len)
        return hi - (hi - lo) * (1.0 - math.cos(math.pi * t / self.max_len)) / 2.0
