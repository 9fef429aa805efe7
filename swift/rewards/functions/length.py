"""Rewards that depend on the length of a completion.

n is the number of generated tokens, the end token included: the length of `response_token_ids`. Outside a
run, where a text has no tokens, n is the number of whitespace-separated words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from swift.errors import ConfigError
from swift.flags import flag
from swift.plugin.registry import ORM
from swift.rewards.functions.accuracy import MathAccuracy

DEFAULT_MAX_COMPLETION_LENGTH = 512


def lengths(completions: list[str], response_token_ids: list[Any] | None) -> list[int]:
    """The n of each completion: tokens where their ids are known, words where they are not."""
    if response_token_ids is None:
        return [len(text.split()) for text in completions]
    return [
        len(text.split()) if ids is None else len(ids)
        for text, ids in zip(completions, response_token_ids, strict=True)
    ]


@dataclass(kw_only=True)
class CosineParameters:
    """Settings of the cosine reward."""

    GROUP: ClassVar[str] = "Reward"

    cosine_min_len_value_wrong: float = flag(-0.5, everyday=False)
    """Reward of a wrong answer of length 0."""

    cosine_max_len_value_wrong: float = flag(0.0, everyday=False)
    """Reward of a wrong answer of length cosine_max_len."""

    cosine_min_len_value_correct: float = flag(1.0, everyday=False)
    """Reward of a right answer of length 0."""

    cosine_max_len_value_correct: float = flag(0.5, everyday=False)
    """Reward of a right answer of length cosine_max_len."""

    cosine_max_len: int | None = flag(at_least=1, everyday=False)
    """Length in tokens from which the reward is constant."""


@dataclass(kw_only=True)
class SoftOverlongParameters:
    """Settings of the soft overlong punishment."""

    GROUP: ClassVar[str] = "Reward"

    soft_max_length: int | None = flag(at_least=1, everyday=False)
    """Length in tokens from which the reward is -1."""

    soft_cache_length: int | None = flag(at_least=1, everyday=False)
    """Number of tokens before soft_max_length over which the reward falls from 0 to -1. Required; DAPO
    (arXiv:2503.14476) uses a fifth."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        longest, reward_funcs = self.soft_max_length, getattr(self, "reward_funcs", [])
        if "soft_overlong" in reward_funcs and self.soft_cache_length is None:
            yield (
                f"--soft_cache_length: none: soft_overlong needs it, above 0 and below --soft_max_length {longest}; "
                f"e.g. --soft_cache_length {max(1, (longest or 0) // 5)}"
            )
        elif self.soft_cache_length is not None and longest is not None and self.soft_cache_length >= longest:
            yield (
                f"--soft_cache_length: {self.soft_cache_length}: must be below --soft_max_length {longest}; "
                f"e.g. --soft_cache_length {max(1, longest // 5)}"
            )


class CosineReward(ORM):
    """Short right answers earn more than long ones; long wrong answers lose less (arXiv:2502.03373).

    R = hi - (hi - lo)(1 - cos(pi t / T)) / 2 with t = min(n, T): hi at no tokens, lo at T and beyond.

    Args:
        cosine_min_len_value_wrong: value of a wrong answer of length 0.
        cosine_max_len_value_wrong: value of a wrong answer of length T.
        cosine_min_len_value_correct: value of a right answer of length 0.
        cosine_max_len_value_correct: value of a right answer of length T.
        cosine_max_len: T in tokens; None means `max_completion_length`.
        max_completion_length: longest completion of the run, in tokens.

    Raises:
        ConfigError: when T is not positive.
    """

    parameters = CosineParameters

    def __init__(
        self,
        cosine_min_len_value_wrong: float = -0.5,
        cosine_max_len_value_wrong: float = 0.0,
        cosine_min_len_value_correct: float = 1.0,
        cosine_max_len_value_correct: float = 0.5,
        cosine_max_len: int | None = None,
        max_completion_length: int = DEFAULT_MAX_COMPLETION_LENGTH,
    ) -> None:
        super().__init__()
        self.wrong = (cosine_min_len_value_wrong, cosine_max_len_value_wrong)
        self.right = (cosine_min_len_value_correct, cosine_max_len_value_correct)
        self.max_len = max_completion_length if cosine_max_len is None else cosine_max_len
        if self.max_len <= 0:
            raise ConfigError(f"--cosine_max_len: {self.max_len}: must be above 0")
        self.accuracy = MathAccuracy()

    @property
    def counters(self) -> dict[str, int]:
        """Gold answers without a parse, as counted by the accuracy inside."""
        return self.accuracy.counters

    def __call__(
        self,
        completions: list[str],
        solution: list[Any],
        response_token_ids: list[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """One reward per completion."""
        right = self.accuracy(completions, solution)
        counts = lengths(completions, response_token_ids)
        return [self._value(n, bool(ok)) for n, ok in zip(counts, right, strict=True)]

    def _value(self, num_tokens: int, right: bool) -> float:
        hi, lo = self.right if right else self.wrong
        t = min(num_tokens, self.max_len)
        return hi - (hi - lo) * (1.0 - math.cos(math.pi * t / self.max_len)) / 2.0


class SoftOverlong(ORM):
    """Soft overlong punishment of DAPO (arXiv:2503.14476): max(-1, min(0, (M - C - n) / C)).

    Args:
        soft_max_length: M in tokens; None means `max_completion_length`.
        soft_cache_length: C in tokens, the width of the ramp before M; 0 < C < M.
        max_completion_length: longest completion of the run, in tokens.

    Raises:
        ConfigError: when C is missing or not between 0 and M; the message holds both values.
    """

    parameters = SoftOverlongParameters

    def __init__(
        self,
        soft_max_length: int | None = None,
        soft_cache_length: int | None = None,
        max_completion_length: int = DEFAULT_MAX_COMPLETION_LENGTH,
    ) -> None:
        super().__init__()
        self.max_length = max_completion_length if soft_max_length is None else soft_max_length
        if soft_cache_length is None or not 0 < soft_cache_length < self.max_length:
            raise ConfigError(
                f"--soft_cache_length: {soft_cache_length}: soft_overlong needs "
                f"0 < soft_cache_length < soft_max_length ({self.max_length}); "
                f"for example --soft_cache_length {max(1, self.max_length // 5)}"
            )
        self.cache_length = soft_cache_length

    def __call__(
        self, completions: list[str], response_token_ids: list[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """One reward per completion, between -1 and 0."""
        ramp = self.max_length - self.cache_length
        counts = lengths(completions, response_token_ids)
        return [max(-1.0, min(0.0, (ramp - n) / self.cache_length)) for n in counts]
