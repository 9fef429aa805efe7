"""Sums over the sequences of a packed stream of tokens, and the way back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """The sequences of a micro-batch, T tokens of S sequences, and which tokens are trained.

    mask_T: the data mask, bool. index_T: long, the sequence of each token, 0..S-1 in any order. num: S.
    """

    mask_T: Tensor
    index_T: Tensor
    num: int

    def sum(self, values_T: Tensor) -> Tensor:
        """Sum of each sequence's trained values, [S], in their dtype and with their gradient; 0 without any."""
        trained_T = torch.where(self.mask_T, values_T, 0)  # the others may be NaN
        return values_T.new_zeros(self.num).index_add(0, self.index_T, trained_T)

    def mean(self, values_T: Tensor) -> Tensor:
        """Mean of the same."""
        return self.sum(values_T) / self.sum(torch.ones_like(values_T)).clamp(min=1.0)

    def at_tokens(self, values_S: Tensor) -> Tensor:
        """Each sequence's value at each of its tokens, [T]."""
        return values_S.index_select(0, self.index_T)


def largest(values_T: Tensor, chosen_T: Tensor) -> Tensor:
    """The largest of the chosen values; -inf without one. Nothing waits for the device."""
    return torch.where(chosen_T, values_T, -math.inf).amax() if len(values_T) else values_T.new_tensor(-math.inf)


def smallest(values_T: Tensor, chosen_T: Tensor) -> Tensor:
    """The smallest of the chosen values; inf without one."""
    return -largest(-values_T, chosen_T)
