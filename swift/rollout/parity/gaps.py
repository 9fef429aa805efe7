"""What the engine returned, whether it keeps the contract, and how far the trainer's log-probs are from its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swift.models.forward import TokenSequence
from swift.types import Completion, Request

POSITIVE_SLACK = 1e-5
"""Above 0 by no more than this, a log-prob is a rounded 0."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sample: what was asked for and what came back."""

    request: Request
    prompt: int
    completion: Completion

    @property
    def sequence(self) -> TokenSequence:
        """For the trainer's forward."""
        return TokenSequence(self.request.prompt_ids, self.completion.token_ids)


@dataclass(frozen=True, slots=True)
class Worst:
    """The token with the largest gap: `position` in the completion of prompt `prompt`."""

    prompt: int
    position: int
    token_id: int
    sampler: float
    trainer: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """|trainer - sampler| over all tokens, in nats; k3 estimates KL(sampler, trainer)."""

    tokens: int
    mean: float
    maximum: float
    p99: float
    k3: float
    worst: Worst | None


NOTHING = Gaps(0, 0.0, 0.0, 0.0, 0.0, None)
"""Nothing was compared."""


def sampler_logprobs(drawn: Sequence[Drawn]) -> Tensor:
    """[N] what the engine said of each token, float64."""
    return torch.tensor([value for one in drawn for value in one.completion.logprobs], dtype=torch.float64)


def measure(drawn: Sequence[Drawn], trainer_N: Tensor) -> Gaps:
    """Compare the trainer's log-probs [N], N > 0, with the engine's; one that is not finite makes an infinite gap."""
    sampler_N, trainer_N = sampler_logprobs(drawn), trainer_N.double().cpu()
    assert sampler_N.shape == trainer_N.shape, (sampler_N.shape, trainer_N.shape)
    delta_N = trainer_N - sampler_N
    gap_N = delta_N.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    at = int(gap_N.argmax())
    where = [(one, i) for one in drawn for i in range(len(one.completion.token_ids))][at]
    worst = Worst(
        where[0].prompt, where[1], where[0].completion.token_ids[where[1]], float(sampler_N[at]), float(trainer_N[at])
    )
    k3 = float((delta_N.expm1() - delta_N).nan_to_num(nan=math.inf, posinf=math.inf).mean())
    return Gaps(gap_N.numel(), float(gap_N.mean()), float(gap_N.max()), float(gap_N.quantile(0.99)), k3, worst)


def faults(drawn: Sequence[Drawn], *, end_token_ids: Collection[int], limit: int, version: int) -> list[str]:
    """Where the completions break the contract, one short text per kind of fault.

    Args:
        drawn: the samples, without stop strings.
        end_token_ids: tokens that end every completion, besides a request's own `stop_token_ids`.
        limit: most tokens of prompt and completion together.
        version: of the weights that they should have been sampled with.
    """
    found: dict[str, str] = {}
    for one in drawn:
        for kind, text in _faults(one, set(end_token_ids), limit, version):
            found.setdefault(kind, f"{text} (prompt {one.prompt})")
    return list(found.values())


def _faults(one: Drawn, ends: set[int], limit: int, version: int) -> Iterator[tuple[str, str]]:
    done, ids = one.completion, one.completion.token_ids
    if done.finish_reason not in ("stop", "length"):
        yield "reason", f"a completion ended with {done.finish_reason!r}"
        return
    if len(ids) != len(done.logprobs):
        yield "count", f"{len(ids)} tokens came with {len(done.logprobs)} log-probs"
    if not all(math.isfinite(value) and value <= POSITIVE_SLACK for value in done.logprobs):
        yield "value", "a log-prob is not finite or above 0"
    yield from _end_faults(done, ends | set(one.request.sampling.stop_token_ids))
    room = min(one.request.sampling.max_new_tokens, limit - len(one.request.prompt_ids))
    if len(ids) > room or (done.finish_reason == "length" and len(ids) < room):
        yield "length", f"{len(ids)} tokens with finish reason {done.finish_reason!r} where {room} are the limit"
    other = next((span[0] for span in done.versions if span[0] != version), None)
    if other is not None:
        yield "version", f"tokens are marked with version {other} where {version} was published"


def _end_faults(done: Completion, ends: set[int]) -> Iterator[tuple[str, str]]:
    """The token that ends a completion belongs to it, once, and nothing follows."""
    if not ends:
        return
    ids = done.token_ids
    if done.finish_reason == "stop" and (not ids or ids[-1] not in ends):
        yield "end", "finish reason 'stop', but the end token is missing"
    early = next((i for i, token in enumerate(ids[:-1]) if token in ends), None)
    if early is not None:
        again = "is followed by another" if ids[early + 1] in ends else "is not the last token"
        yield "end", f"the end token {ids[early]} {again}"
    elif done.finish_reason == "length" and ids and ids[-1] in ends:
        yield "end", "finish reason 'length' with an end token in last place"


def comparable(drawn: Sequence[Drawn]) -> list[Drawn]:
    """The samples whose log-probs can be laid beside the trainer's."""
    return [
        one
        for one in drawn
        if one.completion.token_ids and len(one.completion.token_ids) == len(one.completion.logprobs)
    ]
