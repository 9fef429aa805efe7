"""Rewards, advantages and loss of energy-based fine-tuning (EBFT, arXiv:2603.12248) from feature vectors.

EBFT matches the mean feature of sampled completions to that of the reference (calibrated feature matching):

    CFM = || E phi_j - phi* ||^2,    phi_j of n samples of one context, phi* of its reference

    a_j = 2 phi_j . phi*                              alignment
    d_j = 2 / (n - 1) sum_{i != j} phi_j . phi_i      diversity, 0 if n = 1
    r_j = alpha a_j - beta d_j                        reward; at alpha = beta = 1 the policy gradient is that of -CFM

G groups (contexts or blocks), n samples of each, D features. Everything keeps the dtype that it gets.

Example, one group of three: phi = (1, 0), (0, 1), (.6, .8) and phi* = (1, 0) give a = 2, 0, 1.2 and d = .6, .8, 1.4,
so r = 1.4, -.8, -.2, the rloo advantages 2.4, -1.2, -1.2, and the loss .4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

Estimator = Literal["rloo", "group_norm", "reinforce"]
Whitening = Literal["none", "pooled", "group"]
PooledMap = Callable[[Tensor], Tensor]
"""The linear map of pooled whitening, for vectors [..., D]."""

STD_EPSILON = 1e-4
"""Added to the standard deviation that divides, as in `swift.rl.advantages`."""

RANK_TOLERANCE = 1e-5
"""Singular values below this share of the largest count as 0, as in the authors' code."""


