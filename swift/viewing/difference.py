"""What differs between two texts, by words; by lines where they are long and have little in common."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Literal

Kind = Literal["equal", "first", "second"]
MOST_PAIRS = 4_000_000
"""Pairs of words that are compared at most; above it lines are."""


def differences(first: str, second: str) -> list[tuple[Kind, str]]:
    """Pieces in order: what both have, and what only the first or the second has."""
    a, b = _words(first), _words(second)
    start = _common(a, b)
    end = _common(a[start:][::-1], b[start:][::-1])
    middle_a, middle_b = a[start : len(a) - end], b[start : len(b) - end]
    if len(middle_a) * len(middle_b) > MOST_PAIRS:
        middle_a, middle_b = ("".join(words).splitlines(keepends=True) for words in (middle_a, middle_b))
    found: list[tuple[Kind, str]] = [("equal", "".join(a[:start]))]
    for operation, i, j, k, m in SequenceMatcher(None, middle_a, middle_b, autojunk=False).get_opcodes():
        if operation == "equal":
            found.append(("equal", "".join(middle_a[i:j])))
        else:
            found += [("first", "".join(middle_a[i:j])), ("second", "".join(middle_b[k:m]))]
    found.append(("equal", "".join(a[len(a) - end :])))
    return [piece for piece in found if piece[1]]


def _words(text: str) -> list[str]:
    return re.findall(r"\s+|\w+|[^\w\s]", text)


def _common(a: list[str], b: list[str]) -> int:
    """How many words both begin with."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count
