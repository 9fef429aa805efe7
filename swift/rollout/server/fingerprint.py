"""Fingerprint of the weights of an engine: its greedy completion of a fixed prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swift.rollout.engines.base import InferenceEngine
from swift.rollout.weights.digest import digest_of
from swift.types import Request, SamplingParams

TOKENS = 16
"""Number of tokens of the completion."""
TOLERANCE, ROUNDED_TOLERANCE = 1e-4, 5e-2
"""Maximum difference between log-probs: in float32, and in types of lower precision."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Tokens of the greedy completion and their log-probs."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def digest(self) -> str:
        """Digest of the weights before the first update."""
        return digest_of([("fingerprint", torch.tensor(self.token_ids))])

    def difference(self, other: Fingerprint, dtype: str) -> str:
        """How the weights differ, or "". In types of lower precision tokens after the first may differ."""
        exact = dtype == "float32"
        same = 0
        while same < min(len(self.token_ids), len(other.token_ids)) and self.token_ids[same] == other.token_ids[same]:
            same += 1
        if same == 0 or (exact and self.token_ids != other.token_ids):
            return f"the greedy tokens differ from position {same}"
        gap = max(abs(a - b) for a, b in zip(self.logprobs[:same], other.logprobs[:same], strict=True))
        differ = gap > (TOLERANCE if exact else ROUNDED_TOLERANCE)
        return f"log-probs of the same tokens differ by {gap:.2g}" if differ else ""


async def take_fingerprint(engine: InferenceEngine, prompt: Sequence[int]) -> Fingerprint:
    """Sample the fingerprint of an engine; a prompt that is too long for the context is cut to its first token."""
    room = engine.capabilities.max_model_len - len(prompt)
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0.0)
    request = Request("fingerprint", prompt if room > TOKENS else prompt[:1], sampling)
    completion = await engine.generate(request)
    return Fingerprint(tuple(completion.token_ids), tuple(completion.logprobs))
