"""Kullback-Leibler divergence from the policy to a reference or teacher, estimated from the sampled tokens.

Estimators by J. Schulman, "Approximating KL divergence" (2020). T packed tokens, S sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swift.rl.segments import Segments

LOG_RATIO_LIMIT = 20.0
"""Largest lp_r - lp that enters `exp`; beyond it k3 is its tangent, finite in fp32 and with the right gradient."""


def k3(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """The k3 estimate `e^d - d - 1` with `d = lp_r - lp`, [T], never negative; above d = 20 its tangent there.

    The gradient `1 - e^d` is therefore never 0 for a token that is far from the reference, on either side.

    Example: lp_r - lp = .1 gives .005171.
    """
    difference_T = ref_logprobs_T - policy_logprobs_T
    bounded_T = difference_T.clamp(max=LOG_RATIO_LIMIT)
    # relu, not a difference of two large terms: below the limit, value and gradient are those of the formula alone
    return torch.expm1(bounded_T) - bounded_T + math.expm1(LOG_RATIO_LIMIT) * (difference_T - LOG_RATIO_LIMIT).relu()


def bias_corrected_k3(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """k3 times the token ratio `r = exp(lp - lp_o)` (arXiv:2512.02556), [T], with the gradient `-d r`.

    `r (e^d - d - 1) = exp(lp_r - lp_o) - r (d + 1)`, whose first term is constant. So the gradient is exact for every
    d, also where the value is that of the tangent.
    """
    difference_T, ratio_T = (ref_logprobs_T - policy_logprobs_T).detach(), log_ratio_T.detach().exp()
    value_T = ratio_T * k3(policy_logprobs_T.detach(), ref_logprobs_T)
    return value_T - difference_T * ratio_T * (policy_logprobs_T - policy_logprobs_T.detach())


def sequence_k1(
    sampler_logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    segments: Segments,
) -> Tensor:
    """On-policy k1 estimate of each sequence, `sum_t m (lp_s - lp_r)`, [S], for `kl_in_reward`.

    The reward of sequence i is lowered by beta times this (RLOO, arXiv:2402.14740); the loss then has no KL.
    """
    return segments.sum(sampler_logprobs_T - ref_logprobs_T)


def teacher_advantages(
    advantages_T: Tensor, teacher_logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor, *, coefficient: float
) -> Tensor:
    """`A_t + c (lp_teacher - lp_old)` of trained tokens, [T]: on-policy distillation, without gradient.

    The policy gradient of the second part is that of `-c` times the reverse KL of each token's distribution from the
    teacher's, estimated by the token that was sampled (arXiv:2306.13649 with all answers of the student, D = reverse
    KL). A token is not credited for the KL of later ones.

    Example: A = .5, lp_teacher - lp_old = -.2 and c = 2 give .1.
    """
    gap_T = torch.where(mask_T, teacher_logprobs_T - old_logprobs_T, 0.0)
    return advantages_T + coefficient * gap_T
