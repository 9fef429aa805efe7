"""Entropy: the bonus, its adaptive weight, and training on the most uncertain tokens only.

T packed tokens. All sums are over the global batch, so that no cut into micro-batches matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def entropy_bonus(
    entropy_T: Tensor, mask_T: Tensor, *, coefficient: float, num_tokens: float, keep_T: Tensor | None = None
) -> Tensor:
    """The micro-batch's share of `-c_H sum m h H / sum m h`, a scalar with gradient to add to the loss.

    Args:
        entropy_T: entropy in nats, with gradient.
        mask_T: data mask.
        coefficient: c_H.
        num_tokens: `sum m h` over the whole global batch.
        keep_T: the top-entropy mask h, or None.
    """
    weight_T = mask_T.to(entropy_T.dtype)
    if keep_T is not None:
        weight_T = weight_T * keep_T.to(entropy_T.dtype)
    return -coefficient * (weight_T * entropy_T).sum() / num_tokens


def top_entropy_threshold(entropies: Tensor, quantile: float) -> float:
    """The entropy at or above which a token is trained (arXiv:2506.01939).

    Args:
        entropies: of all trained tokens of the global batch, any order, at least one.
        quantile: p_H, the share to keep, in (0, 1].

    Returns:
        The order statistic number `ceil((1 - p_H)(N - 1))`, counted from 0; ties are kept.

    Example: .1 .9 .4 .7 .2 with p_H = .5 gives .4, which keeps .9, .4 and .7.
    """
    # 1e-9: (1 - .8) * 10 is 1.9999999999999996 or 2.0000000000000004 by chance of the decimals
    rank = math.ceil((1 - quantile) * (entropies.numel() - 1) - 1e-9)
    return float(torch.kthvalue(entropies, rank + 1).values)


@dataclass(frozen=True, slots=True)
class AdaptiveEntropy:
    """Controller of c_H (arXiv:2505.22312), a value: `updated` returns the next one.

    A new controller applies nothing: it has not seen an entropy yet.
    """

    coefficient: float = 0.0
    target: float = 0.2
    step: float = 0.005
    minimum: float = 0.0
    maximum: float = 1.0
    last_entropy: float = math.inf

    @property
    def applied(self) -> float:
        """The coefficient for the next step: the stored one while entropy is at or below the target."""
        return self.coefficient if self.last_entropy <= self.target else 0.0

    def updated(self, entropy: float) -> AdaptiveEntropy:
        """The controller after a global batch of that mean entropy."""
        if entropy <= self.target:
            coefficient = min(self.coefficient + self.step, self.maximum)
        else:
            coefficient = max(self.coefficient - self.step, self.minimum)
        return replace(self, coefficient=coefficient, last_entropy=entropy)
