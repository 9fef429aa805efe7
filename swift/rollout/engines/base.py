"""The contract of an inference engine.

Ids pass unchanged: an engine gets token ids and returns token ids, the ending token included, with the log-prob
of each token under the distribution it was drawn from. Each request comes back exactly once, in any order.
A prompt that leaves no room raises `PromptTooLong` before anything is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from swift.types import Completion, Request

LogprobSupport = Literal["full", "truncated", "raw"]


@dataclass(slots=True)
class EngineCounters:
    """What an engine did since it was made: proof that prompts are shared and finished rows leave."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    decode_steps: int = 0
    generate_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; callers ask instead of testing for its name."""

    name: str
    logprob_support: LogprobSupport
    seeded: bool
    shares_weights: bool
    max_model_len: int
    extra: dict[str, str] = field(default_factory=dict)


class InferenceEngine(Protocol):
    """What the rollout pipeline needs of an engine."""

    capabilities: Capabilities
    counters: EngineCounters
    version: int

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Sample every request; completions are yielded as they finish.

        Raises:
            PromptTooLong: before sampling, when a prompt leaves no room for one token.
        """
        ...

    def publish(self, version: int) -> None:
        """From now on sample with the current policy weights and call them `version`."""
        ...

    def close(self) -> None:
        """Release what the engine holds; idempotent."""
        ...
