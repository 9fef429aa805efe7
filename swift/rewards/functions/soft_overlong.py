"""Soft overlong punishment of DAPO (arXiv:2503.14476): long completions get down to -1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from swift.errors import join_problems
from swift.flags import flag
from swift.plugin.registry import ORM, orms
from swift.rewards.functions.text import lengths


@dataclass(kw_only=True)
class SoftOverlongParameters:
    """Settings of the reward."""

    GROUP: ClassVar[str] = "Reward"

    soft_max_length: int | None = flag(at_least=1, everyday=False)
    """soft_overlong: length in tokens from which the reward is -1."""

    soft_cache_length: int | None = flag(at_least=1, everyday=False)
    """soft_overlong: tokens before soft_max_length over which the reward falls from 0 to -1. Required; DAPO
    (arXiv:2503.14476) uses a fifth."""

    def problems(self) -> Iterator[str]:
        longest = self.soft_max_length
        if "soft_overlong" in getattr(self, "reward_funcs", []) and longest is not None:
            yield from ramp_problems(longest, self.soft_cache_length)


def ramp_problems(longest: int, cache: int | None) -> Iterator[str]:
    """The problem of a ramp that is missing, or not shorter than the longest completion."""
    if cache is None or not 0 < cache < longest:
        yield (
            f"--soft_cache_length: {'none' if cache is None else cache}: soft_overlong needs it above 0 and below "
            f"--soft_max_length {longest}; e.g. --soft_cache_length {max(1, longest // 5)}"
        )


@orms.register("soft_overlong", parameters=SoftOverlongParameters)
@dataclass(kw_only=True, eq=False)
class SoftOverlong(SoftOverlongParameters, ORM):
    """max(-1, min(0, (M - C - n) / C)).

    M is `soft_max_length`, or `max_completion_length` where that is None; C is `soft_cache_length`; n is the length.

    Raises:
        ConfigError: when C is missing or not between 0 and M; the message holds both values.
    """

    judges = "penalty"
    max_completion_length: int = 512

    def __post_init__(self) -> None:
        longest = self.max_completion_length if self.soft_max_length is None else self.soft_max_length
        join_problems(list(ramp_problems(longest, self.soft_cache_length)))
        assert self.soft_cache_length is not None
        self.max_length, self.cache_length = longest, self.soft_cache_length

    def __call__(
        self, completions: list[str], response_token_ids: list[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """One reward per completion, between -1 and 0."""
        ramp = self.max_length - self.cache_length
        counts = lengths(completions, response_token_ids)
        return [max(-1.0, min(0.0, (ramp - n) / self.cache_length)) for n in counts]
