"""Which requests the transformers engine decodes together: batches that fit its key/value cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from swift.rollout.engines.decoding import BatchRun
from swift.types import Request

JOIN_SHARE = 1 / 8
"""Of the running rows, how many must be able to join for the cache to be arranged anew, unless all that wait can."""


@dataclass(frozen=True, slots=True)
class BatchRule:
    """What a batch may hold.

    max_rows: rows. slots: (row, position) slots of the cache. one_length: whether prompts must be of one length.
    room: most tokens of a request.
    """

    max_rows: int
    slots: int
    one_length: bool
    room: Callable[[Request], int]

    def first(self, requests: Sequence[Request]) -> list[Request]:
        """The requests of the next batch; samples of a prompt stay together."""
        ordered = sorted(requests, key=lambda one: len(one.prompt_ids)) if self.one_length else requests
        batch: list[Request] = []
        width = length = 0  # the cache is as wide as the longest prompt, and goes on for the largest limit
        for request in grouped(ordered):
            width, length = max(width, len(request.prompt_ids)), max(length, self.room(request))
            other = self.one_length and batch and len(request.prompt_ids) != len(batch[-1].prompt_ids)
            if batch and (other or not self._fits(len(batch) + 1, width + length)):
                break
            batch.append(request)
        return batch

    def joining(self, waiting: Sequence[Request], run: BatchRun) -> list[Request]:
        """Waiting requests that join the running batch, in their order up to the first that cannot."""
        live = run.live()
        width, length = max(len(one.prompt_ids) for one, _ in live), max(budget for _, budget in live)
        found: list[Request] = []
        for request in grouped(waiting):
            width, length = max(width, len(request.prompt_ids)), max(length, self.room(request))
            if not run.takes(request) or not self._fits(len(live) + len(found) + 1, width + 2 * length):
                break
            found.append(request)
        return found if len(found) == len(waiting) or len(found) >= JOIN_SHARE * len(live) else []

    def _fits(self, num_rows: int, slots: int) -> bool:
        return num_rows <= self.max_rows and num_rows * slots <= self.slots


def cache_slots(config: Any, element_size: int, cache_bytes: int) -> int:
    """How many (row, position) slots a cache of so many bytes has.

    Args:
        config: of the decoder.
        element_size: bytes of a number.
        cache_bytes: of all layers.
    """
    heads = getattr(config, "num_attention_heads", None) or 1
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return max(1, cache_bytes // (2 * config.num_hidden_layers * kv_heads * head_size * element_size))


def grouped(requests: Iterable[Request]) -> list[Request]:
    """The requests in their order, but for those of a prompt, which come with the first of them."""
    by_prompt: OrderedDict[tuple[int, ...], list[Request]] = OrderedDict()
    for request in requests:
        by_prompt.setdefault(tuple(request.prompt_ids), []).append(request)
    return [request for group in by_prompt.values() for request in group]
