"""Several datasets as one, in given shares (`--interleave_prob`), as `datasets.interleave_datasets` mixes them.

For each place of the mixture a dataset is drawn, and its next row is put there. `first_exhausted` ends when a dataset
has yielded its last row, `all_exhausted` when each has: datasets that are exhausted begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from swift.data.sampler import generator
from swift.errors import ConfigError

Row = TypeVar("Row")

DRAWS = 4096
"""Sources drawn at a time."""
MOST_ROWS = 20_000_000
"""Longest mixture in memory; a tiny share with all_exhausted would have no end."""
_COUNTER = 2**32 - 3  # keeps these random numbers apart from those of sampling, splitting and shuffling


def interleave(sizes: Sequence[int], shares: Sequence[float], *, seed: int, strategy: str) -> list[tuple[int, int]]:
    """(dataset, row) of each place, for datasets of `sizes` rows; at most `MOST_ROWS` places."""
    likely = max(size / share for size, share in zip(sizes, shares, strict=True))
    if strategy == "all_exhausted" and likely > MOST_ROWS:
        raise ConfigError(
            f"--interleave_prob: {' '.join(map(str, shares))}: with --stopping_strategy all_exhausted about "
            f"{likely:.0f} rows until each dataset is through; use larger shares, or first_exhausted"
        )
    places = [[(index, row) for row in range(size)] for index, size in enumerate(sizes)]
    return list(mixed_stream(lambda index: iter(places[index]), shares, seed=(seed,), strategy=strategy))


def mixed_stream(
    open_rows: Callable[[int], Iterator[Row]], shares: Sequence[float], *, seed: tuple[int, ...], strategy: str
) -> Iterator[Row]:
    """The rows of one epoch; a function of its arguments and the rows alone.

    Args:
        open_rows: reads a dataset from its beginning.
        shares: of the datasets, above 0, adding up to 1.
        seed: of the draws; for a stream also its epoch.
        strategy: first_exhausted or all_exhausted.
    """
    streams = [open_rows(index) for index in range(len(shares))]
    ahead = [next(stream, None) for stream in streams]  # one row ahead: the last row of a dataset may end the epoch
    if any(row is None for row in ahead):
        return  # the reader of the stream raises the error of an empty one
    exhausted: set[int] = set()
    for source in _draws(shares, seed):
        row = ahead[source]
        assert row is not None
        ahead[source] = next(streams[source], None)
        yield row
        if ahead[source] is None:
            exhausted.add(source)
            if strategy == "first_exhausted" or len(exhausted) == len(shares):
                return
            streams[source] = open_rows(source)
            ahead[source] = next(streams[source], None)


def _draws(shares: Sequence[float], seed: tuple[int, ...]) -> Iterator[int]:
    """Indexes of the drawn datasets, without end."""
    random = generator(*seed, _COUNTER)
    total = sum(shares)
    weights = [share / total for share in shares]
    while True:
        yield from map(int, random.choice(len(shares), size=DRAWS, p=weights))
