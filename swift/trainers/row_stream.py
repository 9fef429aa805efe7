"""Rows of a method that are read and tokenised while training.

A stream depends on files and settings only, and is endless without `--max_epochs`. A resumed run reads it again up to
its position.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

from swift.data.loading import Example, Purpose
from swift.data.stream import ExampleStream
from swift.errors import ConfigError
from swift.trainers.rows import TOO_LONG, Encoder, features_of

if TYPE_CHECKING:
    from datasets import IterableDataset

    from swift.data.arguments import StreamArguments
    from swift.trainers.sft_packing import Packing

logger = logging.getLogger("swift.trainers")

WARNED_COUNTS = tuple(10**power for power in range(12))
"""Numbers of rows left out at which a warning is logged."""


@dataclass
class RowStream:
    """Each call opens the stream at the beginning of an epoch; rows left out are counted in `left_out`."""

    args: StreamArguments
    encoder: Encoder
    purpose: Purpose
    left_out: Counter[str] = field(default_factory=Counter)

    def open(self) -> ExampleStream[list[dict[str, Any]]]:
        """The rows of each example, ready to be read; raises as `ExampleStream` for problems of the first rows."""
        sees = self.encoder.template.vision is not None
        return ExampleStream(self.args, self.encoded, purpose=self.purpose, images=sees)

    def __call__(self, epoch: int) -> Iterator[dict[str, Any]]:
        """The encoded rows of an epoch, one by one."""
        stream, num_bad = self.open(), 0
        stream.enter(epoch)
        while True:
            rows = stream.next()
            if stream.epoch > epoch:
                return
            yield from rows
            if stream.report.num_skipped > num_bad:
                num_bad = stream.report.num_skipped
                if num_bad in WARNED_COUNTS:
                    logger.warning(stream.report.lines()[-1])

    def encoded(self, example: Example) -> list[dict[str, Any]] | None:
        """The rows of an example, or None if all of them are left out.

        Raises:
            ConfigError: (strict) the encoder refuses one.
        """
        found = []
        for row in chain.from_iterable(self.encoder.rows(*inputs) for inputs in self.encoder.inputs(example)):
            if problem := row["problem"]:
                self._leave_out(problem, example.origin)
            else:
                found.append({name: row[name] for name in self.encoder.columns})
        return found or None

    def _leave_out(self, problem: str, origin: str) -> None:
        if self.args.strict and problem != TOO_LONG:
            raise ConfigError(f"{origin}: {problem}")
        self.left_out[problem] += 1
        if (count := self.left_out.total()) in WARNED_COUNTS:
            logger.warning("stream: %s: left out: %s; %d rows so far", origin, problem, count)


@dataclass
class Epochs:
    """The rows of the first `limit` epochs of a stream, each packed by itself if `packing` is given.

    ends: how many rows the first epoch has, the first two, and so on, as far as the stream has been read. whole: the
    last rows are left out if they are fewer, because processes would be given earlier ones in their place.
    """

    rows: RowStream
    packing: Packing | None
    limit: int | None = None
    ends: list[int] = field(default_factory=list)
    whole: int = 1

    def __call__(self) -> Iterator[dict[str, Any]]:
        """The rows, one by one."""
        rows = self._all()
        while self.limit is not None and len(step := list(islice(rows, self.whole))) == self.whole:
            yield from step
        yield from rows

    def _all(self) -> Iterator[dict[str, Any]]:
        number, self.ends[:] = 0, []
        for epoch in count() if self.limit is None else range(self.limit):
            for row in self._packed(epoch) if self.packing else self.rows(epoch):
                number += 1
                yield row
            self.ends.append(number)

    def _packed(self, epoch: int) -> Any:
        from datasets import IterableDataset

        features = features_of(self.rows.encoder.columns)
        rows = IterableDataset.from_generator(self.rows, features, gen_kwargs={"epoch": epoch})
        return self.packing(rows)  # type: ignore[misc]


def open_stream(rows: RowStream, packing: Packing | None, limit: int | None) -> tuple[IterableDataset, list[str]]:
    """The stream as a dataset, whose attribute `epochs` has its `Epochs`, and lines to print about its columns.

    Raises:
        ConfigError, ResourceError: for problems of the first rows.
    """
    from datasets import IterableDataset

    lines = rows.open().report.lines()
    epochs = Epochs(rows, packing, limit)
    stream: Any = IterableDataset.from_generator(epochs, None if packing else features_of(rows.encoder.columns))
    stream.epochs = epochs
    return stream, [*lines, "train: a stream of rows"]
