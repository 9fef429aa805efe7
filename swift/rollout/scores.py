"""Scores of given tokens: a model's likeliest tokens at each place, as they travel with a completion and a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swift.types import TokenScores


def packed(ids_TK: np.ndarray, logprobs_TK: np.ndarray, own_T: np.ndarray) -> TokenScores:
    """Arrays in the form of the wire."""
    return TokenScores(
        ids_TK.shape[1],
        np.ascontiguousarray(ids_TK, dtype="<i4").tobytes(),
        np.ascontiguousarray(logprobs_TK, dtype="<f4").tobytes(),
        np.ascontiguousarray(own_T, dtype="<f4").tobytes(),
    )


def arrays_of(scores: TokenScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids [T, K], log-probs [T, K] and those of the tokens that are there, [T].

    Raises ValueError: the sizes do not fit.
    """
    ids, logprobs = np.frombuffer(scores.token_ids, "<i4"), np.frombuffer(scores.logprobs, "<f4")
    own = np.frombuffer(scores.own, "<f4")
    if ids.size != logprobs.size or ids.size != own.size * scores.top_k:
        raise ValueError(f"{ids.size} ids, {logprobs.size} log-probs, {own.size} tokens")
    return ids.reshape(own.size, -1), logprobs.reshape(own.size, -1), own


def from_entries(entries: Sequence[Mapping[Any, Any] | None], tokens: Sequence[int], top_k: int) -> TokenScores:
    """Scores in vLLM's form: for each token a map from ids to an entry with `logprob` and `rank`.

    Entries are objects of vLLM, or those of its JSON. The token that is there is among them in any case.

    Raises ValueError: one has fewer tokens, or another token.
    """
    ids_TK, logprobs_TK = np.zeros((len(tokens), top_k), "<i4"), np.zeros((len(tokens), top_k), "<f4")
    own_T = np.zeros(len(tokens), "<f4")
    for place, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        found = {int(name): value for name, value in (entry or {}).items()}
        pairs = sorted(((_of(value, "logprob"), name) for name, value in found.items()), reverse=True)[:top_k]
        if token not in found or len(pairs) < top_k:
            raise ValueError(
                f"{len(found)} tokens at place {place}, of which {token} is {'one' if token in found else 'none'}"
            )
        own_T[place] = _of(found[token], "logprob")
        ids_TK[place] = [name for _, name in pairs]
        logprobs_TK[place] = [logprob for logprob, _ in pairs]
    return packed(ids_TK, logprobs_TK, own_T)


def _of(entry: Any, name: str) -> float:
    return float(entry[name] if isinstance(entry, Mapping) else getattr(entry, name))
