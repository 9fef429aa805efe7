"""SAPO (arXiv:2511.20347): a smooth gate in place of the clip.

`f = -(4 / k) sigmoid(k (r - 1)) A` with k = `tau_pos` where A > 0 and `tau_neg` elsewhere; at r = 1 its slope
is that of the unclipped surrogate, and it falls off smoothly on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swift.flags import flag
from swift.rl.losses.base import SEQUENCE_MEAN, Loss, LossConfig, Objective, TokenInputs, losses


@dataclass(kw_only=True)
class SAPOParameters:
    """Temperatures of the gate."""

    GROUP: ClassVar[str] = "Objective"

    tau_pos: float = flag(1.0, above=0, everyday=False)
    """Temperature of the gate where the advantage is positive."""

    tau_neg: float = flag(1.05, above=0, everyday=False)
    """Temperature of the gate elsewhere."""


def objective(inputs: TokenInputs, config: LossConfig) -> Objective:
    """The gated surrogate; nothing is clipped, so there is no clip ratio to observe."""
    gate: SAPOParameters = config.parameters
    positive_T = inputs.advantages_T > 0
    temperature_T = inputs.ratio_T.new_full(inputs.ratio_T.shape, gate.tau_neg).masked_fill(positive_T, gate.tau_pos)
    gate_T = (temperature_T * (inputs.ratio_T - 1)).sigmoid() * 4 / temperature_T
    return Objective(-gate_T * inputs.advantages_T)


def bounds(config: LossConfig) -> str:
    """The gate in words."""
    gate: SAPOParameters = config.parameters
    return f"{config.level} ratio, gated with temperatures {gate.tau_pos:g} and {gate.tau_neg:g}"


losses["sapo"] = Loss(
    "sapo",
    "arXiv:2511.20347",
    objective,
    SEQUENCE_MEAN,
    parameters=SAPOParameters,
    bounds=bounds,
    summary="a smooth gate in place of the clip",
)
