"""Numbers that plugins return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

LARGEST = 3.4028234e38
"""The largest reward: rewards are logged, and compared between processes, as 32-bit floats."""


def is_finite(value: float) -> bool:
    """Whether a reward is a number that a 32-bit float can hold."""
    return abs(value) <= LARGEST


def as_number(value: Any) -> float | None:
    """A number, bool, 0-d array or tensor as a float, None as None; what is too large for a float is infinite.

    Raises TypeError: it is anything else, such as a text that reads as a number.
    """
    if value is None:
        return None
    if isinstance(value, str | bytes | bytearray | complex):
        raise TypeError(f"is {value!r:.80}, not a number or None")
    shape: Sequence[int] = getattr(value, "shape", ())
    if len(shape):
        raise TypeError(f"has shape {tuple(shape)}, not a single number")
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise TypeError(f"is a {type(value).__name__}, not a number or None") from None
