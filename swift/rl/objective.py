"""The policy loss of one micro-batch: ratio, objective, correction, masks and KL, in this order.

    loss_t = m * weight * [ w * o * h * f + beta * KL ]

m        data mask (inside `token_weights_T`, with the normaliser of the global batch)
w        sampler correction, without gradient (`SamplerCorrection`); 1 without
o, h     forward masks (off-policy sequence mask, top-entropy mask) as one `keep_T`; they mask the policy term
         and never change a normaliser
KL       neither corrected by w nor masked by o, h; shares the normaliser of the policy term

The sum over all micro-batches of a global batch is its loss, for every cut into micro-batches. A trainer whose
gradients are averaged over W ranks back-propagates W times this value and divides by nothing.

T packed tokens, S sequences of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swift.rl.kl import bias_corrected_k3, k3
from swift.rl.losses import Level, LossConfig, TokenInputs, get_loss
from swift.rl.segments import Segments, largest, smallest


@dataclass(frozen=True, slots=True)
class SamplerCorrection:
    """Weight of each token for the mismatch between sampler and trainer; no gradient.

    weights_T: multiplies the objective.
    log_weight_S: the logarithm for a whole sequence, for losses that apply it themselves (vespo).
    """

    weights_T: Tensor
    log_weight_S: Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The micro-batch's share of the loss of its global batch, and metrics that are reduced once.

    loss: scalar with gradient.
    means: name -> [2] float64 tensor (sum, count) over trained tokens: `ratio/mean` (of the configured level), `kl`,
        `entropy`, and those of the objective. Add them up over micro-batches and ranks, then divide.
    extremes: name -> float64 scalar; take the maximum over micro-batches and ranks, of `.../low_min` the minimum.
    policy_loss: the loss without the KL, no gradient.
    """

    loss: Tensor
    means: dict[str, Tensor]
    extremes: dict[str, Tensor]
    policy_loss: Tensor


def policy_loss(
    policy_logprobs_T: Tensor,
    *,
    config: LossConfig,
    advantages_T: Tensor,
    segments: Segments,
    token_weights_T: Tensor,
    old_logprobs_T: Tensor | None = None,
    ref_logprobs_T: Tensor | None = None,
    sampler_logprobs_T: Tensor | None = None,
    correction: SamplerCorrection | None = None,
    keep_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> LossOutput:
    """The share of one micro-batch in the loss of its global batch.

    Args:
        policy_logprobs_T: log-probs under the current policy, with gradient; their dtype is that of the loss.
        config: the settings.
        advantages_T: advantage at each token.
        segments: the sequences of the tokens, and the data mask.
        token_weights_T: weight of its sequence (`sequence_weights`) at each token, 0 where the mask is 0.
        old_logprobs_T: policy at the start of the batch; None when this is its only update.
        ref_logprobs_T: reference policy; needed when `config.beta` > 0.
        sampler_logprobs_T: the policy that sampled, NaN where unknown; read when `config.rollout_kl_coef` > 0.
        correction: sampler correction, or None.
        keep_T: product of the forward masks o and h, or None.
        entropy_T: entropy at each token, only observed, or None.

    Raises:
        ValueError: beta > 0 without reference log-probs, or a setting that the loss refuses.
    """
    loss = get_loss(config.loss_type)
    dtype, mask_T = policy_logprobs_T.dtype, segments.mask_T
    log_ratio_T = log_ratio(policy_logprobs_T, old_logprobs_T, mask_T)
    ratio_T = importance_ratio(log_ratio_T, segments, config.level)
    inputs = TokenInputs(
        policy_logprobs_T=policy_logprobs_T,
        log_ratio_T=log_ratio_T,
        ratio_T=ratio_T,
        advantages_T=advantages_T.to(dtype),
        segments=segments,
        sampler_log_weight_S=None if correction is None else correction.log_weight_S.detach(),
    )
    objective = loss.objective(inputs, config)

    token_loss_T = objective.loss_T
    if correction is not None and not loss.applies_sampler_weight:
        token_loss_T = token_loss_T * correction.weights_T.detach().to(dtype)
    if keep_T is not None:
        token_loss_T = token_loss_T * keep_T.to(dtype)
    weights_T = token_weights_T.to(dtype)
    policy_loss = (weights_T * token_loss_T).detach().sum()
    observations_T = {"ratio/mean": ratio_T, **objective.observations_T}
    if config.beta > 0:
        observations_T["kl"] = kl_T = _kl(inputs, ref_logprobs_T, config)
        token_loss_T = token_loss_T + config.beta * kl_T
    if config.rollout_kl_coef > 0 and sampler_logprobs_T is not None:
        known_T = mask_T & sampler_logprobs_T.isfinite()
        sampler_T = torch.where(known_T, sampler_logprobs_T.to(dtype), policy_logprobs_T.detach())
        observations_T["rollout_kl"] = kl_T = k3(policy_logprobs_T, sampler_T)
        token_loss_T = token_loss_T + config.rollout_kl_coef * kl_T
    if entropy_T is not None:
        observations_T["entropy"] = entropy_T
    means, extremes = _metrics(observations_T, ratio_T, segments)
    return LossOutput((weights_T * token_loss_T).sum(), means, extremes, policy_loss)


def log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor | None, mask_T: Tensor) -> Tensor:
    """`lp - lp_o` of trained tokens and exactly 0 elsewhere, [T], with the gradient of the policy.

    Without old log-probs the batch serves its one update: `lp_o` is the policy itself without gradient,
    so the ratio is 1 in value and still carries the gradient. No second forward is needed.
    """
    old_T = policy_logprobs_T.detach() if old_logprobs_T is None else old_logprobs_T.to(policy_logprobs_T.dtype)
    # where, not a product: values at masked positions (NaN included) must not enter a sum
    return torch.where(mask_T, policy_logprobs_T - old_T, 0.0)


