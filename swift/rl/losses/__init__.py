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
from swift.rl.losses.cispo import CISPO
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


__all__ = [
    "LOSSES",
    "Loss",
    "LossConfig",
    "Normaliser",
    "Objective",
    "TokenInputs",
    "get_loss",
    "sequence_weights",
    "token_weights",
]
