"""Medians and means, and how sure their ratio is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two medians or means with its bootstrap 95 % interval."""

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
    return _ratio(np.median, above, below, seed)


def ratio_of_means(above: Sequence[float], below: Sequence[float], *, seed: int = 0) -> Ratio:
    """The same of means: what a run of many steps takes, where steps are of several kinds."""
    return _ratio(np.mean, above, below, seed)


def _ratio(middle: Callable[..., Any], above: Sequence[float], below: Sequence[float], seed: int) -> Ratio:
    a, b = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    if a.shape != b.shape or not a.size:
        raise ValueError(f"{a.size} and {b.size} measurements are not pairs")
    draws = np.random.default_rng(seed).integers(0, a.size, size=(RESAMPLES, a.size))
    ratios = middle(a[draws], axis=1) / middle(b[draws], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(float(middle(a) / middle(b)), float(low), float(high))


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": float(np.median(seconds)), "min": float(min(seconds)), "max": float(max(seconds))}
