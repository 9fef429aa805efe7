"""The in-process engine: samples with the trainer's own module, so publishing weights copies nothing.

Owns the decode loop. Promises: a prompt is prefilled once for all its samples; a finished row costs nothing from
the next compaction on (at a quarter of the rows finished); no Python work per token, only per step. Every sample
draws from its own counter-based uniforms, so other requests in the batch do not change it. Holds no state
between calls.

A batch in memory, R rows with a key/value cache of K slots per layer::

    slots     [ left padding | prompt | generated so far | free ]
              0              W        W + t              K          W = longest prompt, t = decode steps

A model that cannot be packed (sliding windows, recurrent layers) keeps its own attention and its own cache; its
batches hold prompts of one length, so that nothing is padded and nothing can depend on padding.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swift.errors import ConfigError, PromptTooLong
from swift.models.forward import DecodeLayout, GroupSpans, SegmentLayout, Span, choose_attention
from swift.rollout.engines.base import Capabilities, EngineCounters
from swift.rollout.engines.sampling import BatchSampler
from swift.rollout.engines.stopping import StopText
from swift.rollout.seeds import sample_uniforms
from swift.types import Completion, FinishReason, Request, SamplingParams

COMPACT_WHEN_FINISHED = 0.25
"""Share of finished rows at which they leave the batch: compaction copies the cache, so not at every row."""


class TransformersEngine:
    """Samples from a transformers decoder in this process.

    Args:
        model: the policy, unwrapped (no DDP); PEFT is fine. Its weights are read at every call.
        eos_token_ids: tokens that end a completion.
        tokenizer: needed for textual stop words only.
        max_model_len: prompt + completion limit in tokens; None takes the model's own.
        max_rows: most rows decoded together.
        cache_bytes: most bytes of key/value cache; a fixed number keeps batch shapes reproducible.

    Raises:
        ConfigError: an architecture that can neither be packed nor decoded with its own cache.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        tokenizer: Any = None,
        max_model_len: int | None = None,
        max_rows: int = 256,
        cache_bytes: int = 2 << 30,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = sorted(set(eos_token_ids))
        self.max_rows = max_rows
        self.cache_bytes = cache_bytes
        self.version = 0
        self.counters = EngineCounters()
        self._config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        limit = int(max_model_len or getattr(self._config, "max_position_embeddings", None) or 1 << 30)
        self.capabilities = Capabilities(
            name="transformers",
            logprob_support="truncated",
            seeded=True,
            shares_weights=True,
            max_model_len=limit,
        )
        self.obstacle = choose_attention(model)
        """Why the model keeps its own attention and cache, which is slower; None when it does not."""
        self.rotary = hasattr(self._config, "rope_parameters")
        if self.obstacle is not None:
            self._try_own_cache()

    def publish(self, version: int) -> None:
        """The engine reads the trainer's parameters: only the version changes."""
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Sample every request; completions are yielded as soon as their row ends."""
        self._check_lengths(requests)
        was_training = self.model.training
        for batch in self._batches(requests):
            run = self._run(batch)
            while True:
                started = time.monotonic()
                self.model.eval()
                with torch.inference_mode():
                    finished = run.advance()
                self.model.train(was_training)
                self.counters.generate_s += time.monotonic() - started
                yield from finished
                if run.done:
                    break

    def stream_tokens(self, request: Request) -> Iterator[tuple[int, float]]:
        """Sample one request and yield (token id, log-prob) as they come; the last one ends the completion."""
        self._check_lengths([request])
        run = self._run([request])
        seen = 0
        while not run.done:
            with torch.inference_mode():
                self.model.eval()
                finished = run.advance(stop_after_step=True)
            ids, logprobs = (finished[0].token_ids, finished[0].logprobs) if finished else run.row(0)
            yield from zip(ids[seen:], logprobs[seen:], strict=True)
            seen = len(ids)

    def _try_own_cache(self) -> None:
        """Raises ConfigError when the model's own cache is not one that transformers' models share."""
        request = Request("trial", [0, 0], SamplingParams(max_new_tokens=2))
        try:
            list(self.generate([request]))
        except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"--model: {self._config.model_type}: the transformers engine cannot sample from this architecture "
                f"({type(error).__name__}: {str(error).splitlines()[0]}); choose a decoder with a key/value cache"
            ) from error
        self.counters = EngineCounters()

    def _run(self, batch: list[Request]) -> _BatchRun:
        return _BatchRun(self, batch) if self.obstacle is None else _OwnCacheRun(self, batch)

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        """Raises PromptTooLong for the first prompt that leaves no room for one token."""
        for request in requests:
            if len(request.prompt_ids) >= self.capabilities.max_model_len:
                raise PromptTooLong(len(request.prompt_ids), self.capabilities.max_model_len)

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Cut the requests into batches that fit the cache, keeping the samples of a prompt together."""
        by_prompt: OrderedDict[tuple[int, ...], list[Request]] = OrderedDict()
        lengths_together = requests if self.obstacle is None else sorted(requests, key=lambda r: len(r.prompt_ids))
        for request in lengths_together:
            by_prompt.setdefault(tuple(request.prompt_ids), []).append(request)
        batch: list[Request] = []
        slots = 0
        for prompt, group in by_prompt.items():
            for request in group:
                wanted = max(slots, len(prompt) + request.sampling.max_new_tokens)
                full = len(batch) >= self.max_rows or wanted * (len(batch) + 1) > self._cache_slots()
                if batch and (full or not self._mixes(len(prompt), batch)):
                    yield batch
                    batch, wanted = [], len(prompt) + request.sampling.max_new_tokens
                batch.append(request)
                slots = wanted
        if batch:
            yield batch

    def _mixes(self, prompt_length: int, batch: Sequence[Request]) -> bool:
        """Whether a prompt of this length may join the batch."""
        return self.obstacle is None or prompt_length == len(batch[-1].prompt_ids)

    def _cache_slots(self) -> int:
        """How many (row, position) slots the cache budget holds."""
        config = self._config
        heads = getattr(config, "num_attention_heads", None) or 1
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = next(self.model.parameters()).element_size()
        return max(1, self.cache_bytes // (2 * config.num_hidden_layers * kv_heads * head_size * width))


class _BatchRun:
    """One batch from prefill to its last token."""

    def __init__(self, engine: TransformersEngine, requests: list[Request]) -> None:
        self.engine = engine
        self.requests = requests
        device = engine.device
        limit = engine.capabilities.max_model_len
        self.budgets = [min(r.sampling.max_new_tokens, limit - len(r.prompt_ids)) for r in requests]
        self.longest = max(self.budgets)
        self.rows = torch.arange(len(requests))  # request of each live row, on the CPU
        self.step = 0
        self.tokens = torch.zeros(len(requests), self.longest, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(len(requests), self.longest, device=device)
        self.budget_R = torch.tensor(self.budgets, device=device)
        self.ends_RE = _end_tokens(requests, engine.eos_token_ids).to(device)
        uniforms = np.stack([sample_uniforms(r.sampling.seed, self.longest) for r in requests])
        self.sampler = BatchSampler(requests, torch.from_numpy(uniforms).to(device))
        self.stop_text = StopText(requests, engine.tokenizer)
        self.finished_R = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self.cache: Any = None
        self.lengths_R = torch.tensor([len(r.prompt_ids) for r in requests], device=device)

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return self.rows.numel() == 0

    def row(self, request: int) -> tuple[list[int], list[float]]:
        """What a request has sampled so far."""
        return self.tokens[request, : self.step].tolist(), self.logprobs[request, : self.step].tolist()

    def advance(self, *, stop_after_step: bool = False) -> list[Completion]:
        """Decode until at least one row ends (or one step); the completions that ended, in request order."""
        while True:
            logits = self._prefill() if self.cache is None else self._decode()
            ended = self._sample(logits)
            if ended or stop_after_step:
                return ended

    def _prefill(self) -> Tensor:
        """Run each distinct prompt once; fill the rows' caches; logits [R, V] of the first token."""
        distinct, which = _distinct_prompts(self.requests)
        spans: list[Span] = []
        for prompt in distinct:
            spans.append(Span(spans[-1].stop if spans else 0, len(prompt)))
        device = self.engine.device
        ids = torch.tensor([token for prompt in distinct for token in prompt], device=device)
        positions = torch.cat([torch.arange(span.length, device=device) for span in spans])
        capture = _PromptCapture()
        output = self.engine.model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_layout=SegmentLayout([GroupSpans(span, ()) for span in spans], device),
            logits_to_keep=torch.tensor([span.stop - 1 for span in spans], device=device),
            past_key_values=capture,
            use_cache=True,
        )
        self.cache = _RowCache(capture.layers, [spans[i] for i in which], self.longest)
        self.engine.counters.prefill_tokens += ids.numel()
        return output.logits[0][torch.tensor(which, device=device)]

    def _decode(self) -> Tensor:
        """One decode step of all live rows; logits [R, V]."""
        last = self.tokens[self.rows.to(self.tokens.device), self.step - 1]
        output = self.engine.model(
            input_ids=last[:, None],
            position_ids=(self.lengths_R + self.step - 1)[:, None],
            attention_layout=DecodeLayout(self.cache.begin_step()),
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _sample(self, logits: Tensor) -> list[Completion]:
        """Draw one token per live row, note the rows that end, and compact when enough have ended."""
        rows = self.rows.to(self.tokens.device)
        token_R, logprob_R = self.sampler.draw(logits, self.step)
        self.tokens[rows, self.step] = token_R
        self.logprobs[rows, self.step] = logprob_R
        counters = self.engine.counters
        counters.decode_rows += int((~self.finished_R).sum())
        counters.decode_steps += 1
        self.step += 1
        stopped_R = (token_R[:, None] == self.ends_RE).any(1)
        stopped_R |= self.stop_text.check(self.tokens, self.rows, self.step)
        ended_R = (stopped_R | (self.step >= self.budget_R)) & ~self.finished_R
        if not bool(ended_R.any()):
            return []
        finished = [
            self._completion(int(self.rows[i]), "stop" if bool(stopped_R[i]) else "length")
            for i in ended_R.nonzero()[:, 0].tolist()
        ]
        self.finished_R |= ended_R
        self._compact()
        return finished

    def _completion(self, request: int, reason: FinishReason) -> Completion:
        ids, logprobs = self.row(request)
        return Completion(
            request_id=self.requests[request].request_id,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            versions=[(self.engine.version, 0, len(ids))],
        )

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


class _OwnCacheRun(_BatchRun):
    """One batch of prompts of one length, decoded with the model's own attention and cache."""

    def _prefill(self) -> Tensor:
        distinct, which = _distinct_prompts(self.requests)
        device = self.engine.device
        ids = torch.tensor(distinct, device=device)
        output = self.engine.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        rows = torch.tensor(which, device=device)
        self.cache = output.past_key_values
        self.cache.reorder_cache(rows)
        self.engine.counters.prefill_tokens += ids.numel()
        return output.logits[:, -1][rows]

    def _decode(self) -> Tensor:
        last = self.tokens[self.rows.to(self.tokens.device), self.step - 1]
        positions = {"position_ids": (self.lengths_R + self.step - 1)[:, None]} if self.engine.rotary else {}
        output = self.engine.model(input_ids=last[:, None], past_key_values=self.cache, use_cache=True, **positions)
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
        self.layers = [(self._rows(key, source), self._rows(value, source)) for key, value in captured]
        self.visible: Tensor | None = None
        if bool((offsets > 0).any()):
            self.visible = (torch.arange(self.capacity)[None] >= offsets[:, None]).to(device)

    def _rows(self, states: Tensor, source: Tensor) -> Tensor:
        rows = states.new_zeros(source.shape[0], states.shape[1], self.capacity, states.shape[3])
        rows[:, :, : self.width] = states[0][:, source].transpose(0, 1)
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
        """Keep only `rows`."""
        self.layers = [(keys[rows], values[rows]) for keys, values in self.layers]
        if self.visible is not None:
            self.visible = self.visible[rows]