def energy_rewards(features: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Alignment `a_j` and diversity `d_j`, each [G, n].

    Args:
        features: [G, n, D], of the samples.
        reference: [G, D], of the reference of each group.
    """
    num_samples = features.shape[1]
    alignment = 2 * torch.einsum("gnd,gd->gn", features, reference)
    if num_samples == 1:
        return alignment, torch.zeros_like(alignment)
    gram = features @ features.mT
    others = gram.sum(dim=2) - gram.diagonal(dim1=1, dim2=2)
    return alignment, 2 / (num_samples - 1) * others


def energy_advantages(
    a: Tensor, d: Tensor, *, alignment_coef: float, diversity_coef: float, estimator: Estimator = "rloo"
) -> Tensor:
    """Advantages [G, n] of rewards `alignment_coef * a - diversity_coef * d`.

    rloo        alpha (a_j - mean of the other a) - beta (d_j - baseline). The baseline leaves out each pair that holds
                j, or the diversity would count (n - 2) / (n - 1) of its weight; two samples have none. One sample
                has no baseline and no diversity: alpha a_1.
    group_norm  (r_j - mean) / (std + 1e-4), ddof 1; 0 for one sample.
    reinforce   r_j.
    """
    num_samples = a.shape[1]
    rewards = alignment_coef * a - diversity_coef * d
    if estimator == "reinforce":
        return rewards
    if estimator == "group_norm":
        if num_samples == 1:
            return torch.zeros_like(rewards)
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        return centred / (rewards.std(dim=1, keepdim=True) + STD_EPSILON)
    if num_samples == 1:
        return alignment_coef * a
    alignment = a - (a.sum(dim=1, keepdim=True) - a) / (num_samples - 1)
    if num_samples == 2:
        return alignment_coef * alignment - diversity_coef * d
    diversity = d - (d.sum(dim=1, keepdim=True) - 2 * d) / (num_samples - 2)
    return alignment_coef * alignment - diversity_coef * diversity


def cfm_loss(features: Tensor, reference: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """Unbiased estimate [G] of CFM, from alignment and diversity: `|phi*|^2 - mean a + mean d / 2`.

    The plug-in `|mean phi - phi*|^2` is too large by the variance of the mean. One sample has no pair, so there the
    estimate takes `|phi|^2` of that sample and is too large as well.
    """
    if features.shape[1] == 1:
        d = 2 * features.square().sum(dim=2)
    return reference.square().sum(dim=1) - a.mean(dim=1) + d.mean(dim=1) / 2


class Energies(NamedTuple):
    """rewards, advantages: [G, n]. metrics: what is logged of the groups, as means."""

    rewards: Tensor
    advantages: Tensor
    metrics: dict[str, float]


def energies(
    features: Tensor,
    reference: Tensor,
    *,
    alignment_coef: float,
    diversity_coef: float,
    estimator: Estimator = "rloo",
    whitening: Whitening = "none",
    pooled: PooledMap | None = None,
) -> Energies:
    """All that follows from the features [G, n, D] and [G, D] of these groups, whitened.

    Metrics are the cosines `ebft/alignment` and `ebft/diversity` (without the factor 2), `ebft/reward`,
    `ebft/effective_reward` (alpha a - beta d / 2), `ebft/cfm_loss`, `ebft/advantages_std`, `ebft/rank_deficient_frac`.
    """
    features, reference, deficient = whiten(features, reference, whitening, pooled)
    a, d = energy_rewards(features, reference)
    rewards = alignment_coef * a - diversity_coef * d
    advantages = energy_advantages(
        a, d, alignment_coef=alignment_coef, diversity_coef=diversity_coef, estimator=estimator
    )
    values = {
        "alignment": a / 2,
        "diversity": d / 2,
        "reward": rewards,
        "effective_reward": rewards + diversity_coef * d / 2,
        "cfm_loss": cfm_loss(features, reference, a, d),
    }
    spread = advantages.std() if advantages.numel() > 1 else torch.zeros_like(a.mean())
    found = torch.stack([*(value.mean() for value in values.values()), spread]).tolist()  # one wait for a device
    metrics = {f"ebft/{name}": value for name, value in zip([*values, "advantages_std"], found, strict=True)}
    return Energies(rewards, advantages, metrics | {"ebft/rank_deficient_frac": deficient})


def describe(*, estimator: Estimator, rl_coef: float, ce_coef: float, beta: float) -> str:
    """The loss of structured EBFT in one line, N trained tokens."""
    parts = [f"{rl_coef:g} sum -A lp / N, A by {estimator}"] if rl_coef else []
    parts += [f"{ce_coef:g} cross-entropy of references"] if ce_coef else []
    return f"ebft (arXiv:2603.12248): {' + '.join([*parts, *([f'{beta:g} KL'] if beta else [])])}"


# --- whitening -------------------------------------------------------------------------------------------------------


def whiten(
    features: Tensor,
    reference: Tensor,
    kind: Whitening,
    pooled: PooledMap | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Whitened features of unit length, so that `a / 2` and `d / 2` are cosines.

    Args:
        features: [G, n, D].
        reference: [G, D].
        kind: none; pooled, one fixed linear map for features and reference; group, of the samples of each group alone.
        pooled: that map, of the references of the whole generation batch, all ranks.

    Returns:
        features, reference, and the share of groups whose samples are linearly dependent (group; else 0). Where they
        are not, group makes them orthogonal: their diversity is 0.
    """
    deficient = 0.0
    if kind == "pooled":
        assert pooled is not None, "pooled whitening takes the references of the batch"
        features, reference = pooled(features), pooled(reference)
    elif kind == "group":
        features, deficient = group_whitening(features)
    return normalize(features, dim=-1), normalize(reference, dim=-1), deficient


def pooled_whitening(references: Tensor, shrinkage: float) -> PooledMap:
    """`v -> Sigma^{-1/2} v`, where Sigma is the second moment of the references [N, D], shrunk by lambda.

        Sigma = (1 - lambda) / N sum phi* phi*^T + lambda kappa I,    kappa = tr(sum phi* phi*^T) / (N D)

    A thin singular value decomposition applies it: no D x D matrix is formed.
    """
    num, size = references.shape
    kappa = references.square().sum() / (num * size)
    _, singular_K, basis_KD = torch.linalg.svd(references, full_matrices=False)
    floor = (shrinkage * kappa).rsqrt()
    scale_K = ((1 - shrinkage) * singular_K.square() / num + shrinkage * kappa).rsqrt() - floor
    return lambda vectors: floor * vectors + ((vectors @ basis_KD.mT) * scale_K) @ basis_KD


def group_whitening(features: Tensor) -> tuple[Tensor, float]:
    """`(Phi Phi^T)^{-1/2} Phi` of each group [G, n, D] by pseudo-inverse, in fp32 at least, and the deficient share.

    The gram matrix of the result is an orthogonal projector, I where the samples are linearly independent.
    """
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    left, singular, right = torch.linalg.svd(wide, full_matrices=False)  # [G, n, k], [G, k], [G, k, D]
    kept = singular > RANK_TOLERANCE * singular.amax(dim=1, keepdim=True)
    whitened = (left * kept[:, None].to(wide.dtype)) @ right
    deficient = kept.sum(dim=1) < features.shape[1]
    return whitened.to(features.dtype), float(deficient.double().mean())
