"""From rewards to advantages, in float64.

S samples, K reward functions and models, P groups (prompts), G samples of a group. Groups are given by
`group_index_S` (0..P-1 for each sample, in any order), so that groups of different sizes need no padding.

Excluded samples (a fault of a reward function, or a row in which every entry is None) are out of every mean
and standard deviation and get advantage 0; the caller also clears their data mask. A zero-variance group gets
advantages of exactly 0. It is recognised by its spread, never by `std == 0`: six fp32 rewards of 0.3 have a
standard deviation of 3e-8 and would otherwise yield |A| = 3e-4 of pure rounding noise.

An estimator (`swift.rl.estimators`, one file each) centres the rewards; `scale` divides them. The scale `gdpo` is a
method of its own: every reward function is normalised within its group before they are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from swift.rl.estimators import Scale, get_estimator

STD_EPSILON = 1e-4
"""Added to every standard deviation that divides (as TRL does)."""

STD_FLOOR = 1e-8
"""Least standard deviation of a population that divides (as Atropos's example trainer does)."""

SPREAD_TOLERANCE = 1e-6
"""A group is informative if its spread exceeds this, relative to its largest reward (at least 1)."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of S samples in P groups, and statistics for the logs.

    advantages_S: float64, 0 for excluded samples and uninformative groups.
    rewards_S: total reward of each sample (after `kl_penalty_S`), NaN where excluded.
    mean_P, std_P: of each group's total rewards (ddof 1); mean NaN without a scored sample, std 0 below two.
    informative_P: bool, whether the group has a reward spread to learn from.
    """

    advantages_S: Tensor
    rewards_S: Tensor
    mean_P: Tensor
    std_P: Tensor
    informative_P: Tensor


def reward_matrix(values: Sequence[Sequence[float | None]]) -> Tensor:
    """Rewards of S samples by K functions as float64 [S, K], None as NaN."""
    rows = [[float("nan") if value is None else float(value) for value in row] for row in values]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), -1)


def total_rewards(values_SK: Tensor, weights_K: Tensor, excluded_S: Tensor | None = None) -> Tensor:
    """`rho_i = sum_k w_k R_ik` over the entries that are not NaN, float64 [S]; NaN for excluded samples; 0 for K = 0.

    Example: rows (1, None), (0, 2), (None, None) with weights (1, .5) give 1, 1, NaN.
    """
    values_SK, weights_K = values_SK.double(), weights_K.double()
    out_S = values_SK.isnan().all(dim=1) & (values_SK.shape[1] > 0)
    if excluded_S is not None:
        out_S = out_S | excluded_S.bool()
    return (values_SK * weights_K).nansum(dim=1).masked_fill(out_S, float("nan"))


