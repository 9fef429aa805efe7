"""Differences between the log-probs of engine and trainer, and the limits that rounding explains.

| trainer / engine            | passes                    | refused                   |
|-----------------------------|---------------------------|---------------------------|
| float32, CPU                | max 1e-5                  | max > 1e-4                |
| float32, GPU without TF32   | max 1e-4                  | max > 1e-3                |
| 16 bits on CPU, mixed types | mean 1e-2 and k3 1e-4     | mean > 5e-2 or k3 > 1e-3  |
| 16 bits on GPU, TF32        | mean 2e-2 and k3 1e-3     | mean > 5e-2 or k3 > 1e-2  |
| quantised                   | reported                  | k3 > 0.1                  |

In 16 bits a router near a tie may choose another expert, which changes the log-prob of a token by up to a nat. So mean
and k3 of a mixture of experts omit the largest 5% of the gaps; with wrong experts the other gaps are large, too.

The table is for models of up to 24 layers. In deeper ones rounding adds up: max and mean may be larger by the factor
(layers / 24)^0.55, and k3 by its square.

Gaps are in nats per token. k3 is the mean of exp(d) - 1 - d with d = trainer - engine, an estimate of KL(engine,
trainer) that is never negative (http://joschu.net/blog/kl-approx.html). Gaps between the two limits are only reported.
TF32 has 10 of the 23 mantissa bits of a float32, so it counts as 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from swift.types import Completion, Request

Verdict = Literal["pass", "warn", "refuse"]
FULL, HALF = ("float32", "float64"), ("bfloat16", "float16")
POSITIVE_SLACK = 1e-5
"""Maximum of a positive log-prob that counts as a rounded 0."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request and its completion; `prompt` numbers the prompt."""

    request: Request
    prompt: int
    completion: Completion


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
    """|trainer - engine| in nats; k3 estimates KL(engine, trainer). mean, k3: over tokens that count; whole_k3: all."""

    tokens: int = 0
    mean: float = 0.0
    maximum: float = 0.0
    p99: float = 0.0
    k3: float = 0.0
    worst: Worst | None = None
    whole_k3: float = 0.0

    @property
    def place(self) -> str:
        """Description of the worst token, for messages."""
        worst = self.worst
        return f"; worst at prompt {worst.prompt}, token {worst.position} (id {worst.token_id})" if worst else ""


def measure(samples: Sequence[Sample], trainer_N: Tensor, *, left_out: float = 0.0) -> Gaps:
    """Compare the trainer's log-probs [N], N > 0, with the engine's; a log-prob that is not finite is an infinite gap.

    left_out: share of tokens with the largest gaps that mean and k3 omit, unless a gap is infinite.
    """
    engine_N = torch.tensor([value for sample in samples for value in sample.completion.logprobs], dtype=torch.float64)
    trainer_N = trainer_N.double().cpu()
    assert engine_N.shape == trainer_N.shape, (engine_N.shape, trainer_N.shape)
    delta_N = trainer_N - engine_N
    gap_N = delta_N.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    k3_N = (delta_N.expm1() - delta_N).nan_to_num(nan=math.inf, posinf=math.inf)
    count = gap_N.numel() - int(left_out * gap_N.numel()) if gap_N.isfinite().all() else gap_N.numel()
    counted = gap_N.argsort()[:count]
    at = int(gap_N.argmax())
    prompt, position, token = [
        (sample.prompt, place, token) for sample in samples for place, token in enumerate(sample.completion.token_ids)
    ][at]
    worst = Worst(prompt, position, token, float(engine_N[at]), float(trainer_N[at]))
    mean, k3 = float(gap_N[counted].mean()), float(k3_N[counted].mean())
    return Gaps(gap_N.numel(), mean, float(gap_N.max()), float(gap_N.quantile(0.99)), k3, worst, float(k3_N.mean()))


def contract_faults(samples: Sequence[Sample], *, end_token_ids: Collection[int], limit: int, version: int) -> str:
    """Violations of the engine's contract by the completions, one of each kind; "" if there are none.

    Args:
        samples: samples without stop strings.
        end_token_ids: tokens that end every completion, besides a request's own `stop_token_ids`.
        limit: maximum tokens of prompt and completion together.
        version: policy version that should have sampled them.
    """
    found: dict[str, str] = {}
    for sample in samples:
        for kind, text in _faults(sample, set(end_token_ids), limit, version):
            found.setdefault(kind, f"{text} (prompt {sample.prompt})")
    return "; ".join(found.values())


