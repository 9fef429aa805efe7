"""The clipped surrogate as an objective: what grpo, bnpo, dr_grpo, dapo, gspo and luspo share.

They differ in their normaliser and in the level of their ratio only.
"""

from __future__ import annotations

from swift.rl.importance import clipped_surrogate
from swift.rl.losses.base import LossConfig, Objective, TokenInputs


def surrogate(inputs: TokenInputs, config: LossConfig) -> Objective:
    """The clipped surrogate, and the shares of tokens whose gradient the clip cuts off.

    `clip_ratio/low_mean`: A < 0 and r < 1 - epsilon; `high_mean`: A > 0 and r > 1 + epsilon_high;
    `region_mean`: either.
    """
    ratio_T, advantages_T = inputs.ratio_T, inputs.advantages_T
    loss_T = clipped_surrogate(
        ratio_T, advantages_T, epsilon=config.epsilon, epsilon_high=config.clip_high, delta=config.delta
    )
    low_T = (ratio_T < 1 - config.epsilon) & (advantages_T < 0)
    high_T = (ratio_T > 1 + config.clip_high) & (advantages_T > 0)
    observations_T = {
        "clip_ratio/low_mean": low_T,
        "clip_ratio/high_mean": high_T,
        "clip_ratio/region_mean": low_T | high_T,
    }
    return Objective(loss_T, observations_T)
