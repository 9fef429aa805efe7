"""The exact counts of a window: every sequence that feeds one optimizer update.

A window spans all ranks, micro-batches and accumulation steps. Its counts depend on the data masks alone,
so they are known before any forward; each rank counts its own sequences, the counts add (`__add__`, or one
all-reduce of `to_list`), and only then does the first micro-batch run. Pure Python, no tensors.

    N  num_tokens             trained tokens, the sum of all T_i
    B  num_trained_sequences  sequences with T_i > 0
    S  num_sequences          all sequences
    M  num_nominal_batches    nominal micro-batches of `per_device_train_batch_size` sequences (bnpo only)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """What the normalisers divide by; see the legend of the module."""

    num_tokens: int
    num_trained_sequences: int
    num_sequences: int
    num_nominal_batches: int

    def __add__(self, other: WindowCounts) -> WindowCounts:
        return WindowCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def to_list(self) -> list[int]:
        """The four counts in the order of the fields, for one all-reduce."""
        return list(astuple(self))

    @classmethod
    def from_list(cls, counts: Sequence[int | float]) -> WindowCounts:
        """The inverse of `to_list`."""
        return cls(*(int(count) for count in counts))

    @property
    def trains(self) -> bool:
        """Whether the window holds a single trained token; without one there is no update."""
        return self.num_tokens > 0


def nominal_batches(num_sequences: int, batch_size: int) -> list[int]:
    """The nominal micro-batch of each sequence of a rank: consecutive runs of `batch_size` sequences."""
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size}: a nominal micro-batch has at least one sequence")
    return [index // batch_size for index in range(num_sequences)]


def count_window(trained_tokens: Sequence[int], nominal_batch_indices: Sequence[int] | None = None) -> WindowCounts:
    """Count one rank's part of the window.

    Args:
        trained_tokens: T_i of each sequence: tokens whose data mask is 1. Sequences that were filtered or
            excluded are listed with 0: they count in S, never in B or N.
        nominal_batch_indices: the nominal micro-batch of each sequence; None makes all sequences one.

    Example:
        >>> count_window([3, 0, 2], [0, 0, 1]).to_list()
        [5, 2, 3, 2]
    """
    batches = _batch_indices(trained_tokens, nominal_batch_indices)
    return WindowCounts(
        num_tokens=sum(trained_tokens),
        num_trained_sequences=sum(count > 0 for count in trained_tokens),
        num_sequences=len(trained_tokens),
        num_nominal_batches=len(set(batches)),
    )


def nominal_batch_tokens(
    trained_tokens: Sequence[int], nominal_batch_indices: Sequence[int] | None = None
) -> list[int]:
    """For each sequence, the trained tokens of the nominal micro-batch that it belongs to."""
    batches = _batch_indices(trained_tokens, nominal_batch_indices)
    totals: dict[int, int] = {}
    for batch, count in zip(batches, trained_tokens, strict=True):
        totals[batch] = totals.get(batch, 0) + count
    return [totals[batch] for batch in batches]


def _batch_indices(trained_tokens: Sequence[int], indices: Sequence[int] | None) -> Sequence[int]:
    if any(count < 0 for count in trained_tokens):
        raise ValueError(f"trained tokens: {list(trained_tokens)}: a count cannot be negative")
    if indices is None:
        return [0] * len(trained_tokens)
    if len(indices) != len(trained_tokens):
        raise ValueError(f"{len(indices)} nominal micro-batch indices for {len(trained_tokens)} sequences")
    return indices
