"""Kullback-Leibler divergence from the policy to the reference, estimated from the sampled tokens.

Estimators by J. Schulman, "Approximating KL divergence" (2020). T packed tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swift.rl.segments import Segments

LOG_RATIO_LIMIT = 20.0
"""Upper bound of lp_r - lp before `exp`: e^20 is far beyond any divergence a run survives, and finite in fp32."""


def k3(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """The k3 estimate `e^d - d - 1` with `d = min(lp_r - lp, 20)`, [T], never negative.

    Below, `d` has no bound: it would stop the gradient of the tokens that are furthest from the reference.

    Example: lp_r - lp = .1 gives .005171.
    """
    difference_T = torch.clamp(ref_logprobs_T - policy_logprobs_T, max=LOG_RATIO_LIMIT)
    return torch.expm1(difference_T) - difference_T


def sequence_k1(
    sampler_logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    segments: Segments,
) -> Tensor:
    """On-policy k1 estimate of each sequence, `sum_t m (lp_s - lp_r)`, [S], for `kl_in_reward`.

    The reward of sequence i is lowered by beta times this (RLOO, arXiv:2402.14740); the loss then has no KL.
    """
    return segments.sum(sampler_logprobs_T - ref_logprobs_T)