def compute_advantages(
    values_SK: Tensor,
    group_index_S: Tensor,
    *,
    weights_K: Tensor | None = None,
    excluded_S: Tensor | None = None,
    estimator: str = "grpo",
    parameters: Any = None,
    scale: Scale | None = None,
    kl_penalty_S: Tensor | None = None,
) -> Advantages:
    """Advantages of a generation batch (all ranks: batch statistics need every scored sample).

    Args:
        values_SK: rewards of each sample by each function, NaN for None.
        group_index_S: long, the group of each sample, 0..P-1.
        weights_K: weight of each function; None means 1.
        excluded_S: bool, samples hit by a fault.
        estimator: how a reward is centred, by name.
        parameters: of the estimator; None takes its defaults.
        scale: what divides the centred value; None takes the estimator's default.
        kl_penalty_S: `beta * sequence_k1`, subtracted from the total reward (`kl_in_reward`).

    Raises:
        ValueError: unknown estimator or scale, or gdpo together with another estimator or a KL penalty
            (gdpo normalises each function on its own and never forms the sum that these act on).
    """
    chosen = get_estimator(estimator)
    scale = chosen.default_scale if scale is None else scale
    if scale not in get_args(Scale):
        raise ValueError(f"scale_rewards: {scale}: unknown; valid: {', '.join(get_args(Scale))}")
    if scale == "gdpo" and (estimator != "grpo" or kl_penalty_S is not None):
        raise ValueError(
            "scale_rewards: gdpo: needs advantage_estimator grpo and kl_in_reward false; "
            "it normalises each reward function on its own"
        )
    if parameters is None and chosen.parameters is not None:
        parameters = chosen.parameters()
    if weights_K is None:
        weights_K = torch.ones(values_SK.shape[1], dtype=torch.float64, device=values_SK.device)
    rewards_S = total_rewards(values_SK, weights_K, excluded_S)
    if kl_penalty_S is not None:
        rewards_S = rewards_S - kl_penalty_S.double()

    groups = GroupStatistics.of(rewards_S, group_index_S)
    informative_P = groups.informative_P
    if scale == "gdpo":
        scored_SK = values_SK.double().masked_fill(rewards_S.isnan().unsqueeze(1), float("nan"))
        advantages_S, informative_P = _gdpo(scored_SK, weights_K.double(), group_index_S)
        informative_P = informative_P & (groups.count_P >= 2)
    else:
        advantages_S = centred_S = chosen.centre(rewards_S, groups, parameters)
        if scale == "group":
            advantages_S = centred_S / (groups.std_P[group_index_S] + STD_EPSILON)
        elif scale == "population":
            ddof_0_P = groups.std_P * ((groups.count_P - 1).clamp(min=0) / groups.count_P.clamp(min=1)).sqrt()
            advantages_S = centred_S / ddof_0_P[group_index_S].clamp(min=STD_FLOOR)
        elif scale == "batch":
            advantages_S = centred_S / (_batch_std(centred_S if chosen.scales_centred else rewards_S) + STD_EPSILON)
    informative_S = informative_P[group_index_S] & ~rewards_S.isnan()
    return Advantages(
        advantages_S=torch.where(informative_S, advantages_S, 0.0),
        rewards_S=rewards_S,
        mean_P=groups.mean_P,
        std_P=groups.std_P,
        informative_P=informative_P,
    )


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of P groups over scored samples; `index_S` maps samples to groups.

    count_P: scored samples, long. mean_P: NaN without any. std_P: ddof 1, 0 below two. lowest_P, highest_P: 0 without
    any. informative_P: bool, whether they differ by more than rounding.
    """

    index_S: Tensor
    count_P: Tensor
    mean_P: Tensor
    std_P: Tensor
    lowest_P: Tensor
    highest_P: Tensor
    informative_P: Tensor

    @classmethod
    def of(cls, values_S: Tensor, index_S: Tensor) -> GroupStatistics:
        """Of values that are NaN where a sample is not scored."""
        num_groups = int(index_S.max()) + 1 if index_S.numel() else 0
        scored_S = ~values_S.isnan()
        index, values = index_S[scored_S], values_S[scored_S]
        zeros_P = values.new_zeros(num_groups)
        count_P = zeros_P.index_add(0, index, torch.ones_like(values))
        mean_P = zeros_P.index_add(0, index, values) / count_P
        squares_P = zeros_P.index_add(0, index, (values - mean_P[index]) ** 2)
        std_P = torch.where(count_P >= 2, (squares_P / (count_P - 1).clamp(min=1)).sqrt(), 0.0)
        highest_P = zeros_P.scatter_reduce(0, index, values, "amax", include_self=False)
        lowest_P = zeros_P.scatter_reduce(0, index, values, "amin", include_self=False)
        largest_P = torch.maximum(highest_P.abs(), lowest_P.abs())
        informative_P = (count_P >= 2) & (highest_P - lowest_P > SPREAD_TOLERANCE * largest_P.clamp(min=1.0))
        return cls(index_S, count_P.long(), mean_P, std_P, lowest_P, highest_P, informative_P)

    def centred(self, values_S: Tensor) -> Tensor:
        """Values less the mean of their group."""
        return values_S - self.mean_P[self.index_S]


def _gdpo(values_SK: Tensor, weights_K: Tensor, index_S: Tensor) -> tuple[Tensor, Tensor]:
    """Each function normalised within its group, summed, then normalised over the batch (arXiv:2601.05242).

    Returns advantages [S] and whether some function with a weight is informative in the group, [P].
    """
    columns = [(values_S, GroupStatistics.of(values_S, index_S)) for values_S in values_SK.unbind(dim=1)]
    normalised = [groups.centred(values_S) / (groups.std_P[index_S] + STD_EPSILON) for values_S, groups in columns]
    sum_S = (torch.stack(normalised, dim=1).nan_to_num(nan=0.0) * weights_K).sum(dim=1)
    informative_KP = torch.stack([groups.informative_P for _, groups in columns])
    informative_P = (informative_KP & (weights_K != 0).unsqueeze(1)).any(dim=0)
    sum_S = sum_S.masked_fill(values_SK.isnan().all(dim=1), float("nan"))
    return (sum_S - sum_S.nanmean()) / (_batch_std(sum_S) + STD_EPSILON), informative_P


def _batch_std(values_S: Tensor) -> Tensor:
    """Standard deviation (ddof 1) of the entries that are not NaN; 0 below two."""
    scored = values_S[~values_S.isnan()]
    return scored.std() if scored.numel() >= 2 else values_S.new_zeros(())