def importance_ratio(log_ratio_T: Tensor, segments: Segments, level: Level) -> Tensor:
    """The ratio of the given level at each token, [T], with gradient.

        token           r_t = exp(lp_t - lp_o_t)                                       PPO, arXiv:1707.06347
        sequence        r_i = exp(sum_t m (lp - lp_o) / T_i), the same at each token   GSPO, arXiv:2507.18071
        sequence_token  value of `sequence`, gradient of each token alone              GSPO-token, ibid. 4.3

    Nothing is clamped before `exp`: a ratio that overflows must be visible.
    """
    if level == "token":
        return torch.exp(log_ratio_T)
    sequence_log_ratio_T = segments.at_tokens(segments.mean(log_ratio_T))
    if level == "sequence":
        return torch.exp(sequence_log_ratio_T)
    return torch.exp(log_ratio_T - log_ratio_T.detach() + sequence_log_ratio_T.detach())


def _kl(inputs: TokenInputs, ref_logprobs_T: Tensor | None, config: LossConfig) -> Tensor:
    """k3 at each token; bias-corrected, times the unclipped token ratio."""
    if ref_logprobs_T is None:
        raise ValueError(f"beta: {config.beta}: the KL term needs the log-probs of the reference")
    ref_T = ref_logprobs_T.detach().to(inputs.policy_logprobs_T.dtype)
    # masked positions contribute nothing, whatever their values
    ref_T = torch.where(inputs.segments.mask_T, ref_T, inputs.policy_logprobs_T.detach())
    if config.kl_bias_correction:
        return bias_corrected_k3(inputs.policy_logprobs_T, ref_T, inputs.log_ratio_T)
    return k3(inputs.policy_logprobs_T, ref_T)


@torch.no_grad()
def _metrics(
    observations_T: dict[str, Tensor], ratio_T: Tensor, segments: Segments
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`means` and `extremes` of a `LossOutput`.

    Extremes are the largest ratio of a trained token, 0 without one; and of a sequence, the smallest share of tokens
    clipped below and the largest clipped above, infinite without one. Nothing waits for the device.
    """
    mask_T, means = segments.mask_T, {}
    for name, values_T in observations_T.items():
        means[name] = torch.stack([torch.where(mask_T, values_T, 0).double().sum(), mask_T.sum().double()])
    extremes = {"ratio/max": torch.zeros((), dtype=torch.float64, device=ratio_T.device)}
    if ratio_T.numel():
        extremes["ratio/max"] = torch.where(mask_T, ratio_T, 0).amax().double()
    trained_S = segments.sum(torch.ones_like(segments.index_T)) > 0
    for name, mean, extreme in (("low_min", "low_mean", smallest), ("high_max", "high_mean", largest)):
        clipped_T = observations_T.get(f"clip_ratio/{mean}")
        if clipped_T is not None:
            extremes[f"clip_ratio/{name}"] = extreme(segments.mean(clipped_T.double()), trained_S)
    return means, extremes
