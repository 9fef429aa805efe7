"""A batch in memory: prefill, decode step, sampling, and rows that leave. The arithmetic of the in-process engine.

A prompt is prefilled once for all its samples; a finished row costs nothing from the next compaction on (at a quarter
of the rows finished); no Python work per token, only per step. Every sample draws from its own counter-based uniforms,
so other requests in the batch do not change it. R rows with a key/value cache of K slots per layer::

    slots     [ left padding | prompt | generated so far | free ]
              0              W        W + t              K          W = longest prompt, t = decode steps

A model that cannot be packed (sliding windows, recurrent layers) keeps its own attention and its own cache; its
batches hold prompts of one length, so that nothing is padded and nothing can depend on padding.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swift.errors import EngineError
from swift.models.forward import DecodeLayout, GroupSpans, SegmentLayout, Span
from swift.rollout.engines.base import EngineCounters
from swift.rollout.engines.guided import GuideFactory, Guides
from swift.rollout.engines.sampling import BatchSampler
from swift.rollout.engines.stopping import StopText
from swift.rollout.seeds import sample_uniforms
from swift.types import Completion, FinishReason, Request

logger = logging.getLogger(__name__)

COMPACT_WHEN_FINISHED = 0.25
"""Share of finished rows at which they leave the batch: compaction copies the cache, so not at every row."""


class BatchRun:
    """One batch from prefill to its last token.

    Args:
        requests: the rows.
        budgets: most tokens of each.
        eos_token_ids: end every row.
        tokenizer: for textual stop words.
        device: of the model.
        counters: what is done is counted there.
        guides: compiles regular expressions; needed when a request has one.
    """

    def __init__(
        self,
        requests: list[Request],
        budgets: Sequence[int],
        *,
        eos_token_ids: Sequence[int],
        tokenizer: Any,
        device: torch.device,
        counters: EngineCounters,
        guides: GuideFactory | None = None,
    ) -> None:
        self.requests = requests
        self.device = device
        self.counters = counters
        self.longest = max(budgets)
        self.rows = torch.arange(len(requests))  # request of each live row, on the CPU
        self.step_count = 0
        self.tokens = torch.zeros(len(requests), self.longest, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(len(requests), self.longest, device=device)
        self.budget_R = torch.tensor(budgets, device=device)
        self.ends_RE = _end_tokens(requests, eos_token_ids).to(device)
        uniforms = np.stack([sample_uniforms(r.sampling.seed, self.longest) for r in requests])
        self.sampler = BatchSampler(requests, torch.from_numpy(uniforms).to(device), self.ends_RE)
        self.guides = Guides(requests, [[*eos_token_ids, *r.sampling.stop_token_ids] for r in requests], guides)
        self.stop_text = StopText(requests, tokenizer)
        self.finished_R = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self.cache: Any = None
        self.lengths_R = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
        self.num_broken = 0
        """Rows that ended because they had no distribution to sample from."""
        self._versions: list[tuple[int, int]] = []  # (version, first step that was sampled with it)

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return self.rows.numel() == 0

    def row(self, request: int) -> tuple[list[int], list[float]]:
        """What a request has sampled so far."""
        return self.tokens[request, : self.step_count].tolist(), self.logprobs[request, : self.step_count].tolist()

    def step(self, model: nn.Module, version: int) -> list[Completion]:
        """Sample one token per live row; the completions that end with it, in request order.

        A row without a distribution to sample from (its logits are not numbers) ends alone, with "error".

        Args:
            model: may hold other weights than at the step before.
            version: of its weights.

        Raises:
            EngineError: that happened to every row of the batch.
        """
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, self.step_count))
        return self._sample(self._prefill(model) if self.cache is None else self._decode(model))

    def end(self, request_ids: Collection[str]) -> list[Completion]:
        """End some requests where they are; the completions of those that had not ended yet."""
        rows = enumerate(zip(self.rows.tolist(), self.finished_R.tolist(), strict=True))
        live = [(i, request) for i, (request, finished) in rows if not finished]
        ended = [(i, request) for i, request in live if self.requests[request].request_id in request_ids]
        if not ended:
            return []
        self.finished_R[[i for i, _ in ended]] = True
        completions = [self._completion(request, "abort") for _, request in ended]
        self._compact()
        return completions

    def _prefill(self, model: nn.Module) -> Tensor:
        """Run each distinct prompt once; fill the rows' caches; logits [R, V] of the first token."""
        distinct, which = _distinct_prompts(self.requests)
        spans: list[Span] = []
        for prompt in distinct:
            spans.append(Span(spans[-1].stop if spans else 0, len(prompt)))
        ids = torch.tensor([token for prompt in distinct for token in prompt], device=self.device)
        positions = torch.cat([torch.arange(span.length, device=self.device) for span in spans])
        capture = _PromptCapture()
        output = model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_layout=SegmentLayout([GroupSpans(span, ()) for span in spans], self.device),
            logits_to_keep=torch.tensor([span.stop - 1 for span in spans], device=self.device),
            past_key_values=capture,
            use_cache=True,
        )
        self.cache = _RowCache(capture.layers, [spans[i] for i in which], self.longest)
        self.counters.prefill_tokens += ids.numel()
        return output.logits[0][torch.tensor(which, device=self.device)]

    def _decode(self, model: nn.Module) -> Tensor:
        """One decode step of all live rows; logits [R, V]."""
        output = model(
            input_ids=self._last_tokens()[:, None],
            position_ids=(self.lengths_R + self.step_count - 1)[:, None],
            attention_layout=DecodeLayout(self.cache.begin_step()),
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _last_tokens(self) -> Tensor:
        return self.tokens[self.rows.to(self.device), self.step_count - 1]

    def _sample(self, logits: Tensor) -> list[Completion]:
        """Draw one token per live row, note the rows that end, and compact when enough have ended."""
        rows = self.rows.to(self.device)
        token_R, logprob_R = self.sampler.draw(self.guides.mask(logits, self.rows), self.step_count)
        self.guides.advance(token_R, self.rows)
        self.tokens[rows, self.step_count] = token_R
        self.logprobs[rows, self.step_count] = logprob_R
        self.counters.decode_rows += int((~self.finished_R).sum())
        self.counters.decode_steps += 1
        self.step_count += 1
        stopped_R = (token_R[:, None] == self.ends_RE).any(1)
        stopped_R |= self.stop_text.check(self.tokens, self.rows, self.step_count)
        broken_R = ~logprob_R.isfinite()
        ended_R = (stopped_R | broken_R | (self.step_count >= self.budget_R)) & ~self.finished_R
        if not bool(ended_R.any()):
            return []
        self._note_broken(broken_R & ended_R)
        finished = [
            self._broken_completion(int(self.rows[i]))
            if bool(broken_R[i])
            else self._completion(int(self.rows[i]), "stop" if bool(stopped_R[i]) else "length")
            for i in ended_R.nonzero()[:, 0].tolist()
        ]
        self.finished_R |= ended_R
        self._compact()
        return finished

    def _note_broken(self, broken_R: Tensor) -> None:
        """Count the rows that have no distribution to sample from; raises when that is every row of the batch."""
        if not bool(broken_R.any()):
            return
        self.num_broken += int(broken_R.sum())
        request = self.requests[int(self.rows[int(broken_R.nonzero()[0, 0])])]
        problem = (
            f"request: {request.request_id}: token {self.step_count} cannot be sampled with the weights of version "
            f"{self._versions[-1][0]}: their logits are not finite"
        )
        if self.num_broken == len(self.requests):
            raise EngineError(f"{problem}; the policy has diverged, lower --learning_rate")
        logger.warning("%s; it is left out, with %d of %d completions", problem, self.num_broken, len(self.requests))

    def _broken_completion(self, request: int) -> Completion:
        """What a row has that cannot go on: everything but the token that was no draw from a distribution."""
        whole = self._completion(request, "error")
        length = len(whole.token_ids) - 1
        versions = [(version, start, min(stop, length)) for version, start, stop in whole.versions if start < length]
        return replace(whole, token_ids=whole.token_ids[:length], logprobs=whole.logprobs[:length], versions=versions)

    def _completion(self, request: int, reason: FinishReason) -> Completion:
        ids, logprobs = self.row(request)
        return Completion(
            request_id=self.requests[request].request_id,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            versions=self._spans(),
        )

    def _spans(self) -> list[tuple[int, int, int]]:
        """The version of each token so far, run-length coded."""
        stops = [*(start for _, start in self._versions), self.step_count][1:]
        spans = zip(self._versions, stops, strict=bool(self._versions))
        return [(version, start, stop) for (version, start), stop in spans]

    def _compact(self) -> None:
        """Drop finished rows once they are a quarter of the batch, or all of it."""
        share = float(self.finished_R.float().mean())
        if share < COMPACT_WHEN_FINISHED:
            return
        keep = (~self.finished_R).nonzero()[:, 0]
        self.rows = self.rows[keep.cpu()]
        self.finished_R, self.budget_R, self.ends_RE, self.lengths_R = (
            state[keep] for state in (self.finished_R, self.budget_R, self.ends_RE, self.lengths_R)
        )
        self.sampler.keep(keep)
        self._keep_cache(keep)

    def _keep_cache(self, keep: Tensor) -> None:
        self.cache.keep(keep)


class OwnCacheRun(BatchRun):
    """One batch of prompts of one length, decoded with the model's own attention and cache.

    Args:
        rotary: whether positions are given to the model; one without rotary positions counts them itself.
    """

    def __init__(self, *args: Any, rotary: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rotary = rotary

    def _prefill(self, model: nn.Module) -> Tensor:
        distinct, which = _distinct_prompts(self.requests)
        ids = torch.tensor(distinct, device=self.device)
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        rows = torch.tensor(which, device=self.device)
        self.cache = output.past_key_values
        self.cache.reorder_cache(rows)
        self.counters.prefill_tokens += ids.numel()
        return output.logits[:, -1][rows]

    def _decode(self, model: nn.Module) -> Tensor:
        positions = {"position_ids": (self.lengths_R + self.step_count - 1)[:, None]} if self.rotary else {}
        output = model(input_ids=self._last_tokens()[:, None], past_key_values=self.cache, use_cache=True, **positions)
        return output.logits[:, -1]

    def _keep_cache(self, keep: Tensor) -> None:
        if keep.numel():
            self.cache.reorder_cache(keep)


def _distinct_prompts(requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The different prompts in order of appearance, and which of them each request has."""
    index: dict[tuple[int, ...], int] = {}
    which = [index.setdefault(tuple(request.prompt_ids), len(index)) for request in requests]
    return list(index), which


def _end_tokens(requests: Sequence[Request], eos_token_ids: Sequence[int]) -> Tensor:
    """[R, E] the end tokens of each row, filled up with -1."""
    rows = [[*eos_token_ids, *request.sampling.stop_token_ids] or [-1] for request in requests]
    width = max(len(row) for row in rows)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


class _PromptCapture:
    """Stands in for a cache during prefill: hands keys and values through and remembers them per layer."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each attention layer with [1, Hkv, T, D]."""
        assert layer_idx == len(self.layers)
        self.layers.append((key, value))
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing precedes a prompt."""
        return 0


class _RowCache:
    """Keys and values of R rows, written in place; room for every step is taken once.

    Args:
        captured: per layer (key, value) of the packed prompts, [1, Hkv, T, D].
        spans: for each row, where its prompt lies in the packed stream.
        steps: most decode steps that will follow.
    """

    is_compileable = False

    def __init__(self, captured: list[tuple[Tensor, Tensor]], spans: list[Span], steps: int) -> None:
        self.width = max(span.length for span in spans)
        self.used = self.width
        self.capacity = self.width + steps - 1
        offsets = torch.tensor([self.width - span.length for span in spans])
        slots = torch.arange(self.width)
        source = (torch.tensor([span.start for span in spans])[:, None] + slots - offsets[:, None]).clamp(min=0)
        device = captured[0][0].device
        source = source.to(device)
        self.visible: Tensor | None = None
        if bool((offsets > 0).any()):
            self.visible = (torch.arange(self.capacity)[None] >= offsets[:, None]).to(device)
        self.layers = [(self._rows(key, source), self._rows(value, source)) for key, value in captured]

    def _rows(self, states: Tensor, source: Tensor) -> Tensor:
        rows = states.new_zeros(source.shape[0], states.shape[1], self.capacity, states.shape[3])
        rows[:, :, : self.width] = states[0][:, source].transpose(0, 1)
        if self.visible is not None:  # padding holds nothing of a neighbour: a mask does not keep NaN away
            rows[:, :, : self.width].masked_fill_(~self.visible[:, None, : self.width, None], 0.0)
        return rows

    def begin_step(self) -> Tensor | None:
        """Take the next slot; the mask [R, 1, 1, K] over the slots in use, None when all are visible."""
        self.used += 1
        return None if self.visible is None else self.visible[:, None, None, : self.used]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one new position per row, [R, Hkv, 1, D]; returns all positions so far."""
        keys, values = self.layers[layer_idx]
        keys[:, :, self.used - 1] = key[:, :, 0]
        values[:, :, self.used - 1] = value[:, :, 0]
        return keys[:, :, : self.used], values[:, :, : self.used]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the current step."""
        return self.used - 1

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows`; never more than one layer exists twice."""
        for index, (keys, values) in enumerate(self.layers):
            self.layers[index] = (keys[rows], values[rows])
        if self.visible is not None:
            self.visible = self.visible[rows]
