"""GRPO (arXiv:2402.03300): a reward is compared with the mean of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift.rl.estimators.base import AdvantageEstimator, advantages

if TYPE_CHECKING:
    from torch import Tensor

    from swift.rl.advantages import GroupStatistics


def centre(rewards_S: Tensor, groups: GroupStatistics, parameters: Any) -> Tensor:
    """`rho_i - mean_g`."""
    return groups.centred(rewards_S)


advantages["grpo"] = AdvantageEstimator("grpo", "arXiv:2402.03300", centre, summary="the mean of the group")
