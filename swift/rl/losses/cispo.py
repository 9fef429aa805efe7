"""CISPO (arXiv:2506.13585): every token keeps its gradient; only its weight, the ratio, is capped.

`f = -sg(min(r, cap)) A lp`. The cap is `epsilon_high` itself, not 1 + epsilon_high (5.0 in
arXiv:2510.13786), so it has no sensible default and must be given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swift.rl.losses.base import TOKEN_MEAN, Loss, LossConfig, Objective, TokenInputs, losses


def problems(settings: Any) -> Iterator[str]:
    """The cap is missing, or below 1, where it would shrink on-policy tokens."""
    cap = settings.epsilon_high
    if cap is None or cap < 1:
        given = "none" if cap is None else f"{cap:g}"
        yield (
            f"epsilon_high: {given}: cispo needs it as the cap on the ratio itself, not 1 + epsilon, at least 1; "
            "e.g. 5.0"
        )


def objective(inputs: TokenInputs, config: LossConfig) -> Objective:
    """REINFORCE with a capped weight; `clip_ratio/high_mean` is the share of tokens at the cap."""
    cap = config.clip_high
    weight_T = inputs.ratio_T.clamp(max=cap).detach()
    loss_T = -weight_T * inputs.advantages_T * inputs.policy_logprobs_T
    return Objective(loss_T, {"clip_ratio/high_mean": inputs.ratio_T > cap})


losses["cispo"] = Loss(
    "cispo",
    "arXiv:2506.13585",
    objective,
    TOKEN_MEAN,
    settings=("epsilon_high", "importance_sampling_level"),
    problems=problems,
    bounds=lambda config: f"{config.level} ratio, capped at {config.clip_high:g}",
    summary="REINFORCE with a capped ratio",
)
