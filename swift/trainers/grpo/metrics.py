"""Sums and extremes of one optimizer step, gathered pass by pass and merged over ranks once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from swift.observability.metrics import extreme, kind_of


@dataclass(slots=True)
class StepMetrics:
    """Sums and extremes of one optimizer step on one rank; merged over ranks once, by rank 0."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a mean."""
        old_total, old_count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + total, old_count + count)

    def add_extreme(self, name: str, value: float) -> None:
        """Widen a maximum or a minimum; its name says which (`kind_of`). A NaN stays."""
        choose = min if kind_of(name) == "min" else max
        self.extremes[name] = extreme(choose, value, self.extremes.get(name, value))

    def add_pairs(self, pairs: dict[str, Tensor]) -> None:
        """Add to means; a value is (sum, count). All come from their device at once."""
        if pairs:
            values = torch.stack([pair.double() for pair in pairs.values()]).tolist()
            for name, (total, count) in zip(pairs, values, strict=True):
                self.add(name, total, count)

    def merge(self, other: StepMetrics) -> None:
        """Add another rank's sums."""
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, value in other.extremes.items():
            self.add_extreme(name, value)

    def values(self) -> dict[str, float]:
        """Means and extremes."""
        means = {name: total / count for name, (total, count) in self.sums.items() if count}
        return {**means, **self.extremes}
