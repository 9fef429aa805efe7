"""Does the trainer see the same policy as the sampler? Checked before the first step, on real prompts.

A wrong temperature, a shifted log-prob, stale or incomplete weights all show here as a gap between the log-prob
that the engine returned for a token and the one that the trainer computes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swift.models.forward import TokenSequence
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.seeds import sample_seed
from swift.types import Prompt, Request, SamplingParams

PARITY_PROMPTS = 8
PARITY_SAMPLES = 2
PARITY_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Gaps in nats: up to `passes` is fine, above `refuses` training would learn from wrong ratios."""

    passes: float
    refuses: float


def tolerance_for(dtype: torch.dtype, device: torch.device) -> Tolerance:
    """What rounding explains, on the maximum for fp32 and on the mean for 16-bit types."""
    if dtype == torch.float32:
        return Tolerance(1e-5, 1e-4) if device.type == "cpu" else Tolerance(1e-4, 1e-3)
    return Tolerance(1e-2, 5e-2) if device.type == "cpu" else Tolerance(2e-2, 5e-2)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Gap between sampler and trainer over `tokens` sampled tokens."""

    tokens: int
    mean: float
    maximum: float
    tolerance: Tolerance
    on_maximum: bool

    @property
    def judged(self) -> float:
        """The figure that the tolerance is about."""
        return self.maximum if self.on_maximum else self.mean

    def line(self) -> str:
        """One readable line."""
        return (
            f"parity: sampler against trainer over {self.tokens} tokens: "
            f"max |logp difference| {self.maximum:.1e}, mean {self.mean:.1e}"
        )


def check_parity(
    engine: InferenceEngine,
    logprobs: Callable[[Sequence[TokenSequence]], Tensor],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ParityReport:
    """Sample a little with the engine and score it with the trainer's forward.

    Args:
        engine: the sampler, with the current weights.
        logprobs: the trainer's log-probs [N] of all completion tokens, at the sampling temperature.
        prompts: the first few of the data set.
        sampling: the training distribution; truncation and penalties are left out, as they change the sampler's
            distribution on purpose.
        dtype: weights' type, which sets the tolerance.
        device: the model's device.
    """
    plain = replace(sampling, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, stop=())
    plain = replace(plain, max_new_tokens=min(PARITY_TOKENS, sampling.max_new_tokens))
    requests = [
        Request(f"{p}/{s}", prompt.token_ids, replace(plain, seed=sample_seed(0, f"parity:{p}", 0, s)))
        for p, prompt in enumerate(prompts[:PARITY_PROMPTS])
        for s in range(PARITY_SAMPLES)
    ]
    done = {completion.request_id: completion for completion in engine.generate(requests)}
    completions = [done[request.request_id] for request in requests]
    trainer_N = logprobs(
        [TokenSequence(r.prompt_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)]
    ).cpu()
    sampler_N = torch.tensor([value for completion in completions for value in completion.logprobs])
    gap_N = (trainer_N - sampler_N).abs()
    return ParityReport(
        tokens=gap_N.numel(),
        mean=float(gap_N.double().mean()),
        maximum=float(gap_N.max()),
        tolerance=tolerance_for(dtype, device),
        on_maximum=dtype == torch.float32,
    )