def _faults(sample: Sample, ends: set[int], limit: int, version: int) -> Iterator[tuple[str, str]]:
    done, ids = sample.completion, sample.completion.token_ids
    reason = done.finish_reason
    if reason not in ("stop", "length"):
        yield "reason", f"a completion ended with {reason!r}"
        return
    if len(ids) != len(done.logprobs):
        yield "count", f"{len(ids)} tokens came with {len(done.logprobs)} log-probs"
    if not all(math.isfinite(value) and value <= POSITIVE_SLACK for value in done.logprobs):
        yield "value", "a log-prob is not finite or above 0"
    if ends:  # the end token is part of the completion, once, as its last token
        ends = ends | set(sample.request.sampling.stop_token_ids)
        early = next((i for i, token in enumerate(ids[:-1]) if token in ends), None)
        if reason == "stop" and (not ids or ids[-1] not in ends):
            yield "end", "finish reason 'stop', but the end token is missing"
        elif early is not None:
            where = "is followed by another" if ids[early + 1] in ends else "is not the last token"
            yield "end", f"the end token {ids[early]} {where}"
        elif reason == "length" and ids and ids[-1] in ends:
            yield "end", "finish reason 'length' with an end token in last place"
    room = min(sample.request.sampling.max_new_tokens, limit - len(sample.request.prompt_ids))
    if len(ids) > room or (reason == "length" and len(ids) < room):
        yield "length", f"{len(ids)} tokens with finish reason {reason!r} where {room} are the limit"
    other = next((span[0] for span in done.versions if span[0] != version), None)
    if other is not None:
        yield "version", f"tokens are marked with version {other} where {version} was synced"


@dataclass(frozen=True, slots=True)
class Limits:
    """One row of the table: its name, and for each measure the maximum that passes and the maximum not refused.

    left_out: see `measure`.
    """

    row: str
    measures: Mapping[str, tuple[float, float]]
    left_out: float = 0.0

    def judge(self, gaps: Gaps) -> tuple[Verdict, str]:
        """The verdict, and the first measure above its limit, such as "max 2.3e+00 above 1e-04"."""
        values = {"max": gaps.maximum, "mean": gaps.mean, "k3": gaps.k3}
        for place, verdict in ((1, "refuse"), (0, "warn")):
            for name, limits in self.measures.items():
                if not values[name] <= limits[place]:  # a NaN is above every limit
                    return cast(Verdict, verdict), f"{name} {values[name]:.1e} above {limits[place]:.0e}"
        return "pass", ""

    def at_depth(self, layers: int) -> Limits:
        """The row for a model of so many layers."""
        times = max(1.0, (layers / USUAL_LAYERS) ** GROWTH)
        powers = {"max": times, "mean": times, "k3": times**2}
        scaled = {name: (low * powers[name], high * powers[name]) for name, (low, high) in self.measures.items()}
        return self if times == 1 else replace(self, row=f"{self.row}, {layers} layers", measures=scaled)


USUAL_LAYERS, GROWTH = 24, 0.55
"""Layers up to which the table holds, and the power of the number of layers with which gaps grow beyond."""

FLOAT32_CPU = Limits("float32 on CPU", {"max": (1e-5, 1e-4)})
FLOAT32_GPU = Limits("float32 on GPU", {"max": (1e-4, 1e-3)})
MIXED = Limits("16 bits on CPU or mixed types", {"mean": (1e-2, 5e-2), "k3": (1e-4, 1e-3)})
HALF_GPU = Limits("16 bits on GPU", {"mean": (2e-2, 5e-2), "k3": (1e-3, 1e-2)})
FLIPPED = 0.05
"""Share of tokens whose routing may differ; measured: k3 of the others is below 1e-4, with wrong experts above 1e-2."""
QUANTISED = Limits("quantised", {"k3": (math.inf, 0.1)})


def limits_for(
    trainer: str,
    engine: str,
    device: str,
    *,
    tf32: bool | None = None,
    quantised: bool = False,
    experts: bool = False,
    layers: int = 1,
) -> Limits:
    """The row that applies.

    Args:
        trainer: torch dtype name of the policy's products.
        engine: dtype of the engine; other names than those of torch floats count as quantised.
        device: type of the trainer's device, "cpu" or an accelerator.
        tf32: whether float32 products use TF32; None takes torch's settings.
        quantised: whether either side has quantised weights.
        experts: whether the policy is a mixture of experts.
        layers: of the policy.
    """
    row = _row(trainer, engine, device, tf32, quantised)
    if row is QUANTISED:
        return row
    row = row.at_depth(layers)
    return replace(row, row=f"{row.row}, experts", left_out=FLIPPED) if experts and "k3" in row.measures else row


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
