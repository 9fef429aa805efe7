"""The clipped surrogate as an objective: what grpo, bnpo, dr_grpo, dapo, gspo and luspo share.

They differ in their normaliser and in the level of their ratio only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swift.rl.losses.base import CLIP_SETTINGS, Level, Loss, LossConfig, Normaliser, Objective, TokenInputs, losses


def register_surrogate(
    name: str, paper: str, normaliser: Normaliser, *, summary: str, default_level: Level = "token"
) -> None:
    """Register a loss with the clipped surrogate as its objective."""
    losses[name] = Loss(
        name,
        paper,
        surrogate,
        normaliser,
        summary=summary,
        default_level=default_level,
        settings=CLIP_SETTINGS,
        problems=clip_problems,
        bounds=clip_bounds,
    )


def surrogate(inputs: TokenInputs, config: LossConfig) -> Objective:
    """PPO's clipped surrogate as a loss, `-min(c1 A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`, [T].

    `c1` is the ratio, or `min(r, delta)` when `delta` is set: the two-sided clip (arXiv:2505.07291), which
    bounds the loss of a token with A < 0 whose ratio has grown. `epsilon_high` above `epsilon` is DAPO's
    clip-higher (arXiv:2503.14476: .2 and .28).

    Observations are the shares of tokens whose gradient the clip cuts off: `clip_ratio/low_mean`: A < 0 and
    r < 1 - epsilon; `high_mean`: A > 0 and r > 1 + epsilon_high; `region_mean`: either.

    Example: r = 1.5, epsilon = epsilon_high = .2: A = 1 gives -1.2, A = -1 gives 1.5 (1.4 with delta = 1.4).
    """
    ratio_T, advantages_T, high = inputs.ratio_T, inputs.advantages_T, config.clip_high
    clipped_T = ratio_T.clamp(1 - config.epsilon, 1 + high)
    unclipped_T = ratio_T if config.delta is None else ratio_T.clamp(max=config.delta)
    low_T = (ratio_T < 1 - config.epsilon) & (advantages_T < 0)
    high_T = (ratio_T > 1 + high) & (advantages_T > 0)
    observations_T = {
        "clip_ratio/low_mean": low_T,
        "clip_ratio/high_mean": high_T,
        "clip_ratio/region_mean": low_T | high_T,
    }
    return Objective(-(unclipped_T * advantages_T).minimum(clipped_T * advantages_T), observations_T)


def clip_problems(settings: Any) -> Iterator[str]:
    """A two-sided clip lies above the range of the ratio."""
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    if settings.delta is not None and settings.delta <= 1 + high:
        yield f"delta: {settings.delta:g}: must be above 1 + epsilon_high = {1 + high:g}; e.g. {1.2 + high:g}"


def clip_bounds(config: LossConfig) -> str:
    """The range of the ratio."""
    bounds = f"{config.level} ratio, clipped to {1 - config.epsilon:g}..{1 + config.clip_high:g}"
    return bounds if config.delta is None else f"{bounds}, unclipped at most {config.delta:g}"
