"""Policy losses, one file each: an objective per token and a normaliser (see `base`).

A new loss is a new file with one `Loss` and one line here.
"""

from swift.rl.losses.base import (
    Loss,
    LossConfig,
    Normaliser,
    Objective,
    TokenInputs,
    sequence_weights,
    token_weights,
)
from swift.rl.losses.bnpo import BNPO
from swift.rl.losses.cispo import CISPO, ratio_cap
from swift.rl.losses.dapo import DAPO
from swift.rl.losses.dr_grpo import DR_GRPO
from swift.rl.losses.grpo import GRPO
from swift.rl.losses.gspo import GSPO
from swift.rl.losses.luspo import LUSPO
from swift.rl.losses.sapo import SAPO
from swift.rl.losses.vespo import VESPO

LOSSES: dict[str, Loss] = {loss.name: loss for loss in (DAPO, GRPO, BNPO, DR_GRPO, GSPO, LUSPO, CISPO, SAPO, VESPO)}


def get_loss(name: str) -> Loss:
    """The loss of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in LOSSES:
        raise ValueError(f"loss_type: {name}: unknown; valid: {', '.join(LOSSES)}")
    return LOSSES[name]


def describe(config: LossConfig) -> str:
    """One line: the loss with its paper, its normaliser, and the bounds of the ratio as they act.

    Example:
        cispo with epsilon_high 5: "cispo (arXiv:2506.13585): sum m f / N; token ratio, capped at 5".
    """
    loss = get_loss(config.loss_type)
    level = config.importance_sampling_level or loss.default_level
    if loss is CISPO:
        bounds = f"{level} ratio, capped at {ratio_cap(config):g}"
    elif loss is SAPO:
        bounds = f"{level} ratio, gated with temperatures {config.tau_pos:g} and {config.tau_neg:g}"
    elif loss is VESPO:
        bounds = "ratio of whole sequences, weighted by a gamma kernel"
    else:
        bounds = f"{level} ratio, clipped to {1 - config.epsilon:g}..{1 + config.clip_high:g}"
        if config.delta is not None:
            bounds += f", unclipped at most {config.delta:g}"
    kl = f"; {config.beta:g} KL" + ", bias-corrected" * config.kl_bias_correction if config.beta > 0 else ""
    return f"{loss.name} ({loss.paper}): {loss.normaliser.formula}; {bounds}{kl}"


__all__ = [
    "LOSSES",
    "Loss",
    "LossConfig",
    "Normaliser",
    "Objective",
    "TokenInputs",
    "describe",
    "get_loss",
    "sequence_weights",
    "token_weights",
]
