"""A fingerprint of the weights that an engine samples with: its greedy answer to a fixed prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swift.rollout.engines.base import InferenceEngine
from swift.rollout.weights.digest import digest_of
from swift.types import Request, SamplingParams

TOKENS = 16
"""Length of the answer."""
TOLERANCE, ROUNDED_TOLERANCE = 1e-4, 5e-2
"""Largest difference of its log-probs: of float32, and of types that round more."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Greedy tokens of a fixed prompt, and their log-probs."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def digest(self) -> str:
        """A name for these weights while no update has given them another."""
        return digest_of([("fingerprint", torch.tensor(self.token_ids))])

    def difference(self, other: Fingerprint, dtype: str) -> str:
        """How the weights differ, in words; "" when they do not. Only float32 must take the same path to its end."""
        exact = dtype == "float32"
        same = 0
        while same < min(len(self.token_ids), len(other.token_ids)) and self.token_ids[same] == other.token_ids[same]:
            same += 1
        if same == 0 or (exact and self.token_ids != other.token_ids):
            return f"they answer with other tokens from place {same} on"
        gap = max(abs(a - b) for a, b in zip(self.logprobs[:same], other.logprobs[:same], strict=True))
        wrong = gap > (TOLERANCE if exact else ROUNDED_TOLERANCE)
        return f"log-probs of the same tokens differ by {gap:.2g}" if wrong else ""


async def take_fingerprint(engine: InferenceEngine, prompt: Sequence[int]) -> Fingerprint:
    """What the engine answers now; a prompt that leaves no room is cut to its first token."""
    room = engine.capabilities.max_model_len - len(prompt)
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0.0)
    request = Request("fingerprint", prompt if room > TOKENS else prompt[:1], sampling)
    completion = await engine.generate(request)
    return Fingerprint(tuple(completion.token_ids), tuple(completion.logprobs))
