"""Importance ratios between the current policy and the policy that the batch started from.

T packed tokens, S sequences. The ratio exists at three levels:

    token           r_t = exp(lp_t - lp_o_t)                                   PPO, arXiv:1707.06347
    sequence        r_i = exp(sum_t m (lp - lp_o) / T_i), the same at each token   GSPO, arXiv:2507.18071
    sequence_token  value of `sequence`, gradient of each token alone              GSPO-token, ibid. 4.3

Nothing is clamped before `exp`: a ratio that overflows must be seen, not hidden.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from swift.rl.losses import Level
from swift.rl.segments import segment_mean, spread

LEVELS: tuple[str, ...] = get_args(Level)


def log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor | None, mask_T: Tensor) -> Tensor:
    """`lp - lp_o` of trained tokens and exactly 0 elsewhere, [T], with the gradient of the policy.

    Without old log-probs the batch serves its one update: `lp_o` is the policy itself without gradient,
    so the ratio is 1 in value and still carries the gradient. No second forward is needed.
    """
    old_T = policy_logprobs_T.detach() if old_logprobs_T is None else old_logprobs_T.to(policy_logprobs_T.dtype)
    # where, not a product: whatever stands at a masked position (NaN included) must not reach a sum
    return torch.where(mask_T.bool(), policy_logprobs_T - old_T, torch.zeros_like(policy_logprobs_T))


def importance_ratio(
    log_ratio_T: Tensor,
    *,
    mask_T: Tensor,
    sequence_index_T: Tensor,
    num_sequences: int,
    level: Level = "token",
) -> Tensor:
    """The ratio of the given level at each token, [T], with gradient.

    Args:
        log_ratio_T: from `log_ratio`.
        mask_T: data mask, 0 or 1.
        sequence_index_T: sequence of each token.
        num_sequences: number of sequences S.
        level: see the module.

    Raises:
        ValueError: the level is unknown.
    """
    if level == "token":
        return torch.exp(log_ratio_T)
    if level not in LEVELS:
        raise ValueError(f"importance_sampling_level: {level}: unknown; valid: {', '.join(LEVELS)}")
    log_ratio_S = segment_mean(log_ratio_T, mask_T, sequence_index_T, num_sequences)
    sequence_log_ratio_T = spread(log_ratio_S, sequence_index_T)
    if level == "sequence":
        return torch.exp(sequence_log_ratio_T)
    return torch.exp(log_ratio_T - log_ratio_T.detach() + sequence_log_ratio_T.detach())
