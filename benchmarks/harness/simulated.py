"""An engine with a clock in place of a model: every decode step takes a fixed time and a little more for each row.

That is how a decode step of a large model behaves on an accelerator: reading the weights costs the same for one row as
for many. Rows join as soon as a slot is free and leave when they end, as in vLLM. Lengths have a long tail and depend
on the seed of the request and on its prompt alone, so equal requests are equally long whoever asks.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Collection, Iterator

from swift.errors import EngineDead
from swift.rollout.engines.base import Capabilities, EngineCounters, InferenceEngine, TensorInfo, WeightUpdate
from swift.types import Completion, Request

TAIL = 0.7
"""Deviation of the log of a completion's length within a prompt; prompts differ from each other by half of it."""


class SimulatedEngine(InferenceEngine):
    """Decodes nothing, takes as long.

    Args:
        slots: rows decoded together; the others wait.
        fixed_s: seconds of a step, whatever is in it.
        row_s: seconds more for each row.
        typical_tokens: median length of completions.
    """

    def __init__(self, *, slots: int, fixed_s: float, row_s: float, typical_tokens: float) -> None:
        self.capabilities = Capabilities(
            name="simulated", logprob_support="full", seeded=True, shares_weights=True, max_model_len=1 << 20
        )
        self.counters = EngineCounters()
        self.version = 0
        self.slots, self.fixed_s, self.row_s, self.typical_tokens = slots, fixed_s, row_s, typical_tokens
        self._waiting: deque[Request] = deque()
        self._ends: dict[str, tuple[int, int]] = {}
        self._now = 0
        self._aborting: set[str] = set()
        self._closed = False

    def submit(self, request: Request) -> None:
        """Queue one sample."""
        self._waiting.append(request)

    def length(self, request: Request) -> int:
        """How many tokens the request will get."""
        of_prompt = random.Random(repr(list(request.prompt_ids))).gauss(0.0, TAIL / 2)
        of_sample = random.Random(request.sampling.seed).gauss(0.0, TAIL)
        tokens = self.typical_tokens * 2.718281828 ** (of_prompt + of_sample)
        return max(1, min(self.room(request), round(tokens)))

    def stream(self) -> Iterator[Completion]:
        """Completions as they end."""
        while True:
            self._between()
            if not (self._waiting or self._ends):
                return
            yield from self._step()

    def _step(self) -> list[Completion]:
        if self._closed:
            raise EngineDead("engine: simulated: it is closed")
        if self._aborting:
            return self._end_aborted()
        while self._waiting and len(self._ends) < self.slots:
            request = self._waiting.popleft()
            self._ends[request.request_id] = (self._now, self._now + self.length(request))
        time.sleep(self.fixed_s + self.row_s * len(self._ends))
        self._now += 1
        self.counters.decode_steps += 1
        self.counters.decode_rows += len(self._ends)
        ended = [name for name, (_, end) in self._ends.items() if end <= self._now]
        return [self._completion(name, self._ends.pop(name), "stop") for name in ended]

    def _end_aborted(self) -> list[Completion]:
        ended = [self._completion(name, self._ends.pop(name), "abort") for name in self._aborting & set(self._ends)]
        ended += [self._completion(one.request_id, (0, 0), "abort") for one in self._waiting]
        self._waiting.clear()
        self._aborting.clear()
        return ended

    def _completion(self, name: str, span: tuple[int, int], reason: str) -> Completion:
        tokens = min(self._now, span[1]) - span[0]
        return Completion(name, [1] * tokens, [-1.0] * tokens, reason, versions=[(self.version, 0, tokens)])

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End everything; a benchmark does so only when it fails."""
        self._aborting |= set(self._ends) if request_ids is None else set(request_ids)

    def begin_update(self, manifest: list[TensorInfo], version: int) -> WeightUpdate:
        """There are no weights."""
        raise self._unsupported("a weight update")

    def close(self) -> None:
        """Refuse further work."""
        self._closed = True
