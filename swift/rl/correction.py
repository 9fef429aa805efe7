"""Correction for the mismatch between the engine that samples and the trainer.

`eta_t = clip(lp_o - lp_s, +-20)` compares the trainer's log-prob of a token with the sampler's; `w` weighs
the token (truncated or masked importance sampling, Yao et al. 2025) and has no gradient. T packed tokens,
S sequences. Modes, with C = threshold and C0 = lower:

    token_truncate     clip(e^eta, C0, C)
    token_mask         e^eta where C0 <= e^eta <= C, else 0
    sequence_truncate  clip(q, C0, C)
    sequence_mask      u where C0 <= q <= C, else 0;  u = q for `sum`, e^eta for `mean`

with q = exp(sum eta) (`sum`) or exp(sum eta / T_i) (`mean`). Masked means 0: no floor acts afterwards.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from swift.rl.objective import SamplerCorrection
from swift.rl.segments import Segments, largest, smallest

CorrectionMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
SequenceRatio = Literal["mean", "sum"]

LOG_LIMIT = 20.0
LOG_FLOOR = math.log(1e-8)
"""Bounds of a logged weight where it enters a sum of logarithms (vespo); log 0 of a masked token included."""


@torch.no_grad()
def sampler_mismatch(old_logprobs_T: Tensor, sampler_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Log-ratio eta of the trainer's old policy to the sampler at each token, [T], clipped to +-20.

    0 where the mask is 0 or the sampler has no finite log-prob.
    """
    known_T = mask_T.bool() & sampler_logprobs_T.isfinite()
    difference_T = (old_logprobs_T - sampler_logprobs_T).clamp(-LOG_LIMIT, LOG_LIMIT)
    return torch.where(known_T, difference_T, 0.0)


@torch.no_grad()
def sampler_correction(
    eta_T: Tensor,
    segments: Segments,
    *,
    mode: CorrectionMode,
    threshold: float = 2.0,
    lower: float = 0.0,
    sequence_ratio: SequenceRatio = "mean",
) -> SamplerCorrection:
    """The weight of each token and its logarithm over each sequence; see the module for the modes.

    The logarithm of a sequence is that of its one weight where all its tokens share it, else the sum of its
    trained tokens' logarithms, each clipped to [log 1e-8, 20].
    """
    if mode == "none":
        return SamplerCorrection(torch.ones_like(eta_T), eta_T.new_zeros(segments.num))
    ratio_T = torch.exp(eta_T)
    ratio_S = sequence_mismatch(eta_T, segments, sequence_ratio)
    bounded = ratio_S if mode.startswith("sequence") else ratio_T
    kept = (bounded >= lower) & (bounded <= threshold)
    if mode == "sequence_truncate" or (mode == "sequence_mask" and sequence_ratio == "sum"):
        weights_S = ratio_S.clamp(lower, threshold) if mode == "sequence_truncate" else ratio_S * kept
        return SamplerCorrection(segments.at_tokens(weights_S), weights_S.log().clamp(LOG_FLOOR, LOG_LIMIT))
    if mode == "token_truncate":
        weights_T = ratio_T.clamp(lower, threshold)
    else:
        weights_T = ratio_T * (kept if mode == "token_mask" else segments.at_tokens(kept))
    return SamplerCorrection(weights_T, segments.sum(weights_T.log().clamp(LOG_FLOOR, LOG_LIMIT)))


@torch.no_grad()
def sequence_mismatch(eta_T: Tensor, segments: Segments, sequence_ratio: SequenceRatio) -> Tensor:
    """Ratio q of each sequence, [S]: `exp` of the sum or of the mean of its log-ratios."""
    return torch.exp(segments.sum(eta_T) if sequence_ratio == "sum" else segments.mean(eta_T))


@torch.no_grad()
def off_policy_sequence_mask(
    advantages_T: Tensor,
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    segments: Segments,
    *,
    delta: float,
) -> Tensor:
    """OPSM (arXiv:2512.02556): 0 for tokens with A < 0 in a sequence that drifted, 1 elsewhere, [T].

    A sequence drifted when the mean of `lp_s - lp` over its trained tokens exceeds `delta`; tokens without a
    sampler log-prob (NaN) count as no drift. A forward mask: it never changes a normaliser.
    """
    drift_T = torch.where(sampler_logprobs_T.isfinite(), sampler_logprobs_T - policy_logprobs_T, 0.0)
    return ((advantages_T >= 0) | segments.at_tokens(segments.mean(drift_T) <= delta)).to(policy_logprobs_T.dtype)


@torch.no_grad()
def mismatch_statistics(
    old_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    mask_T: Tensor,
    *,
    threshold: float,
    lower: float = 0.0,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What to log in every mode, from unclamped ratios of trained tokens.

    Returns:
        Sums `{name: [2] (sum, count)}` and extremes `{name: scalar}`, to be reduced as those of `LossOutput`
        (`.../min` by minimum); extremes are infinite without a trained token. Nothing waits for the device.
    """
    counted_T = mask_T.bool() & sampler_logprobs_T.isfinite()
    eta_T = torch.where(counted_T, old_logprobs_T - sampler_logprobs_T, 0).double()
    ratio_T = torch.exp(eta_T)
    columns_T = {
        "mismatch/kl": -eta_T,
        "mismatch/ratio_mean": ratio_T,
        "mismatch/ratio_squared": ratio_T**2,
        "mismatch/clipped_frac": ((ratio_T < lower) | (ratio_T > threshold)).double(),
        "mismatch/k3": ratio_T - eta_T - 1,
        "mismatch/logp_abs_diff_mean": eta_T.abs(),
    }
    count = counted_T.sum().double()
    means = {
        name: torch.stack([torch.where(counted_T, values_T, 0).sum(), count]) for name, values_T in columns_T.items()
    }
    return means, {
        "mismatch/ratio_min": smallest(ratio_T, counted_T),
        "mismatch/ratio_max": largest(ratio_T, counted_T),
        "mismatch/logp_abs_diff_max": largest(eta_T.abs(), counted_T),
    }


def effective_sample_size(total: float, count: float, squares: float) -> float:
    """`(sum w)^2 / (n sum w^2)`; 1 on-policy, 0 without tokens."""
    return total**2 / (count * squares) if count and squares else 0.0
