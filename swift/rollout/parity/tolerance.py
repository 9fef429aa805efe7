"""How far apart engine and trainer are, and how far rounding explains.

| trainer / engine            | passes                    | refused                   |
|-----------------------------|---------------------------|---------------------------|
| float32, CPU                | max 1e-5                  | max > 1e-4                |
| float32, GPU without TF32   | max 1e-4                  | max > 1e-3                |
| 16 bits on CPU, mixed types | mean 1e-2 and k3 1e-4     | mean > 5e-2 or k3 > 1e-3  |
| 16 bits on GPU, TF32        | mean 2e-2 and k3 1e-3     | mean > 5e-2 or k3 > 1e-2  |
| quantised                   | reported                  | k3 > 0.1                  |

In 16 bits a router near a tie may choose another expert, which moves the log-prob of one token by up to a nat. So mean
and k3 of a mixture of experts leave out the largest twentieth of the gaps; wrong experts make the others large, too.

Gaps are in nats per token. k3 is the mean of exp(d) - 1 - d with d = trainer - engine, an estimate of KL(engine,
trainer) that is never negative (http://joschu.net/blog/kl-approx.html). What lies between is only reported. TF32 keeps
10 of the 23 bits of a float32, which is why it counts as 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from swift.models.forward import TokenSequence
from swift.types import Completion, Request

Verdict = Literal["pass", "warn", "refuse"]
FULL, HALF = ("float32", "float64"), ("bfloat16", "float16")
POSITIVE_SLACK = 1e-5
"""A log-prob that is above 0 by no more than this is a rounded 0."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request and its completion; `prompt` numbers the prompt."""

    request: Request
    prompt: int
    completion: Completion

    @property
    def sequence(self) -> TokenSequence:
        return TokenSequence(self.request.prompt_ids, self.completion.token_ids)


@dataclass(frozen=True, slots=True)
class Worst:
    """The token with the largest gap: `position` in the completion of prompt `prompt`."""

    prompt: int
    position: int
    token_id: int
    engine: float
    trainer: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """|trainer - engine| in nats; k3 estimates KL(engine, trainer). mean, k3: over the tokens that count."""

    tokens: int = 0
    mean: float = 0.0
    maximum: float = 0.0
    p99: float = 0.0
    k3: float = 0.0
    worst: Worst | None = None

    @property
    def place(self) -> str:
        one = self.worst
        return f"; worst at prompt {one.prompt}, token {one.position} (id {one.token_id})" if one else ""


def measure(samples: Sequence[Sample], trainer_N: Tensor, *, left_out: float = 0.0) -> Gaps:
    """Compare the trainer's log-probs [N], N > 0, with the engine's; one that is not finite makes an infinite gap.

    left_out: share of the tokens, those with the largest gaps, that do not count in mean and k3 unless infinite.
    """
    engine_N = torch.tensor([value for one in samples for value in one.completion.logprobs], dtype=torch.float64)
    trainer_N = trainer_N.double().cpu()
    assert engine_N.shape == trainer_N.shape, (engine_N.shape, trainer_N.shape)
    delta_N = trainer_N - engine_N
    gap_N = delta_N.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    k3_N = (delta_N.expm1() - delta_N).nan_to_num(nan=math.inf, posinf=math.inf)
    count = gap_N.numel() - int(left_out * gap_N.numel()) if gap_N.isfinite().all() else gap_N.numel()
    counted = gap_N.argsort()[:count]
    at = int(gap_N.argmax())
    prompt, position, token = [
        (one.prompt, place, token) for one in samples for place, token in enumerate(one.completion.token_ids)
    ][at]
    worst = Worst(prompt, position, token, float(engine_N[at]), float(trainer_N[at]))
    mean, k3 = float(gap_N[counted].mean()), float(k3_N[counted].mean())
    return Gaps(gap_N.numel(), mean, float(gap_N.max()), float(gap_N.quantile(0.99)), k3, worst)


def contract_faults(samples: Sequence[Sample], *, end_token_ids: Collection[int], limit: int, version: int) -> str:
    """Where the completions break the engine's contract, each kind of fault once; "" when nowhere.

    Args:
        samples: without stop strings.
        end_token_ids: tokens that end every completion, besides a request's own `stop_token_ids`.
        limit: most tokens of prompt and completion together.
        version: of the weights that they should have been sampled with.
    """
    found: dict[str, str] = {}
    for one in samples:
        for kind, text in _faults(one, set(end_token_ids), limit, version):
            found.setdefault(kind, f"{text} (prompt {one.prompt})")
    return "; ".join(found.values())


