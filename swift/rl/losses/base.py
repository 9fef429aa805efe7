"""What a loss is: an objective at each token, and one normaliser.

    window loss = sum over all tokens t of  m_t * share_i(t) / Z * f_t

`f_t` is the objective (with its stop-gradients). `share_i` depends on the sequence of the token alone and
`Z` on the window alone; both follow from data masks, so they are known before any forward. A loss is one
small file that builds one `Loss`. T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swift.rl.importance import LEVELS, Level
from swift.rl.segments import spread
from swift.rl.window import WindowCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The settings of a policy loss; plain numbers, checked at construction.

    Raises:
        ValueError: a value is out of its range, or two of them contradict each other.
    """

    loss_type: str = "dapo"
    """Name in `swift.rl.losses.LOSSES`."""

    importance_sampling_level: Level | None = None
    """Level of the ratio; None takes the loss's own (sequence for gspo and luspo, else token)."""

    epsilon: float = 0.2
    """Lower clip range of the ratio."""

    epsilon_high: float | None = None
    """Upper clip range; None means `epsilon`. For cispo the cap on the ratio itself, which must be given."""

    delta: float | None = None
    """Two-sided clip: cap of the unclipped ratio, > 1 + epsilon_high (arXiv:2505.07291); None is off."""

    beta: float = 0.0
    """Weight of the KL to the reference; 0 is off and needs no reference."""

    kl_bias_correction: bool = False
    """Multiply k3 by the token ratio (arXiv:2512.02556)."""

    tau_pos: float = 1.0
    """Temperature of sapo's gate for A > 0."""

    tau_neg: float = 1.05
    """Temperature of sapo's gate for A <= 0."""

    def __post_init__(self) -> None:
        if self.importance_sampling_level is not None and self.importance_sampling_level not in LEVELS:
            raise ValueError(
                f"importance_sampling_level: {self.importance_sampling_level}: unknown; valid: {', '.join(LEVELS)}"
            )
        if self.epsilon < 0 or (self.epsilon_high is not None and self.epsilon_high < 0):
            raise ValueError(f"epsilon, epsilon_high: {self.epsilon}, {self.epsilon_high}: must be >= 0")
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(f"delta: {self.delta}: must be greater than 1 + epsilon_high = {1 + self.clip_high}")
        if self.beta < 0:
            raise ValueError(f"beta: {self.beta}: must be >= 0")
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ValueError(f"tau_pos, tau_neg: {self.tau_pos}, {self.tau_neg}: must be positive")

    @property
    def clip_high(self) -> float:
        """`epsilon_high`, or `epsilon` when it is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What an objective sees of a micro-batch; everything [T] unless the suffix says otherwise.

    policy_logprobs_T: current policy, with gradient.
    log_ratio_T: token log-ratio to the old policy, 0 where the mask is 0, with gradient.
    ratio_T: ratio of the configured level, with gradient.
    advantages_T, mask_T: advantage and data mask (floating 0 or 1).
    sequence_index_T, num_sequences: the packing.
    sampler_log_weight_S: log of the sampler correction of each sequence, for objectives that fold it in
        themselves (vespo); None without correction.
    """

    policy_logprobs_T: Tensor
    log_ratio_T: Tensor
    ratio_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    sequence_index_T: Tensor
    num_sequences: int
    sampler_log_weight_S: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """The per-token loss `f_T` and token-wise observations, averaged over trained tokens when logged."""

    loss_T: Tensor
    observations_T: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Normaliser:
    """The weight of a token: `share(T_i, N_nominal) / total(counts, max_completion_length)`.

    share: of a sequence with T_i > 0 trained tokens in a nominal micro-batch of N_nominal trained tokens.
    total: Z of the window; it is all that a late, exact count of the window changes.
    """

    formula: str
    share: Callable[[int, int], float]
    total: Callable[[WindowCounts, int], float]


@dataclass(frozen=True, slots=True)
class Loss:
    """One policy loss: its objective, its normaliser, the level of its ratio and its paper.

    `folds_sampler_weight` tells that the objective uses `sampler_log_weight_S` itself, so that the result
    must not be multiplied by the sampler weight again.
    """

    name: str
    paper: str
    objective: Callable[[TokenInputs, LossConfig], Objective]
    normaliser: Normaliser
    default_level: Level = "token"
    folds_sampler_weight: bool = False


TOKEN_MEAN = Normaliser("sum m f / N", lambda length, nominal: 1.0, lambda counts, limit: counts.num_tokens)
"""Every trained token of the window weighs the same."""

SEQUENCE_MEAN = Normaliser(
    "(1/B) sum_i sum_t m f / T_i",
    lambda length, nominal: 1.0 / length,
    lambda counts, limit: counts.num_trained_sequences,
)
"""Every sequence with a trained token weighs the same."""


def sequence_weights(
    loss: Loss,
    counts: WindowCounts,
    trained_tokens: Sequence[int],
    *,
    nominal_tokens: Sequence[int] | None = None,
    max_completion_length: int | None = None,
) -> list[float]:
    """`share_i / Z` of some sequences of the window; 0 for a sequence without trained tokens.

    Args:
        loss: the loss.
        counts: counts of the whole window, all ranks.
        trained_tokens: T_i of the sequences asked for (any part of the window).
        nominal_tokens: trained tokens of the nominal micro-batch of each (bnpo); None means T_i.
        max_completion_length: longest completion in tokens (dr_grpo); None where the loss needs none.

    Raises:
        ValueError: Z is 0, so that there is nothing to train on and no update may be made.
    """
    total = loss.normaliser.total(counts, max_completion_length or 0)
    if not total > 0:
        raise ValueError(f"loss_type {loss.name}: the normaliser is {total} for {counts}")
    nominal = trained_tokens if nominal_tokens is None else nominal_tokens
    return [
        loss.normaliser.share(length, batch) / total if length > 0 else 0.0
        for length, batch in zip(trained_tokens, nominal, strict=True)
    ]


def token_weights(weights: Sequence[float], mask_T: Tensor, sequence_index_T: Tensor) -> Tensor:
    """`m_t * share_i / Z` at each token, [T], in the mask's floating dtype (fp32 for a bool or int mask)."""
    dtype = mask_T.dtype if mask_T.is_floating_point() else torch.float32
    weights_S = torch.tensor(weights, dtype=dtype, device=mask_T.device)
    return mask_T.to(dtype) * spread(weights_S, sequence_index_T)
