"""RLOO (arXiv:2402.14740): a reward is compared with the mean of the others of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift.rl.estimators.base import AdvantageEstimator, advantages

if TYPE_CHECKING:
    from torch import Tensor

    from swift.rl.advantages import GroupStatistics


def centre(rewards_S: Tensor, groups: GroupStatistics, parameters: Any) -> Tensor:
    """`rho_i - mean_{j != i} rho_j = n / (n - 1) (rho_i - mean_g)`; 0 for the only scored sample of its group."""
    count_S = groups.count_P[groups.index_S].double()
    return groups.centred(rewards_S) * count_S / (count_S - 1).clamp(min=1)


advantages["rloo"] = AdvantageEstimator(
    "rloo", "arXiv:2402.14740", centre, default_scale="none", kl_in_reward=True, summary="the mean of the others"
)
