r"""Parts of a text for rewards: `<answer>` blocks, `\boxed{}`, the string form of an answer, lengths."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_WRAPPERS = (("\\boxed{", "}"), ("\\text{", "}"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def answer_block(text: str) -> str | None:
    """The content of the last complete `<answer>` block, or None without one.

    >>> answer_block("<answer>1</answer> no: <answer>2</answer> <answer>3")
    '2'
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces balanced; None without one.

    >>> last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        opening = start + len("\\boxed")
        closing = _closing_brace(text, opening, end)
        if closing is not None:
            return text[opening + 1 : closing]
        end = start
    return None


def _closing_brace(text: str, opening: int, end: int) -> int | None:
    """The index of the brace that closes that at `opening`, before `end`; None without one."""
    depth = 0
    for match in re.finditer(r"[{}]", text[opening:end]):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return opening + match.start()
    return None


def normalise(text: str) -> str:
    r"""The form in which two answers are compared as strings.

    Unicode NFKC, case folding, all whitespace removed, then enclosing `\boxed{}`, `\text{}`, `$ $`,
    `\( \)`, `\[ \]` and a final period, as often as they occur around the whole.

    >>> normalise(r"$\text{ Paris }$.")
    'paris'
    """
    text = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    while (shorter := _unwrap(text)) != text:
        text = shorter
    return text


def _unwrap(text: str) -> str:
    text = text.removesuffix(".")
    for start, end in _WRAPPERS:
        if len(text) < len(start) + len(end) or not (text.startswith(start) and text.endswith(end)):
            continue
        inner = text[len(start) : -len(end)]
        if end == "}" and _closing_brace(text, len(start) - 1, len(text)) != len(text) - 1:
            continue
        if start == "$" and "$" in inner:
            continue
        return inner
    return text


def lengths(completions: list[str], response_token_ids: list[Any] | None) -> list[int]:
    """Generated tokens of each completion, the end token included; words if a text has no tokens."""
    ids = response_token_ids or [None] * len(completions)
    return [len(text.split() if own is None else own) for text, own in zip(completions, ids, strict=True)]
