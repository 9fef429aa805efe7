"""CISPO (arXiv:2506.13585): every token keeps its gradient; only its weight, the ratio, is capped.

`f = -sg(min(r, cap)) A lp`. The cap is `epsilon_high` itself, not 1 + epsilon_high (5.0 in
arXiv:2510.13786), so it has no sensible default and must be given.
"""

from __future__ import annotations

import torch

from swift.rl.losses.base import TOKEN_MEAN, Loss, LossConfig, Objective, TokenInputs


def ratio_cap(config: LossConfig) -> float:
    """The cap on the ratio.

    Raises:
        ValueError: `epsilon_high` is missing or below 1, where it would shrink on-policy tokens.
    """
    if config.epsilon_high is None or config.epsilon_high < 1:
        raise ValueError(
            f"epsilon_high: {config.epsilon_high}: loss_type cispo needs the cap on the ratio itself, "
            "not 1 + epsilon; at least 1, for example 5.0"
        )
    return config.epsilon_high


def objective(inputs: TokenInputs, config: LossConfig) -> Objective:
    """REINFORCE with a capped weight; `clip_ratio/high_mean` is the share of tokens at the cap."""
    cap = ratio_cap(config)
    weight_T = torch.clamp(inputs.ratio_T, max=cap).detach()
    loss_T = -weight_T * inputs.advantages_T * inputs.policy_logprobs_T
    return Objective(loss_T, {"clip_ratio/high_mean": inputs.ratio_T > cap})


CISPO = Loss("cispo", "arXiv:2506.13585", objective, TOKEN_MEAN)
