"""FIPO (arXiv:2603.19835): the clipped surrogate, weighted at each token by how the policy has moved after it.

    K_t = sum over k >= t of g^(k - t) m_k (lp_k - lp_o_k),   g = 2^(-1 / fipo_decay_rate)
    w_t = clip(exp(K_t), low, high), without gradient;   f_t = w_t * surrogate_t

k counts the tokens of a completion, masked ones too. A token whose ratio is above `delta` adds nothing to the sum. With
one update per rollout batch lp = lp_o, so w = 1: FIPO is then dapo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from swift.flags import flag
from swift.rl.losses.base import CLIP_SETTINGS, TOKEN_MEAN, Loss, LossConfig, Objective, TokenInputs, losses
from swift.rl.losses.surrogate import clip_bounds, clip_problems, surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from swift.rl.segments import Segments

SAFE_LOW, SAFE_HIGH = 0.8, 1.0
"""Range of the weight of a token with a negative advantage and a ratio above `fipo_safety_threshold`."""


@dataclass(kw_only=True)
class FIPOParameters:
    """The weight of a token."""

    GROUP: ClassVar[str] = "Objective"

    fipo_decay_rate: float = flag(32.0, above=0, everyday=False)
    """Half-life of the discount of later tokens, in tokens."""

    fipo_clip_range: float | None = flag(0.2, at_least=0, everyday=False)
    """Distance of the bounds of the weight from 1; 0 or none for a weight without bounds."""

    fipo_clip_high_only: bool = flag(True, everyday=False)
    """Whether the weight is at least 1."""

    fipo_safety_threshold: float = flag(4.0, above=0, everyday=False)
    """Ratio above which tokens with a negative advantage have a weight from 0.8 to 1."""


def objective(inputs: TokenInputs, config: LossConfig) -> Objective:
    """The weighted surrogate; also observes the weight."""
    clipped, own = surrogate(inputs, config), config.parameters
    log_ratio_T, ratio_T = inputs.log_ratio_T.detach(), inputs.ratio_T.detach()
    if config.delta is not None:
        log_ratio_T = log_ratio_T.masked_fill(ratio_T > config.delta, 0.0)
    weight_T = discounted_future(log_ratio_T, inputs.segments, 2 ** (-1 / own.fipo_decay_rate)).exp()
    if own.fipo_clip_range:
        low = 1.0 if own.fipo_clip_high_only else 1 - own.fipo_clip_range
        weight_T = weight_T.clamp(low, 1 + own.fipo_clip_range)
    unsafe_T = (inputs.advantages_T < 0) & (ratio_T > own.fipo_safety_threshold)
    weight_T = weight_T.where(~unsafe_T, weight_T.clamp(SAFE_LOW, SAFE_HIGH))
    return Objective(clipped.loss_T * weight_T, {**clipped.observations_T, "fipo/influence_weight_mean": weight_T})


def discounted_future(values_T: Tensor, segments: Segments, discount: float) -> Tensor:
    """Sum over this and the later tokens of its sequence of `discount^distance * value`, [T].

    Tokens of a sequence are in their order. The sum is built by doubling: after k steps it holds 2^k tokens.
    """
    from torch.nn.functional import pad

    order_T = segments.index_T.argsort(stable=True)
    index_T, sums_T, reach = segments.index_T[order_T], values_T[order_T], 1
    while reach < len(sums_T):
        same_T = index_T[reach:] == index_T[:-reach]
        sums_T = sums_T + pad(sums_T[reach:].where(same_T, 0.0) * discount**reach, (0, reach))
        reach *= 2
    return sums_T[order_T.argsort()]


def bounds(config: LossConfig) -> str:
    """The range of ratio and weight."""
    own: FIPOParameters = config.parameters
    weight, reach = "not clipped", own.fipo_clip_range
    if reach:
        weight = f"{1 - (0 if own.fipo_clip_high_only else reach):g}..{1 + reach:g}"
    return f"{clip_bounds(config)}; weight {weight}, half-life {own.fipo_decay_rate:g} tokens"


losses["fipo"] = Loss(
    "fipo",
    "arXiv:2603.19835",
    objective,
    TOKEN_MEAN,
    settings=CLIP_SETTINGS,
    parameters=FIPOParameters,
    problems=clip_problems,
    bounds=bounds,
    summary="dapo, weighted by how later tokens have moved",
)
