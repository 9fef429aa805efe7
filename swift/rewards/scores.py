"""From the values of single functions to what the trainer uses: totals, exclusions and statistics. Pure."""

from __future__ import annotations

import statistics as stats
from collections.abc import Sequence

from swift.types import GroupScores

NO_REWARD = "no_reward"


def total(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The sum of w_k r_k over the functions k that apply; None when none does.

    >>> total([1.0, None, 0.5], [1.0, 1.0, 2.0])
    2.0
    """
    applicable = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(value * weight for value, weight in applicable) if applicable else None


def exclude_without_reward(scores: GroupScores) -> GroupScores:
    """Marks the samples to which no function applied; other exclusions keep their reason."""
    for index, row in enumerate(scores.values):
        if row and scores.excluded[index] is None and all(value is None for value in row):
            scores.excluded[index] = NO_REWARD
    return scores


def statistics(names: Sequence[str], scores: Sequence[GroupScores]) -> dict[str, float]:
    """`rewards/<name>/{mean,std}` over all samples with a value; std with n - 1, 0 for one sample.

    A function that applied to no sample has no entry.
    """
    result: dict[str, float] = {}
    for column, name in enumerate(names):
        values = [value for group in scores for row in group.values if (value := row[column]) is not None]
        if values:
            result[f"rewards/{name}/mean"] = stats.fmean(values)
            result[f"rewards/{name}/std"] = stats.stdev(values) if len(values) > 1 else 0.0
    return result
