"""Textual stop words: a row ends when its decoded tail contains one of its request's stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from swift.types import Request

TAIL_SLACK_TOKENS = 8
"""Tokens decoded beyond the stop word's length, for tokenizers whose tokens depend on their neighbours."""


def ends_with_stop(token_ids: Sequence[int] | np.ndarray, words: Sequence[str], tokenizer: Any) -> bool:
    """Whether the text that has been sampled contains a stop string; only the tail of the tokens is decoded."""
    if not words:
        return False
    tail = token_ids[-(max(len(word) for word in words) + TAIL_SLACK_TOKENS) :]
    text = tokenizer.decode([int(token) for token in tail], skip_special_tokens=False)
    return any(word in text for word in words)


class StopText:
    """Checks the rows that have stop strings; free when no request has any.

    Args:
        requests: one per row of the batch.
        tokenizer: a transformers tokenizer; needed when any request has stop strings.
    """

    def __init__(self, requests: Sequence[Request], tokenizer: Any) -> None:
        self.words = [request.sampling.stop for request in requests]
        self.minimum = [request.sampling.min_tokens for request in requests]
        self.active = any(self.words)
        if self.active and tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        self.tokenizer = tokenizer

    def extend(self, requests: Sequence[Request]) -> None:
        """Add rows."""
        more = StopText(requests, self.tokenizer)
        self.words += more.words
        self.minimum += more.minimum
        self.active |= more.active

    def check(self, tokens: np.ndarray, rows: Tensor, lengths: Sequence[int]) -> np.ndarray:
        """[live rows] bool: whether the text that a row has sampled contains a stop string of it.

        Args:
            tokens: [requests, T] sampled ids.
            rows: the request of each live row.
            lengths: of each live row, the tokens it has sampled: valid columns.
        """
        found = np.zeros(rows.numel(), dtype=bool)
        if self.active:
            for row, request in enumerate(rows.tolist()):
                words, step = self.words[request], lengths[row]
                if step >= self.minimum[request]:
                    found[row] = ends_with_stop(tokens[request, :step], words, self.tokenizer)
        return found
