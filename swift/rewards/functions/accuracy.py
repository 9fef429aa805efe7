"""Accuracy: math-verify if the ground truth is mathematics, string equality otherwise.

The score of one (ground truth, completion) pair is a pure function and is cached per worker under a digest of the pair,
so `accuracy` and `cosine`, listed together, parse every completion once.

A computer algebra system would not finish an answer such as 9^(9^(9^9)), and some of its code cannot be interrupted by
a timer. Numbers of more than `MAX_POWER_DIGITS` digits are therefore not compared: such an answer is wrong unless it is
written exactly like the ground truth.
"""

from __future__ import annotations

import hashlib
import math
import threading
from functools import lru_cache
from typing import Any, Literal

from swift.errors import shortened
from swift.plugin.registry import ORM, orms
from swift.rewards.functions.text import answer_block, last_boxed, normalise

MAX_POWER_DIGITS = 10_000
KEPT_SCORES = 8192
KEPT_TRUTHS = 256
KEPT_CHARS = 200
"""Of the answer that was read from a completion."""

TruthKind = Literal["parsed", "unparsed", "missing"]
Grade = tuple[bool, str | None]
"""Whether an answer is right, and the answer that was read from the completion."""


@orms.register("accuracy")
class MathAccuracy(ORM):
    """1.0 for a right answer, 0.0 for a wrong one.

    `counters` holds how many samples had a ground truth that math-verify cannot parse (compared as strings)
    and how many had none (0.0); the reward worker reads and resets it after each call. `extracted` holds the answer
    that was read from each completion of the last call, None for none.
    """

    counts_ground_truths = True

    def __init__(self) -> None:
        super().__init__()
        import math_verify

        math_verify.parse("1")  # compiles the extraction patterns, which takes longer than many an answer
        self.counters = {"gold_unparsed": 0, "gold_missing": 0}
        self.extracted: list[str | None] = []

    def __call__(self, completions: list[str], solution: list[Any], **kwargs: Any) -> list[float]:
        """One reward per completion; `solution` holds the ground truths, usually the same for a whole group."""
        grades = [self._grade(text, truth) for text, truth in zip(completions, solution, strict=True)]
        self.extracted = [answer for _, answer in grades]
        return [float(is_right) for is_right, _ in grades]

    def _grade(self, completion: str, solution: Any) -> Grade:
        truth = ground_truth(solution)
        kind = truth_kind(truth)
        if kind != "parsed":
            self.counters[f"gold_{kind}"] += 1
        return grade(completion, truth)


def ground_truth(solution: Any) -> str:
    """The ground truth as text: the last `<answer>` block of `solution`, else all of it; "" when missing."""
    if solution is None:
        return ""
    text = str(solution)
    block = answer_block(text)
    return (text if block is None else block).strip()


@lru_cache(maxsize=KEPT_TRUTHS)
def truth_kind(truth: str) -> TruthKind:
    """Whether math-verify can parse `truth`; "missing" if it is empty."""
    if not truth:
        return "missing"
    return "parsed" if any(not isinstance(item, str) for item in _parse_truth(truth)) else "unparsed"


_grades: dict[bytes, Grade] = {}


def grade(completion: str, truth: str) -> Grade:
    """Whether `completion` answers `truth` (a result of `ground_truth`), and its answer; never raises on any text."""
    key = b"".join(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (truth, completion))
    if key not in _grades:
        if len(_grades) >= KEPT_SCORES:
            del _grades[next(iter(_grades))]
        is_right, answer = _compare(completion, truth)
        _grades[key] = is_right, answer if answer is None else shortened(answer, KEPT_CHARS)
    return _grades[key]


def _compare(completion: str, truth: str) -> Grade:
    kind = truth_kind(truth)
    if kind == "missing":
        return False, None
    if kind == "unparsed":
        answer = answer_block(completion)
        if answer is None:
            answer = last_boxed(completion)
        return answer is not None and normalise(answer) == normalise(truth), answer
    parsed = _parse_answer(completion)
    return _equivalent(truth, parsed), next((item for item in parsed if isinstance(item, str)), None)


@lru_cache(maxsize=KEPT_TRUTHS)
def _parse_truth(truth: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(truth, extraction_mode="first_match", parsing_timeout=_limit_s()))


def _parse_answer(completion: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    block = answer_block(completion)
    if block is not None:
        return parse(block, extraction_mode="first_match", parsing_timeout=_limit_s())
    anchored = LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)
    limit_s = _limit_s()
    return parse(completion, extraction_config=[anchored], extraction_mode="first_match", parsing_timeout=limit_s)


def _limit_s() -> int:
    """Time limit of math-verify; 0 (none) in schedulers, because its timer needs the main thread."""
    return 5 if threading.current_thread() is threading.main_thread() else 0


def _equivalent(truth: str, answer: list[Any]) -> bool:
    from math_verify import verify

    if not answer:
        return False
    parsed_truth = _parse_truth(truth)
    # The library returns the parsed expression and its source; equal sources need no algebra.
    truth_sources = {item for item in parsed_truth if isinstance(item, str)}
    if any(isinstance(item, str) and item in truth_sources for item in answer):
        return True
    safe = [item for item in answer if not has_huge_power(item)]
    truths = [item for item in parsed_truth if not has_huge_power(item)]
    return bool(safe and truths) and bool(verify(truths, safe, timeout_seconds=_limit_s()))


def has_huge_power(expression: Any) -> bool:
    """Whether a sympy expression holds a power or factorial of numbers with more than `MAX_POWER_DIGITS` digits."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return False
    nodes = sympy.preorder_traversal(expression)
    powers = (node for node in nodes if isinstance(node, sympy.Pow | sympy.factorial) and node.is_number)
    return any(_log10(node) > MAX_POWER_DIGITS for node in powers)


def _log10(number: Any) -> float:
    """An upper estimate of log10 of the absolute value of a numeric expression, without computing it."""
    import sympy

    if isinstance(number, sympy.Pow):
        return abs(_log10(number.base)) * _magnitude(number.exp)
    if isinstance(number, sympy.factorial):
        argument = _magnitude(number.args[0])
        return argument * math.log10(argument + 1)
    if isinstance(number, sympy.Add):
        return max(map(_log10, number.args)) + math.log10(len(number.args))
    if isinstance(number, sympy.Mul):
        return sum(map(_log10, number.args))
    if not isinstance(number, sympy.Number | sympy.NumberSymbol):
        return 0.0
    try:
        value = abs(float(number))
    except OverflowError:
        return math.inf
    return math.log10(value) if value else 0.0


def _magnitude(number: Any) -> float:
    size = _log10(number)
    return 10.0**size if size < 300 else math.inf
