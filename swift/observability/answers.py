"""Whether a completion gives its ground truth, by a reading that is more generous than any reward function.

Used to find rewards that do not see right answers: tags, boxes, "the answer is", or simply the last number of the text.
"""

from __future__ import annotations

import re
from typing import Any

MARKED = (
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"####\s*([^\n]+)"),
    re.compile(r"(?:answer|result|solution)(?: is|:|=)\s*:?\s*([^\n]+?)(?:\.?\s*$|\.\s|\n)", re.IGNORECASE),
)
"""Ways to mark an answer; of one way the last place in the text counts."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
DRESSING = " \t\n$*`'\"()[]{}.,;:!"


def is_right(completion: str, truth: Any, *, cut: bool = False) -> bool:
    """Whether the completion's answer is the ground truth; False if there is none. cut: at the length limit."""
    wanted = [plain(one) for one in answers_in(str(truth))] if truth is not None else []
    return any(bool(one) and same(plain(found), one) for one in wanted for found in answers_in(completion, cut=cut))


def answers_in(text: str, *, cut: bool = False) -> list[str]:
    """What may be the answer of a text: the marked ones, else the whole text, its last line and its last number.

    A text that is cut has marked answers only: the last number of it is somewhere in its midst.
    """
    marked = [found[-1] for way in MARKED if (found := way.findall(text))]
    if marked or cut:
        return marked
    lines, numbers = text.strip().splitlines(), NUMBER.findall(text)
    return [text, *lines[-1:], *numbers[-1:]]


def plain(answer: str) -> str:
    """An answer without what surrounds it, and of an equation its right side."""
    return answer.rpartition("=")[2].strip(DRESSING).casefold()


def same(first: str, second: str) -> bool:
    """Whether two plain answers are the same text or the same number."""
    return first == second or (number(first) is not None and number(first) == number(second))


def number(text: str) -> float | None:
    """The number that a text is; None for other texts."""
    bare = text.replace(",", "")
    return float(bare) if re.fullmatch(r"-?\d+(?:\.\d+)?", bare) else None
