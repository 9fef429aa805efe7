"""One row as it was found: its values, or why it is no row, and always where it stands.

`origin` is `file:line` (lines from 1; for tables without lines the row number), the form editors jump to.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any


class RowError(ValueError):
    """Why one row cannot be used, in a few words; never leaves `swift.data`."""


@dataclass(slots=True, frozen=True)
class RawRow:
    """The values of a row under the names of its file."""

    values: dict[str, Any]
    origin: str


@dataclass(slots=True, frozen=True)
class BadRow:
    """A row that is left out. `damaged`: its file does not parse there, so it is not a matter of `--strict`."""

    origin: str
    reason: str
    damaged: bool = False

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}"


Record = RawRow | BadRow


@dataclass(slots=True)
class Table:
    """The rows of one dataset and the names of its columns, in order of appearance.

    `columns` are those that hold a value in at least one row; `empty_columns` are null throughout.
    """

    name: str
    records: Sequence[Record]
    columns: list[str]
    empty_columns: list[str]


def table_of(name: str, records: Sequence[Record]) -> Table:
    """A `Table` whose columns are found by looking at every row."""
    columns, empty = filled_columns(records)
    return Table(name, records, columns, empty)


def filled_columns(records: Iterable[Record]) -> tuple[list[str], list[str]]:
    """Column names with a value somewhere, and those without any, each in order of appearance."""
    filled: dict[str, bool] = {}
    for record in records:
        if isinstance(record, RawRow):
            for name, value in record.values.items():
                filled[name] = filled.get(name, False) or value is not None
    return [name for name, has in filled.items() if has], [name for name, has in filled.items() if not has]


def plain(value: Any, where: str = "") -> Any:
    """`value` as JSON would give it back: tuples become lists, keys strings, dates ISO text.

    Raises:
        RowError: for what JSON cannot carry, such as bytes or an image; `where` is the column.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where) for item in value]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, PurePath)):
        return str(value)
    raise RowError(f"column {where!r} holds {type(value).__name__}, which JSON cannot carry")


def plain_row(values: dict[str, Any], origin: str) -> Record:
    """A record whose values went through `plain`."""
    try:
        return RawRow({str(name): plain(value, str(name)) for name, value in values.items()}, origin)
    except RowError as error:
        return BadRow(origin, str(error))
