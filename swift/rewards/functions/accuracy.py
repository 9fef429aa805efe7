"""Is the answer right? math-verify where the ground truth is mathematics, string equality elsewhere.

The score of one (ground truth, completion) pair is a pure function and is remembered per worker, so `accuracy`
and `cosine`, listed together, parse every completion once.

An answer such as 9^(9^(9^9)) would keep a computer algebra system busy for ever, some of it in code that
no timer can interrupt. Powers beyond `MAX_POWER_DIGITS` digits are therefore never handed to the
comparison: such an answer is wrong unless it is written exactly like the ground truth.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import Any, Literal

from swift.plugin.registry import ORM
from swift.rewards.functions.text import answer_block, last_boxed, normalise

logger = logging.getLogger("swift.rewards")

MAX_POWER_DIGITS = 10_000
CACHE_ENTRIES = 8192

TruthKind = Literal["parsed", "unparsed", "missing"]


class MathAccuracy(ORM):
    """1.0 for a right answer, 0.0 for a wrong one.

    `counters` holds how many samples had a ground truth that math-verify cannot parse (compared as strings)
    and how many had none at all (0.0); the reward pipeline reads and resets it after each call.
    """

    def __init__(self) -> None:
        super().__init__()
        import math_verify

        math_verify.parse("1")  # compiles the extraction patterns, which takes longer than many an answer
        self.counters = {"gold_unparsed": 0, "gold_missing": 0}
        self._warned: set[str] = set()

    def __call__(self, completions: list[str], solution: list[Any], **kwargs: Any) -> list[float]:
        """One reward per completion; `solution` holds the ground truths, usually the same for a whole group."""
        return [self._score(text, truth) for text, truth in zip(completions, solution, strict=True)]

    def _score(self, completion: str, solution: Any) -> float:
        truth = ground_truth(solution)
        kind = truth_kind(truth)
        if kind != "parsed":
            self.counters[f"gold_{kind}"] += 1
            self._warn(kind, solution)
        return float(is_right(completion, truth))

    def _warn(self, kind: str, solution: Any) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            effect = "scored 0.0" if kind == "missing" else "compared as a string"
            logger.warning("warning: accuracy: ground truth %r is %s: %s", str(solution)[:200], kind, effect)


def ground_truth(solution: Any) -> str:
    """The ground truth as text: the last `<answer>` block of `solution`, else all of it; "" when missing."""
    if solution is None:
        return ""
    text = str(solution)
    block = answer_block(text)
    return (text if block is None else block).strip()


@lru_cache(maxsize=CACHE_ENTRIES)
def truth_kind(truth: str) -> TruthKind:
    """Whether math-verify understands `truth`; "missing" for an empty one."""
    if not truth:
        return "missing"
    return "parsed" if _is_mathematics(_parse_truth(truth)) else "unparsed"


@lru_cache(maxsize=CACHE_ENTRIES)
def is_right(completion: str, truth: str) -> bool:
    """Whether `completion` answers `truth` (a result of `ground_truth`); never raises on any text."""
    kind = truth_kind(truth)
    if kind == "missing":
        return False
    if kind == "unparsed":
        return _same_string(completion, truth)
    return _equivalent(truth, _parse_answer(completion))


def _same_string(completion: str, truth: str) -> bool:
    answer = answer_block(completion)
    if answer is None:
        answer = last_boxed(completion)
    return answer is not None and normalise(answer) == normalise(truth)


@lru_cache(maxsize=CACHE_ENTRIES)
def _parse_truth(truth: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(truth, extraction_mode="first_match"))


def _parse_answer(completion: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    block = answer_block(completion)
    if block is not None:
        return parse(block, extraction_mode="first_match")
    anchored = LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)
    return parse(completion, extraction_config=[anchored], extraction_mode="first_match")


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
    return bool(safe and truths) and bool(verify(truths, safe))


def _is_mathematics(parsed: tuple[Any, ...]) -> bool:
    return any(not isinstance(item, str) for item in parsed)


def has_huge_power(expression: Any) -> bool:
    """Whether a sympy expression holds a power of numbers with more than `MAX_POWER_DIGITS` digits."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return False
    return any(_digits(node) > MAX_POWER_DIGITS for node in sympy.preorder_traversal(expression))


def _digits(node: Any) -> float:
    """An upper estimate of the decimal digits of a numeric power or factorial; 0 for anything else."""
    import sympy

    if isinstance(node, sympy.factorial) and node.args[0].is_number:
        argument = _magnitude(node.args[0])
        return argument * math.log10(argument + 1) if argument < 1e12 else math.inf
    if isinstance(node, sympy.Pow) and node.base.is_number and node.exp.is_number:
        exponent, base = _magnitude(node.exp), _magnitude(node.base)
        if exponent > MAX_POWER_DIGITS * 4 and base > 1:
            return math.inf if math.isinf(base) else exponent * math.log10(base)
    return 0.0


def _magnitude(number: Any) -> float:
    """The absolute value of a numeric expression as a float, inf when it is itself a tower or too large."""
    import sympy

    if isinstance(number, sympy.Rational | sympy.Float):
        try:
            return abs(float(number))
        except OverflowError:
            return math.inf
    if isinstance(number, sympy.Pow) and number.base.is_number and number.exp.is_number:
        base, exponent = _magnitude(number.base), _magnitude(number.exp)
        if base <= 1:
            return 1.0
        return base**exponent if exponent * math.log10(base) < 300 else math.inf
    if isinstance(number, sympy.Add | sympy.Mul):
        parts = [_magnitude(part) for part in number.args]
        return sum(parts) if isinstance(number, sympy.Add) else math.prod(parts)
    if isinstance(number, sympy.factorial):
        argument = _magnitude(number.args[0])
        return math.gamma(argument + 1) if argument < 170 else math.inf
    return 1.0
