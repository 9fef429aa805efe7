"""How far sampler and trainer may be apart, by what rounding explains.

| trainer / engine            | passes                    | refused                   |
|-----------------------------|---------------------------|---------------------------|
| float32, CPU                | max 1e-5                  | max > 1e-4                |
| float32, GPU without TF32   | max 1e-4                  | max > 1e-3                |
| 16 bits on CPU, mixed types | mean 1e-2 and k3 1e-4     | mean > 5e-2 or k3 > 1e-3  |
| 16 bits on GPU, TF32        | mean 2e-2 and k3 1e-3     | mean > 5e-2 or k3 > 1e-2  |
| quantised                   | reported                  | k3 > 0.1                  |

Gaps are in nats per token. k3 is the mean of exp(d) - 1 - d with d = trainer - sampler, an estimate of KL(sampler,
trainer) that is never negative (http://joschu.net/blog/kl-approx.html). What lies between is a warning. TF32 keeps 10
of the 23 bits of a float32, which is why it counts as 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from swift.rollout.parity.gaps import Gaps

Verdict = Literal["pass", "warn", "refuse"]
FULL, HALF = ("float32", "float64"), ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Limits:
    """One row of the table; None is not judged. `row` names it."""

    row: str
    pass_max: float | None = None
    refuse_max: float | None = None
    pass_mean: float | None = None
    refuse_mean: float | None = None
    pass_k3: float | None = None
    refuse_k3: float | None = None

    def judge(self, gaps: Gaps) -> Verdict:
        """The verdict on a stage."""
        if next(self._above(gaps, self._refuse()), None) is not None:
            return "refuse"
        return "warn" if next(self._above(gaps, self._pass()), None) is not None else "pass"

    def exceeded(self, gaps: Gaps) -> str:
        """The first measure over its limit, in words: "max 2.3e+00 above 1e-04"."""
        found = next(self._above(gaps, self._refuse()), None) or next(self._above(gaps, self._pass()), None)
        return "" if found is None else f"{found[0]} {found[1]:.1e} above {found[2]:.0e}"

    def _above(self, gaps: Gaps, limits: tuple[float | None, ...]) -> Iterator[tuple[str, float, float]]:
        measures = (("max", gaps.maximum), ("mean", gaps.mean), ("k3", gaps.k3))
        for (name, value), limit in zip(measures, limits, strict=True):
            if limit is not None and not value <= limit:  # a NaN is above every limit
                yield name, value, limit

    def _refuse(self) -> tuple[float | None, ...]:
        return self.refuse_max, self.refuse_mean, self.refuse_k3

    def _pass(self) -> tuple[float | None, ...]:
        return self.pass_max, self.pass_mean, self.pass_k3


FLOAT32_CPU = Limits("float32 on CPU", pass_max=1e-5, refuse_max=1e-4)
FLOAT32_GPU = Limits("float32 on GPU", pass_max=1e-4, refuse_max=1e-3)
MIXED = Limits("16 bits on CPU or mixed types", pass_mean=1e-2, refuse_mean=5e-2, pass_k3=1e-4, refuse_k3=1e-3)
HALF_GPU = Limits("16 bits on GPU", pass_mean=2e-2, refuse_mean=5e-2, pass_k3=1e-3, refuse_k3=1e-2)
QUANTISED = Limits("quantised", pass_k3=math.inf, refuse_k3=0.1)


def limits_for(trainer: str, engine: str, device: str, *, tf32: bool | None = None, quantised: bool = False) -> Limits:
    """The row that applies.

    Args:
        trainer: torch dtype name of the policy's weights.
        engine: the type that the engine says it computes in; one that is no torch float counts as quantised.
        device: type of the trainer's device, "cpu" or an accelerator.
        tf32: whether float32 products are rounded to TF32 there; None looks at torch's settings.
        quantised: either side holds quantised weights.
    """
    if quantised or trainer not in FULL + HALF or engine not in FULL + HALF:
        return QUANTISED
    if trainer in FULL and engine in FULL:
        if device == "cpu":
            return FLOAT32_CPU
        return HALF_GPU if (uses_tf32() if tf32 is None else tf32) else FLOAT32_GPU
    if device == "cpu" or (trainer in FULL) != (engine in FULL):
        return MIXED
    return HALF_GPU


def uses_tf32() -> bool:
    """Whether torch multiplies float32 matrices in TF32 on GPUs in this process."""
    return torch.get_float32_matmul_precision() != "highest"
