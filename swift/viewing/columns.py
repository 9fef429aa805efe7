"""Values that are appended, and which of them count."""

from __future__ import annotations

from typing import Any

import numpy as np


class Column:
    """Values that are appended, so that views of those before stay what they are.

    kind: of the values. missing: that of rows which got none.
    """

    def __init__(self, kind: type, missing: float = 0) -> None:
        self._missing = missing
        self._values: np.ndarray = np.full(64, missing, kind)

    def put(self, start: int, values: Any) -> None:
        """Set the rows from `start`, which nobody has seen yet."""
        self.view(start + len(values))[start:] = values

    def view(self, count: int) -> np.ndarray:
        """The first `count` rows."""
        if count > len(self._values):
            grown = np.full(max(count, 2 * len(self._values)), self._missing, self._values.dtype)
            grown[: len(self._values)] = self._values
            self._values = grown
        return self._values[:count]


def current(steps: np.ndarray, attempts: np.ndarray) -> np.ndarray:
    """[R] Which rows are of the newest attempt that has rows of their step, as in `read_log`."""
    if not len(attempts) or attempts.min() == attempts.max():
        return np.ones(len(attempts), bool)
    different, number = np.unique(steps, return_inverse=True)
    newest = np.zeros(len(different), attempts.dtype)
    np.maximum.at(newest, number, attempts)
    return np.asarray(attempts == newest[number])