def _faults(one: Sample, ends: set[int], limit: int, version: int) -> Iterator[tuple[str, str]]:
    done, ids = one.completion, one.completion.token_ids
    reason = done.finish_reason
    if reason not in ("stop", "length"):
        yield "reason", f"a completion ended with {reason!r}"
        return
    if len(ids) != len(done.logprobs):
        yield "count", f"{len(ids)} tokens came with {len(done.logprobs)} log-probs"
    if not all(math.isfinite(value) and value <= POSITIVE_SLACK for value in done.logprobs):
        yield "value", "a log-prob is not finite or above 0"
    if ends:  # the token that ends a completion belongs to it, once, and nothing follows
        ends = ends | set(one.request.sampling.stop_token_ids)
        early = next((i for i, token in enumerate(ids[:-1]) if token in ends), None)
        if reason == "stop" and (not ids or ids[-1] not in ends):
            yield "end", "finish reason 'stop', but the end token is missing"
        elif early is not None:
            again = "is followed by another" if ids[early + 1] in ends else "is not the last token"
            yield "end", f"the end token {ids[early]} {again}"
        elif reason == "length" and ids and ids[-1] in ends:
            yield "end", "finish reason 'length' with an end token in last place"
    room = min(one.request.sampling.max_new_tokens, limit - len(one.request.prompt_ids))
    if len(ids) > room or (reason == "length" and len(ids) < room):
        yield "length", f"{len(ids)} tokens with finish reason {reason!r} where {room} are the limit"
    other = next((span[0] for span in done.versions if span[0] != version), None)
    if other is not None:
        yield "version", f"tokens are marked with version {other} where {version} was synced"


@dataclass(frozen=True, slots=True)
class Limits:
    """One row of the table: its name, and each measure with the most that passes and that is not refused.

    left_out: see `measure`.
    """

    row: str
    measures: Mapping[str, tuple[float, float]]
    left_out: float = 0.0

    def judge(self, gaps: Gaps) -> tuple[Verdict, str]:
        """The verdict on a stage, and the first measure over its limit: "max 2.3e+00 above 1e-04"."""
        values = {"max": gaps.maximum, "mean": gaps.mean, "k3": gaps.k3}
        for place, verdict in ((1, "refuse"), (0, "warn")):
            for name, limits in self.measures.items():
                if not values[name] <= limits[place]:  # a NaN is above every limit
                    return cast(Verdict, verdict), f"{name} {values[name]:.1e} above {limits[place]:.0e}"
        return "pass", ""


FLOAT32_CPU = Limits("float32 on CPU", {"max": (1e-5, 1e-4)})
FLOAT32_GPU = Limits("float32 on GPU", {"max": (1e-4, 1e-3)})
MIXED = Limits("16 bits on CPU or mixed types", {"mean": (1e-2, 5e-2), "k3": (1e-4, 1e-3)})
HALF_GPU = Limits("16 bits on GPU", {"mean": (2e-2, 5e-2), "k3": (1e-3, 1e-2)})
FLIPPED = 0.05
"""Share of tokens whose routing may differ; measured: k3 of the others is below 1e-4, of lost experts 1e-2 or more."""
QUANTISED = Limits("quantised", {"k3": (math.inf, 0.1)})


def limits_for(
    trainer: str, engine: str, device: str, *, tf32: bool | None = None, quantised: bool = False, experts: bool = False
) -> Limits:
    """The row that applies.

    Args:
        trainer: torch dtype name of the policy's weights.
        engine: dtype that the engine declares; one that is no torch float counts as quantised.
        device: type of the trainer's device, "cpu" or an accelerator.
        tf32: whether float32 products are rounded to TF32 there; None looks at torch's settings.
        quantised: either side holds quantised weights.
        experts: the policy is a mixture of experts.
    """
    row = _row(trainer, engine, device, tf32, quantised)
    return replace(row, row=f"{row.row}, experts", left_out=FLIPPED) if experts and row in (MIXED, HALF_GPU) else row


def _row(trainer: str, engine: str, device: str, tf32: bool | None, quantised: bool) -> Limits:
    if quantised or trainer not in FULL + HALF or engine not in FULL + HALF:
        return QUANTISED
    if trainer in FULL and engine in FULL:
        if device == "cpu":
            return FLOAT32_CPU
        if tf32 is None:
            tf32 = torch.get_float32_matmul_precision() != "highest"
        return HALF_GPU if tf32 else FLOAT32_GPU
    if device == "cpu" or (trainer in FULL) != (engine in FULL):
        return MIXED
    return HALF_GPU
