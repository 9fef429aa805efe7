"""Datasets that plugins register: what becomes of a row before its columns are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""A row under the names of its file -> the row to use, or None to leave it out."""

PREPROCESSORS: dict[str, RowFunction] = {}
"""Hub id or path, as `--dataset` names it -> its function."""


def register_preprocessor(names: list[str], function: RowFunction) -> None:
    """Let `function` read the rows of these datasets."""
    PREPROCESSORS.update(dict.fromkeys(names, function))
