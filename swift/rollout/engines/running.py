"""Outstanding requests of a backend with their tokens so far; `abort` may be called from any thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from swift.errors import EngineError, NumericError
from swift.rollout.routes import packed
from swift.types import Alternatives, Completion, FinishReason, Request

SoFar = tuple[Sequence[int], Sequence[float], Sequence[Alternatives]]
"""Tokens of an unfinished completion, their log-probs, and the likeliest alternatives, if requested."""
TAIL_SLACK_TOKENS = 8
"""Number of tokens decoded beyond the length of the stop text, as the text of a token may depend on others."""


@dataclass(slots=True)
class Running:
    """One request.

    pinned: version of the adapter that it samples with; None: the version of the weights. routes: the experts of its
    tokens in the order of computing, [tokens, layers, top-k] each.
    """

    request: Request
    pinned: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    log_mass: list[float] = field(default_factory=list)
    tops: list[Alternatives] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (version, first token)
    routes: list[np.ndarray] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens sampled with `version` of the weights. Raises NumericError: an invalid log-prob."""
        if problem := logprob_problem(logprobs, len(self.token_ids)):
            raise NumericError(
                f"request: {self.request.request_id}: {problem}: the model's output is not finite; look at its weights"
            )
        version = version if self.pinned is None else self.pinned
        if token_ids and (not self.spans or self.spans[-1][0] != version):
            self.spans.append((version, len(self.token_ids)))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)

    @property
    def num_computed(self) -> int:
        """Number of tokens that were inputs of the model: the prompt, and all sampled ones but the last."""
        return len(self.request.prompt_ids) + max(0, len(self.token_ids) - 1)

    def completion(self, reason: FinishReason) -> Completion:
        """Its tokens so far as a completion."""
        ends = [*(start for _, start in self.spans[1:]), len(self.token_ids)][: len(self.spans)]
        return Completion(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=reason,
            versions=[(version, start, end) for (version, start), end in zip(self.spans, ends, strict=True)],
            log_mass=self.log_mass,
            top_logprobs=self.tops,
            routes=packed(self.routes, self.num_computed) if self.routes else None,
        )


R = TypeVar("R", bound=Running)


class RunningRequests(dict[str, R]):
    """Requests by id. Other threads than the sampling one may call `abort` only."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._to_abort: set[str] = set()

    def insert(self, running: R) -> None:
        """Add a request. Raises EngineError: its id is outstanding."""
        name = running.request.request_id
        if name in self:
            raise EngineError(f"request: {name}: is outstanding already; give each an id of its own")
        with self._lock:
            self[name] = running

    def take(self, request_id: str) -> R | None:
        """Remove and return a request; None for an unknown id."""
        with self._lock:
            return self.pop(request_id, None)

    def so_far(self, request_id: str) -> SoFar:
        """The tokens of a request so far; empty for an unknown id."""
        running = self.get(request_id)
        return ((), (), ()) if running is None else (running.token_ids, running.logprobs, running.tops)

    def abort(self, request_ids: Collection[str] | None) -> None:
        """Mark requests for the next `take_aborted`, all with None; unknown ids are ignored."""
        with self._lock:
            self._to_abort.update(self.keys() if request_ids is None else self.keys() & set(request_ids))

    def take_aborted(self) -> list[R]:
        """Remove and return the requests marked by `abort`, in the order of their insertion."""
        if not self._to_abort:
            return []
        with self._lock:
            taken = [self.pop(name) for name in list(self) if name in self._to_abort]
            self._to_abort.clear()
        return taken


def logprob_problem(logprobs: Sequence[float], first: int = 0) -> str:
    """Description of the first invalid log-prob of tokens numbered from `first`; "" if there is none."""
    for place, logprob in enumerate(logprobs, start=first):
        if not (logprob <= 0 and math.isfinite(logprob)):
            return f"token {place} has log-prob {logprob}"
    return ""


def ends_with_stop(token_ids: Sequence[int], words: Sequence[str], tokenizer: Any, least: int = 0) -> bool:
    """Whether the tokens contain a stop text that ends after `least` tokens; decodes only the last tokens."""
    if not words or len(token_ids) <= least:
        return False
    first = max(0, len(token_ids) - max(len(word) for word in words) - TAIL_SLACK_TOKENS)
    tail = token_ids[first:]
    return first_stop(tail, words, max(0, least - first), partial(tokenizer.decode, skip_special_tokens=False))[0] >= 0


def first_stop(
    token_ids: Sequence[int], words: Sequence[str], least: int, decode: Callable[[Sequence[int]], str]
) -> tuple[int, str]:
    """Position and text of the first stop text that ends after `least` tokens; (-1, "") if there is none."""
    text, early = decode(token_ids), len(decode(token_ids[:least]).rstrip("\ufffd")) if least else 0
    found = [(text.find(word, max(0, early - len(word) + 1)), word) for word in words]
    return min(((place, word) for place, word in found if place >= 0), default=(-1, ""))
