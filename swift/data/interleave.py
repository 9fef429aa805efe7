"""Several datasets as one, in given shares (`--interleave_prob`), as `datasets.interleave_datasets` mixes them.

Each place of the mixture is given to a dataset by a draw; the dataset's next row goes there. `first_exhausted` ends
when a dataset has given its last row, `all_exhausted` when each has: those that are through begin again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from swift.data.sampler import generator
from swift.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from swift.data.arguments import DataArguments

Row = TypeVar("Row")

DRAWS = 4096
"""Sources drawn at a time."""
MOST_ROWS = 20_000_000
"""Longest mixture in memory; a tiny share with all_exhausted would have no end."""
_COUNTER = 2**32 - 3  # keeps these random numbers apart from those of sampling, splitting and shuffling


def mixture_name(args: DataArguments) -> str | None:
    """Shares and strategy in one text, for states that must fit; None without a mixture."""
    if not args.interleave_prob:
        return None
    return f"{' '.join(f'{share:g}' for share in args.interleave_prob)} {args.stopping_strategy}"


def interleave(sizes: Sequence[int], shares: Sequence[float], *, seed: int, strategy: str) -> list[tuple[int, int]]:
    """(dataset, row) of each place.

    Args:
        sizes: rows of each dataset, at least 1.
        shares: of the datasets, above 0, adding up to 1.
        seed: of the draws.
        strategy: first_exhausted or all_exhausted.

    Raises:
        ConfigError: the mixture would have more than `MOST_ROWS` rows.
    """
    likely = max(size / share for size, share in zip(sizes, shares, strict=True))
    if strategy == "all_exhausted" and likely > MOST_ROWS:
        raise ConfigError(
            f"--interleave_prob: {' '.join(map(str, shares))}: with --stopping_strategy all_exhausted about "
            f"{likely:.0f} rows until each dataset is through; use larger shares, or first_exhausted"
        )
    rows = [range(size) for size in sizes]
    random = generator(seed, _COUNTER)
    return list(_mixed(lambda source: ((source, row) for row in rows[source]), shares, random, strategy))


def mixed_stream(
    open_rows: Callable[[int], Iterator[Row]], shares: Sequence[float], *, seed: int, epoch: int, strategy: str
) -> Iterator[Row]:
    """The rows of one epoch of streamed datasets; a function of its arguments and the rows alone.

    Args:
        open_rows: reads a dataset from its beginning.
        shares: as for `interleave`.
        seed: of the draws.
        epoch: each has draws of its own.
        strategy: as for `interleave`.
    """
    return _mixed(open_rows, shares, generator(seed, epoch, _COUNTER), strategy)


def _mixed(
    open_rows: Callable[[int], Iterator[Row]], shares: Sequence[float], random: np.random.Generator, strategy: str
) -> Iterator[Row]:
    everything = strategy == "all_exhausted"
    streams = [open_rows(index) for index in range(len(shares))]
    ahead = [next(stream, None) for stream in streams]  # one row ahead: the last row of a dataset may end the epoch
    if any(row is None for row in ahead):
        return  # whoever reads the stream says that it is empty
    through: set[int] = set()
    for source in _draws(shares, random):
        row = ahead[source]
        assert row is not None
        ahead[source] = next(streams[source], None)
        yield row
        if ahead[source] is None:
            through.add(source)
            if not everything or len(through) == len(shares):
                return
            streams[source] = open_rows(source)
            ahead[source] = next(streams[source], None)


def _draws(shares: Sequence[float], random: np.random.Generator) -> Iterator[int]:
    """Datasets in the order of their turns, without end."""
    total = sum(shares)
    weights = [share / total for share in shares]
    for _ in itertools.count():
        yield from (int(source) for source in random.choice(len(shares), size=DRAWS, p=weights))
