"""SAPO (arXiv:2511.20347): a smooth gate in place of the clip.

`f = -(4 / k) sigmoid(k (r - 1)) A` with k = `tau_pos` where A > 0 and `tau_neg` elsewhere; at r = 1 its slope
is that of the unclipped surrogate, and it falls off smoothly on both sides.
"""

from __future__ import annotations

import torch

from swift.rl.losses.base import SEQUENCE_MEAN, Loss, LossConfig, Objective, TokenInputs


def objective(inputs: TokenInputs, config: LossConfig) -> Objective:
    """The gated surrogate; nothing is clipped, so there is no clip ratio to observe."""
    positive_T = inputs.advantages_T > 0
    temperature_T = torch.full_like(inputs.ratio_T, config.tau_neg).masked_fill(positive_T, config.tau_pos)
    gate_T = torch.sigmoid(temperature_T * (inputs.ratio_T - 1)) * 4 / temperature_T
    return Objective(-gate_T * inputs.advantages_T)


SAPO = Loss("sapo", "arXiv:2511.20347", objective, SEQUENCE_MEAN)
