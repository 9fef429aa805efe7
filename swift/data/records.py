"""One row as it was read: its values, or the reason why it is bad, and its place.

`origin` is `file:line` (lines from 1; for tables without lines the row number), a form that editors can open.
"""

from __future__ import annotations

import base64
import datetime
import decimal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

IMAGE_COLUMNS = ("images", "image")
"""Columns of a row's images."""

STRUCT = {"bytes", "path"}
"""Keys of an image in parquet files and in `datasets`."""


class RowError(ValueError):
    """The reason why a row cannot be used, in a few words; never raised out of `swift.data`."""


@dataclass(slots=True, frozen=True)
class RawRow:
    """The values of a row under the names of its file."""

    values: dict[str, Any]
    origin: str


@dataclass(slots=True, frozen=True)
class BadRow:
    """A row that is left out. `damaged`: its file does not parse there, which is an error whatever `--strict` is."""

    origin: str
    reason: str
    damaged: bool = False

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}"


Record = RawRow | BadRow


def filled_columns(records: Iterable[Record]) -> tuple[list[str], list[str]]:
    """Column names with a value somewhere, and those without any, each in order of appearance."""
    filled: dict[str, bool] = {}
    for record in records:
        if isinstance(record, RawRow):
            for name, value in record.values.items():
                filled[name] = filled.get(name, False) or value is not None
    return [name for name, has in filled.items() if has], [name for name, has in filled.items() if not has]


def data_url(content: bytes) -> str:
    """Bytes of an image as a text; what they are is found in them."""
    return "data:;base64," + base64.b64encode(content).decode()


def plain_row(values: dict[str, Any], origin: str) -> Record:
    """A record whose values are converted to those of JSON; a `BadRow` if JSON cannot represent one."""
    try:
        return RawRow({str(name): _plain(value, str(name)) for name, value in values.items()}, origin)
    except RowError as error:
        return BadRow(origin, str(error))


def _plain(value: Any, column: str) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, bytes) and column in IMAGE_COLUMNS:
        return data_url(value)
    if isinstance(value, dict):
        if value.keys() == STRUCT:
            return {**value, "bytes": data_url(value["bytes"])} if isinstance(value["bytes"], bytes) else dict(value)
        return {str(key): _plain(item, column) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, column) for item in value]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, PurePath)):
        return str(value)
    raise RowError(f"column {column!r} holds {type(value).__name__}, which JSON cannot carry")
