"""Textual stop words: a completion ends when its decoded tail contains one of its request's stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TAIL_SLACK_TOKENS = 8
"""Tokens decoded beyond the stop word's length, for tokenizers whose tokens depend on their neighbours."""


def ends_with_stop(token_ids: Sequence[int], words: Sequence[str], tokenizer: Any) -> bool:
    """Whether the text that has been sampled contains a stop string; only the tail of the tokens is decoded."""
    if not words:
        return False
    tail = token_ids[-(max(len(word) for word in words) + TAIL_SLACK_TOKENS) :]
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return any(word in text for word in words)
