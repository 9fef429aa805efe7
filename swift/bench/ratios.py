"""Medians, and how sure their ratio is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two medians with its bootstrap 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio_of_medians(above: Sequence[float], below: Sequence[float], *, seed: int = 0) -> Ratio:
    """`median(above) / median(below)` of paired measurements.

    Args:
        above: seconds of each pair's one side.
        below: seconds of the other side, measured right after or before.
        seed: of the resampling. Pairs are drawn together, so that load which hits both cancels.
    """
    a, b = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    if a.shape != b.shape or not a.size:
        raise ValueError(f"{a.size} and {b.size} measurements are not pairs")
    draws = np.random.default_rng(seed).integers(0, a.size, size=(RESAMPLES, a.size))
    ratios = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(float(np.median(a) / np.median(b)), float(low), float(high))


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": float(np.median(seconds)), "min": float(min(seconds)), "max": float(max(seconds))}
