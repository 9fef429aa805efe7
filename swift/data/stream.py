"""An endless stream of rows that are read as they are needed: only the shuffle buffer is in memory.

The position is a few numbers. To resume at one, the files are read again up to that row, without preparing the rows
before it: the shuffle buffer is a function of (seed, epoch, rows read so far), so it is rebuilt rather than saved
(`datasets` refills its own with other rows).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from swift.data.arguments import StreamArguments
from swift.data.files import read_local
from swift.data.hub import stream_hub
from swift.data.interleave import mixed_stream
from swift.data.loading import (
    Example,
    Purpose,
    Table,
    check_undamaged,
    dataset_specs,
    image_source,
    plan_datasets,
    read_record,
    too_many_bad,
)
from swift.data.preprocessed import preprocessed
from swift.data.procedural import read_procedural
from swift.data.records import BadRow, Record, filled_columns
from swift.data.report import DataReport
from swift.data.sampler import check_same, generator
from swift.data.spec import DatasetSpec
from swift.data.system import resolve_system
from swift.data.transforms import transformed
from swift.errors import ConfigError, join_problems

PEEKED_ROWS = 64
"""Rows of a streamed dataset that are read to find its columns."""

Item = TypeVar("Item")


class ExampleStream(Generic[Item]):
    """Items made of rows that are read as they are needed.

    `#n` takes the first n rows of a dataset. Files must not change between a run and its continuation.

    Args:
        args: the data settings; `shuffle_buffer_size` rows are mixed when `dataset_shuffle` is on.
        prepare: makes an item of a row; None skips the row.
        purpose, images: see `load_rows`.

    Raises:
        ConfigError, ResourceError: as `load_rows`, for problems of the first rows; later rows raise from `next`.
    """

    def __init__(
        self,
        args: StreamArguments,
        prepare: Callable[[Example], Item | None],
        *,
        purpose: Purpose,
        images: bool = False,
    ) -> None:
        if args.split_dataset_ratio and not args.val_dataset:
            raise ConfigError(
                f"--split_dataset_ratio: {args.split_dataset_ratio}: a stream cannot be split; "
                "give --val_dataset or drop --streaming"
            )
        self._system, notes = resolve_system(args.system)
        self.report = DataReport(notes=notes)
        self._args, self._prepare = args, prepare
        self._transform: str | None = getattr(args, "dataset_transform", None)
        self._seed = args.data_seed
        self._buffer = args.shuffle_buffer_size if args.dataset_shuffle else 0
        self._specs = dataset_specs(args, "train")
        if part := next((spec for spec in self._specs if spec.bounds), None):
            raise part.wrong("a stream has no known number of rows to take a part of; use #n, or drop --streaming")
        peeked = [list(itertools.islice(self._records(spec), PEEKED_ROWS)) for spec in self._specs]
        check_undamaged(itertools.chain.from_iterable(peeked))
        tables = [Table(rows, *filled_columns(rows)) for rows in peeked]
        renames = {} if self._transform else args.columns
        sources = functools.partial(image_source, args=args) if images else None
        self._plans = plan_datasets(self._specs, tables, renames, purpose, self.report, sources)
        for index, rows in enumerate(peeked):
            bad = [found for row in rows if isinstance(found := self._read(row, index), BadRow)]
            join_problems(too_many_bad(bad, len(rows), self._specs[index], args))
        self._enter(0, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the last item."""
        return self._epoch

    def next(self) -> Item:
        """The item of the next row; a new epoch begins where the rows end."""
        while True:
            example = next(self._rows, None)
            if example is None:
                self._next_epoch()
                continue
            self._drawn += 1
            item = self._prepare(example)
            if item is not None:
                self._num_items += 1
                return item

    def enter(self, epoch: int) -> None:
        """Goes to the beginning of an epoch."""
        self._enter(epoch, 0)

    def skip_to_epoch_end(self) -> None:
        """Goes to the next epoch unless one has just begun."""
        if self._drawn:
            self._enter(self._epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Position and the settings that determine the order."""
        return {"epoch": self._epoch, "cursor": self._drawn, "given": self._num_items, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads up to a saved position."""
        check_same(state, self._settings())
        self._enter(int(state["epoch"]), int(state["cursor"]))
        self._num_items = int(state["given"])

    def _settings(self) -> dict[str, Any]:
        args = self._args
        shares = " ".join(f"{share:g}" for share in args.interleave_prob)
        return {
            "seed": self._seed,
            "shuffle": args.dataset_shuffle,
            "buffer": self._buffer,
            "mixture": f"{shares} {args.stopping_strategy}" if shares else None,
        }

    def _next_epoch(self) -> None:
        if not self._num_items:
            first = f"; the first: {self.report.first_bad[0]}" if self.report.first_bad else ""
            raise ConfigError(
                f"{self._specs[0].flag}: {', '.join(spec.text for spec in self._specs)}: no usable row in the stream "
                f"({self.report.num_skipped} bad, {self.report.num_deleted} too long){first}"
            )
        self._enter(self._epoch + 1, 0)

    def _enter(self, epoch: int, drawn: int) -> None:
        self._epoch, self._drawn, self._num_items = epoch, drawn, 0
        rows = self._examples(epoch)
        self._rows = shuffled(rows, self._buffer, self._seed, epoch) if self._buffer > 1 else rows
        if drawn and sum(1 for _ in itertools.islice(self._rows, drawn)) < drawn:
            raise ConfigError(
                f"--resume_from_checkpoint: epoch {epoch}, row {drawn}: the stream has fewer rows than the saved "
                "run had read; resume with the same files"
            )

    def _examples(self, epoch: int) -> Iterator[Example]:
        """The rows of an epoch: one dataset after the other, or mixed."""
        shares = self._args.interleave_prob
        if len(self._specs) < 2 or not shares:
            return itertools.chain.from_iterable(map(self._examples_of, range(len(self._specs))))
        return mixed_stream(self._examples_of, shares, seed=(self._seed, epoch), strategy=self._args.stopping_strategy)

    def _examples_of(self, index: int) -> Iterator[Example]:
        return itertools.islice(self._good_rows(index), self._specs[index].count)

    def _good_rows(self, index: int) -> Iterator[Example]:
        spec, bad, number = self._specs[index], list[BadRow](), 0
        for number, record in enumerate(self._records(spec), start=1):
            example = self._read(record, index)
            if isinstance(example, Example):
                yield example
                continue
            bad.append(example)
            self.report.skip(example)
            check_undamaged([example])
            join_problems(too_many_bad(bad, max(number, PEEKED_ROWS), spec, self._args))
        join_problems(too_many_bad(bad, number, spec, self._args))

    def _read(self, record: Record, index: int) -> Example | BadRow:
        return read_record(record, self._plans[index], self._system, self._args)

    def _records(self, spec: DatasetSpec) -> Iterator[Record]:
        if spec.kind == "local":
            rows = read_local(spec)
        elif spec.kind == "hub":
            rows = stream_hub(spec, split="train")
        else:
            rows = read_procedural(spec, seed=self._seed)
        rows = preprocessed(rows, spec)
        return transformed(rows, self._transform, self._args.columns) if self._transform else rows


def shuffled(rows: Iterator[Example], size: int, seed: int, epoch: int) -> Iterator[Example]:
    """Mixes a stream through a buffer of `size` rows; every row comes out exactly once."""
    random = generator(seed, epoch)
    buffer = list(itertools.islice(rows, size))
    for row in rows:
        place = int(random.integers(len(buffer)))
        yield buffer[place]
        buffer[place] = row
    for place in random.permutation(len(buffer)):
        yield buffer[place]
