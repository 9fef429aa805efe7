"""Supervised rows that are read and tokenised while training.

The stream has no end and depends on files and settings only. A resumed run reads it again up to its place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swift.data.loading import Example, Purpose
from swift.data.stream import ExampleStream
from swift.trainers.sft_data import ChatEncoder

if TYPE_CHECKING:
    from datasets import IterableDataset

    from swift.data.arguments import StreamArguments
    from swift.trainers.sft_packing import Packing

logger = logging.getLogger("swift.trainers")

SAID = tuple(10**power for power in range(12))
"""Numbers of rows left out at which the log says so."""


@dataclass
class RowStream:
    """Makes the stream from its beginning, as often as it is called; rows left out are counted in `left_out`."""

    args: StreamArguments
    encoder: ChatEncoder
    purpose: Purpose
    left_out: Counter[str] = field(default_factory=Counter)

    def open(self) -> ExampleStream[dict[str, Any]]:
        """The rows, ready to be read; raises what the first of them show, as `ExampleStream` does."""
        return ExampleStream(self.args, self.encoded, purpose=self.purpose)

    def __call__(self) -> Iterator[dict[str, Any]]:
        """`input_ids` and `labels` of row after row."""
        stream, num_bad = self.open(), 0
        while True:
            yield stream.next()
            if stream.report.num_skipped > num_bad:
                num_bad = stream.report.num_skipped
                if num_bad in SAID:
                    logger.warning(stream.report.lines()[-1])

    def encoded(self, example: Example) -> dict[str, Any] | None:
        """A row, or None for one that is left out."""
        row = self.encoder(example.messages, example.columns.get("tools"))
        if not row["problem"]:
            return {name: row[name] for name in ("input_ids", "labels")}
        self.left_out[row["problem"]] += 1
        if (count := self.left_out.total()) in SAID:
            logger.warning("stream: %s: left out: %s; %d rows so far", example.origin, row["problem"], count)
        return None


def open_stream(rows: RowStream, packing: Packing | None) -> tuple[IterableDataset, list[str]]:
    """The stream as a dataset, packed if `packing` is given, and lines to print about its columns."""
    from datasets import Features, IterableDataset, List, Value

    tokens = List(Value("int64"))
    lines = rows.open().report.lines()
    stream = IterableDataset.from_generator(rows, features=Features({"input_ids": tokens, "labels": tokens}))
    return (packing(stream) if packing else stream), [*lines, "train: a stream of rows"]
