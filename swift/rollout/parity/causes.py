"""What probably went wrong, told from the pattern of the gaps.

Each hypothesis is tried: the trainer computes what an engine with that fault would have returned, and the one that
explains the engine's log-probs is named. A hypothesis explains them when what is left is within the limits. Every rank
tries the same ones in the same order, because a forward pass can be a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from swift.rollout.parity.gaps import Drawn, measure, sampler_logprobs
from swift.rollout.parity.noise import Noise, stale_head
from swift.rollout.parity.tolerance import FULL, Limits

Rescore = Callable[[], Tensor]

UNKNOWN = "none of the known patterns"
CACHES = "what the engine remembers of prompts (KV or prefix cache) outlives a publication"


def as_loaded(
    drawn: Sequence[Drawn],
    trainer_N: Tensor,
    limits: Limits,
    *,
    declared: str,
    unscaled: Rescore | None,
) -> str:
    """Why an engine disagrees that reads the same checkpoint as the trainer.

    Args:
        drawn: the samples.
        trainer_N: the trainer's log-probs.
        limits: what counts as agreement.
        declared: dtype that the engine says it computes in.
        unscaled: the trainer's log-probs at temperature 1; None when sampling is at 1 anyway.
    """
    if unscaled is not None and _explains(drawn, unscaled(), limits):
        return "the engine's log-probs are those of temperature 1: the sampling temperature is not applied to them"
    if _is_shifted(drawn, trainer_N, limits):
        return "log-probs are shifted against the tokens by one"
    if _only_shorter_prompts(drawn, trainer_N, limits):
        return "only prompts that are shorter than the longest are off: padding leaks into attention or positions"
    gaps = measure(drawn, trainer_N)
    if declared in FULL and gaps.mean < 2e-2 and gaps.k3 < 1e-3:
        return f"gaps as from rounding to 16 bits: the engine computes in another type than the {declared} it declares"
    return (
        "the engine has another model or configuration than the trainer (RoPE base, norm epsilon, checkpoint, "
        "quantisation)"
    )


def with_noise(
    drawn: Sequence[Drawn],
    limits: Limits,
    noise: Noise,
    rescore: Rescore,
) -> str:
    """Why an engine disagrees after a publication that it confirmed."""
    found = []
    for applied, text in _publications(noise):
        with applied as possible:
            if possible is not False and _explains(drawn, rescore(), limits):
                found.append(text)  # and on to the last: other ranks, with other samples, pass over the model as often
    return found[0] if found else UNKNOWN + ": some weights arrive changed"


def _publications(noise: Noise) -> Iterator[tuple[AbstractContextManager[bool | None], str]]:
    yield (
        noise.applied(without=noise.values),
        "the update does not arrive: the engine still samples with its old weights",
    )
    if noise.tied:
        yield stale_head(noise), "the head, which is tied to the embedding, is not sent or not loaded"
    halves = {
        name: noise.values[name].float() / factor for name, factor in noise.scalings.items() if name in noise.values
    }
    if halves:
        cast = {name: value.to(noise.values[name].dtype) for name, value in halves.items()}
        yield noise.applied(change=cast), "the adapter's scaling (lora_alpha / r) is dropped"
    adapter = [name for name, kind in noise.kinds.items() if kind == "LoRA B"]
    if adapter:
        yield noise.applied(without=adapter), "the adapter does not arrive"
    for name, kind in noise.kinds.items():
        if kind != "LoRA B":
            yield noise.applied(without=[name]), f"{name} ({kind}) does not arrive"


def restored(drawn: Sequence[Drawn], limits: Limits, noise: Noise, rescore: Rescore) -> str:
    """Why an engine disagrees after the true weights were published again."""
    with noise.applied():
        if _explains(drawn, rescore(), limits):
            return "the second publication does not arrive: the engine still samples with the first one's weights"
    return UNKNOWN + ": weights of the first publication are left over"


def later() -> str:
    """Why an engine disagrees that agreed at the start."""
    return "a publication since the start did not arrive whole, or prompts cached before it are still used"


def _explains(drawn: Sequence[Drawn], hypothesis_N: Tensor, limits: Limits) -> bool:
    return limits.judge(measure(drawn, hypothesis_N)) != "refuse"


def _is_shifted(drawn: Sequence[Drawn], trainer_N: Tensor, limits: Limits) -> bool:
    """Whether each log-prob is that of the token before, or of the one after."""
    sampler, trainer = (_by_sample(drawn, values) for values in (sampler_logprobs(drawn), trainer_N.double().cpu()))
    pairs = [(s, t) for s, t in zip(sampler, trainer, strict=True) if len(s) > 2]
    for ours, theirs in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None))):
        gaps = [(t[theirs] - s[ours]).abs() for s, t in pairs]
        if gaps and _small(torch.cat(gaps), limits):
            return True
    return False


def _only_shorter_prompts(drawn: Sequence[Drawn], trainer_N: Tensor, limits: Limits) -> bool:
    lengths = [len(one.request.prompt_ids) for one in drawn]
    if min(lengths) == max(lengths):
        return False
    gaps = _by_sample(drawn, (trainer_N.double().cpu() - sampler_logprobs(drawn)).abs())
    longest = [gap for gap, length in zip(gaps, lengths, strict=True) if length == max(lengths)]
    return _small(torch.cat(longest), limits)


def _small(gap_N: Tensor, limits: Limits) -> bool:
    if limits.refuse_max is not None:
        return bool(gap_N.max() <= limits.refuse_max)
    return bool(gap_N.mean() <= (limits.refuse_mean or 0.1))


def _by_sample(drawn: Sequence[Drawn], values_N: Tensor) -> list[Tensor]:
    return list(values_N.split([len(one.completion.token_ids) for one in drawn]))
