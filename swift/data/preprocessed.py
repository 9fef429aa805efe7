"""Rows of datasets that a plugin has registered: its function reads each row first, and may leave it out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swift.data.records import BadRow, RawRow, Record, plain_row
from swift.data.spec import DatasetSpec
from swift.plugin.datasets import PREPROCESSORS


def is_registered(spec: DatasetSpec) -> bool:
    """Whether a plugin reads the rows of a dataset."""
    return spec.target in PREPROCESSORS


def preprocessed(records: Iterable[Record], spec: DatasetSpec) -> Iterator[Record]:
    """The rows as the function of the plugin returns them; one that it fails on is a bad row."""
    function = PREPROCESSORS.get(spec.target)
    for record in records:
        if function is None or isinstance(record, BadRow):
            yield record
            continue
        assert isinstance(record, RawRow)
        try:
            made = function(dict(record.values))
        except Exception as error:  # of the user's code, about one row
            yield BadRow(record.origin, f"its preprocess_func raised {type(error).__name__}: {error}")
            continue
        if made is not None:
            yield plain_row(dict(made), record.origin)
