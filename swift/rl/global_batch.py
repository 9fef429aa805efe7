"""The exact counts of a global batch: every sequence that feeds one optimizer step, on all ranks.

Counts depend on the data masks alone, so they are known before any forward. Pure Python, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What the normalisers divide by.

    num_tokens: N, trained tokens, the sum of all T_i. num_trained_sequences: B, those with T_i > 0. num_sequences: S.
    num_nominal_batches: M, nominal micro-batches (bnpo only).
    """

    num_tokens: int
    num_trained_sequences: int
    num_sequences: int
    num_nominal_batches: int


def count_batch(trained_tokens: Sequence[int], nominal_size: int | None = None) -> BatchCounts:
    """Count a global batch.

    trained_tokens: T_i of each sequence; sequences that were filtered or excluded are listed with 0. nominal_size:
    sequences of a nominal micro-batch, which is a run of them; None makes all sequences one.
    """
    count = len(trained_tokens)
    return BatchCounts(
        num_tokens=sum(trained_tokens),
        num_trained_sequences=sum(tokens > 0 for tokens in trained_tokens),
        num_sequences=count,
        num_nominal_batches=-(-count // nominal_size) if nominal_size else 1,
    )


def nominal_batch_tokens(trained_tokens: Sequence[int], nominal_size: int) -> list[int]:
    """For each sequence, the trained tokens of the nominal micro-batch that it belongs to."""
    starts = [i - i % nominal_size for i in range(len(trained_tokens))]
    return [sum(trained_tokens[start : start + nominal_size]) for start in starts]
