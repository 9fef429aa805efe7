"""VESPO (arXiv:2602.10693): REINFORCE weighted by a gamma kernel of the whole sequence's ratio.

`f = -phi A lp`, phi without gradient: `phi = exp(l + a s - l e^s)` is 1 at s = 0 and falls off on both
sides; (a, l) is (2, 3) where A >= 0 and (3, 2) elsewhere. `s` is the summed log-ratio of the sequence, and
the sampler correction enters here (and nowhere else) by its logarithm.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from swift.rl.losses.base import TOKEN_MEAN, Loss, LossConfig, Objective, TokenInputs, losses

if TYPE_CHECKING:
    from torch import Tensor

LOG_FLOOR, LOG_CEILING = math.log(1e-8), 20.0
EXPONENT_POSITIVE, RATE_POSITIVE = 2.0, 3.0
EXPONENT_NEGATIVE, RATE_NEGATIVE = 3.0, 2.0


def gamma_weight(inputs: TokenInputs) -> Tensor:
    """The weight phi at each token, [T], without gradient: one number for a sequence with one advantage."""
    sum_S = inputs.segments.sum(inputs.log_ratio_T.detach().clamp(-20.0, 20.0))
    if inputs.sampler_log_weight_S is not None:
        sum_S = sum_S + inputs.sampler_log_weight_S.to(sum_S.dtype)
    sum_T = inputs.segments.at_tokens(sum_S.clamp(LOG_FLOOR, LOG_CEILING))
    gain_T = inputs.advantages_T >= 0
    exponent_T = sum_T.new_full(sum_T.shape, EXPONENT_NEGATIVE).masked_fill(gain_T, EXPONENT_POSITIVE)
    rate_T = sum_T.new_full(sum_T.shape, RATE_NEGATIVE).masked_fill(gain_T, RATE_POSITIVE)
    return (rate_T + exponent_T * sum_T - rate_T * sum_T.exp()).exp()


def objective(inputs: TokenInputs, config: LossConfig) -> Objective:
    """The weighted log-likelihood; `vespo/phi_mean` near 0 means that the batch is too far off-policy."""
    phi_T = gamma_weight(inputs)
    return Objective(-phi_T * inputs.advantages_T * inputs.policy_logprobs_T, {"vespo/phi_mean": phi_T})


losses["vespo"] = Loss(
    "vespo",
    "arXiv:2602.10693",
    objective,
    TOKEN_MEAN,
    applies_sampler_weight=True,
    settings=(),
    bounds=lambda config: "ratio of whole sequences, weighted by a gamma kernel",
    summary="REINFORCE weighted by a kernel of the sequence ratio",
)
