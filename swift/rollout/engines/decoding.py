"""A batch in memory: prefill, decode step, sampling, and rows that leave. The arithmetic of the in-process engine.

A prompt is prefilled once for all its samples; no Python work per token, only per step, and one look at the device per
step. Every sample draws from its own counter-based uniforms, so other requests in the batch do not change it. Two ways
to compute a step:

* `BatchRun`: a model with packed attention. Rows can join between two steps; finished rows cost nothing from the next
  compaction on, at a quarter of the rows finished. R rows with a key/value cache of K slots per layer::

    slots     [ left padding | prompt | generated so far | free ]     the new token of every row is in the same slot

* `OwnCacheRun`: a model that cannot be packed (recurrent layers, learned positions) keeps its own attention and its own
  cache; its batches hold prompts of one length, so that nothing is padded and nothing can depend on padding.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swift.errors import EngineError
from swift.models.attention.layout import DecodeLayout, SegmentLayout
from swift.models.attention.spans import GroupSpans, Span
from swift.rollout.engines.base import EngineCounters
from swift.rollout.engines.guided import GuideFactory, Guides
from swift.rollout.engines.sampling import BatchSampler
from swift.rollout.engines.stopping import StopText
from swift.rollout.seeds import sample_uniforms
from swift.types import Completion, FinishReason, Request

logger = logging.getLogger(__name__)


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

    compact_when_finished = 0.25
    """Share of finished rows at which they leave the batch: compaction copies the cache, so not at every row."""

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
        self.requests = list(requests)
        self.device = device
        self.counters = counters
        self.eos_token_ids, self.tokenizer = eos_token_ids, tokenizer
        self.step_count = 0
        self.cache: Any = None
        self.num_broken = 0
        """Rows that ended because they had no distribution to sample from."""
        self._versions: list[tuple[int, int]] = []  # (version, first step that was sampled with it)
        # of every request
        self.tokens = np.zeros((len(requests), max(budgets)), dtype=np.int64)
        self.logprobs = np.zeros((len(requests), max(budgets)), dtype=np.float32)
        self.log_mass = np.zeros_like(self.logprobs)
        self.lengths = np.zeros(len(requests), dtype=np.int64)  # tokens sampled
        self.started = np.zeros(len(requests), dtype=np.int64)  # the step of the first token
        # of every live row, in the order of their requests
        self.rows = torch.arange(len(requests))  # its request, on the CPU
        self._started_R = torch.zeros(len(requests), dtype=torch.long, device=device)
        self._prompt_R = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
        self._last_R = torch.zeros_like(self._started_R)  # its last token
        self._budget_R = np.array(budgets)
        self._finished_R = np.zeros(len(requests), dtype=bool)
        self._uniform = True  # all live rows started at the same step
        self._joining: list[tuple[Request, int]] = []
        self.sampler = self._sampler(requests, budgets)
        self._ends_RE = self.sampler.ends_RE.cpu().numpy()
        self.guides = Guides(requests, [[*eos_token_ids, *r.sampling.stop_token_ids] for r in requests], guides)
        self.stop_text = StopText(requests, tokenizer)

    def _sampler(self, requests: Sequence[Request], budgets: Sequence[int]) -> BatchSampler:
        uniforms = np.stack([sample_uniforms(r.sampling.seed, max(budgets)) for r in requests])
        ends_RE = _end_tokens(requests, self.eos_token_ids).to(self.device)
        return BatchSampler(requests, torch.from_numpy(uniforms).to(self.device), ends_RE)

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return self.rows.numel() == 0 and not self._joining

    def live(self) -> list[tuple[Request, int]]:
        """Requests that have not ended, with the most tokens of each."""
        rows = zip(self.rows.tolist(), self._budget_R.tolist(), strict=True)
        return [*((self.requests[request], budget) for request, budget in rows), *self._joining]

    def takes(self, request: Request) -> bool:
        """Whether a request of this kind can join: not one that is held to an expression, nor beside one."""
        return request.sampling.regex is None and not self.guides.active

    def join(self, requests: Sequence[Request], budgets: Sequence[int]) -> None:
        """Sample these too, from the next step on."""
        self._joining += zip(requests, budgets, strict=True)

    def row(self, request: int) -> tuple[list[int], list[float]]:
        """What a request has sampled so far."""
        length = int(self.lengths[request])
        return self.tokens[request, :length].tolist(), self.logprobs[request, :length].tolist()

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
        left = [request.request_id for request, _ in self._joining if request.request_id in request_ids]
        self._joining = [one for one in self._joining if one[0].request_id not in request_ids]
        aborted = [Completion(name, [], [], "abort") for name in left]
        live = [(i, request) for i, request in enumerate(self.rows.tolist()) if not self._finished_R[i]]
        ended = [(i, request) for i, request in live if self.requests[request].request_id in request_ids]
        if not ended:
            return aborted
        self._finished_R[[i for i, _ in ended]] = True
        completions = [self._completion(request, "abort") for _, request in ended]
        self._compact()
        return completions + aborted

    def _prefill(self, model: nn.Module) -> Tensor:
        """Run the prompts of all rows; logits [R, V] of the first token."""
        captured, spans, logits = self._run_prompts(model, self._live())
        self.cache = _RowCache(captured, spans, self._budget_R.tolist())
        return logits

    def _run_prompts(
        self, model: nn.Module, requests: Sequence[Request]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[Span], Tensor]:
        """Run each distinct prompt once: keys and values per layer, each row's span in them, first logits [R, V]."""
        distinct, which = _distinct_prompts(requests)
        spans = _spans_of(distinct)
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
        self.counters.prefill_tokens += ids.numel()
        return capture.layers, [spans[i] for i in which], output.logits[0][torch.tensor(which, device=self.device)]

    def _decode(self, model: nn.Module) -> Tensor:
        """One decode step of all live rows, and the first of those that join; logits [R, V]."""
        parts = []
        if self._joining:
            self._compact()
        if self.rows.numel():
            output = model(
                input_ids=self._last_R[:, None],
                position_ids=self._positions()[:, None],
                attention_layout=DecodeLayout(self.cache.begin_step()),
                past_key_values=self.cache,
                use_cache=True,
            )
            parts.append(output.logits[:, -1])
        if self._joining:
            requests, budgets = zip(*self._joining, strict=True)
            self._joining = []
            captured, spans, logits = self._run_prompts(model, requests)
            if self.rows.numel():
                self.cache.add(captured, spans, budgets)
            else:
                self.cache = _RowCache(captured, spans, budgets)
            self._add(requests, budgets)
            parts.append(logits)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _add(self, requests: Sequence[Request], budgets: Sequence[int]) -> None:
        """Rows of their own for requests that join."""
        first, count = len(self.requests), len(requests)
        more = max(0, max(budgets) - self.tokens.shape[1])
        self.requests += requests
        self.started = np.concatenate([self.started, np.full(count, self.step_count)])
        self.tokens = np.pad(self.tokens, ((0, count), (0, more)))
        self.logprobs = np.pad(self.logprobs, ((0, count), (0, more)))
        self.log_mass = np.pad(self.log_mass, ((0, count), (0, more)))
        self.lengths = np.concatenate([self.lengths, np.zeros(count, dtype=np.int64)])
        self._budget_R = np.concatenate([self._budget_R, np.array(budgets)])
        self._finished_R = np.concatenate([self._finished_R, np.zeros(count, dtype=bool)])
        new = torch.arange(first, first + count)
        self.rows = torch.cat([self.rows, new])
        new = new.to(self.device)
        lengths = torch.tensor([len(request.prompt_ids) for request in requests], device=self.device)
        self._started_R = torch.cat([self._started_R, torch.full_like(new, self.step_count)])
        self._prompt_R = torch.cat([self._prompt_R, lengths])
        self._uniform = len(np.unique(self.started[self.rows.numpy()])) <= 1
        self.sampler.extend(self._sampler(requests, budgets))
        self._ends_RE = self.sampler.ends_RE.cpu().numpy()
        self.stop_text.extend(requests)

    def _positions(self) -> Tensor:
        """[R] where the last tokens stand in their sequences."""
        return self._prompt_R - self._started_R + (self.step_count - 1)

    def _sample(self, logits: Tensor) -> list[Completion]:
        """Draw one token per live row, note the rows that end, and compact when enough have ended."""
        rows = self.rows.numpy()
        drawn_R = self.step_count - self.started[rows]
        step = int(drawn_R[0]) if self._uniform else self.step_count - self._started_R
        token_R, logprob_R, log_mass_R = self.sampler.draw(self.guides.mask(logits, self.rows), step)
        self.guides.advance(token_R, self.rows)
        self._last_R = token_R
        tokens, logprobs = token_R.cpu().numpy(), logprob_R.cpu().numpy()  # the one wait for the device
        self.tokens[rows, drawn_R], self.logprobs[rows, drawn_R] = tokens, logprobs
        if log_mass_R is not None:
            self.log_mass[rows, drawn_R] = log_mass_R.cpu().numpy()
        live = rows[~self._finished_R] if self._finished_R.any() else rows
        self.lengths[live] += 1
        self.counters.decode_rows += len(live)
        self.counters.decode_steps += 1
        self.step_count += 1
        stopped_R = (tokens[:, None] == self._ends_RE).any(1)
        if self.stop_text.active:
            stopped_R |= self.stop_text.check(self.tokens, self.rows, self.lengths[rows].tolist())
        sound_R = logprobs > -np.inf  # nor is it where the logits are no numbers
        ended_R = (stopped_R | ~sound_R | (self.lengths[rows] >= self._budget_R)) & ~self._finished_R
        return self._ended(ended_R, stopped=stopped_R & sound_R, broken=~sound_R) if ended_R.any() else []

    def _ended(self, ended_R: np.ndarray, *, stopped: np.ndarray, broken: np.ndarray) -> list[Completion]:
        """The completions of rows that end at this step, each for one of the reasons, "length" for none."""
        self._note_broken(broken & ended_R)
        finished = []
        for i in ended_R.nonzero()[0]:
            request = int(self.rows[i])
            if broken[i]:
                self.lengths[request] -= 1  # the last token was no draw from a distribution
            reason: FinishReason = "error" if broken[i] else "stop" if stopped[i] else "length"
            finished.append(self._completion(request, reason))
        self._finished_R |= ended_R
        self._compact()
        return finished

    def _note_broken(self, broken_R: np.ndarray) -> None:
        """Count the rows that have no distribution to sample from; raises when that is every row of the batch."""
        if not broken_R.any():
            return
        self.num_broken += int(broken_R.sum())
        index = int(self.rows[int(broken_R.nonzero()[0][0])])
        problem = (
            f"request: {self.requests[index].request_id}: token {self.lengths[index]} cannot be sampled with the "
            f"weights of version {self._versions[-1][0]}: their logits are not finite"
        )
        if self.num_broken == len(self.requests):
            raise EngineError(f"{problem}; the policy has diverged, lower --learning_rate")
        logger.warning("%s; it is left out, with %d of %d completions", problem, self.num_broken, len(self.requests))

    def _completion(self, request: int, reason: FinishReason) -> Completion:
        ids, logprobs = self.row(request)
        return Completion(
            request_id=self.requests[request].request_id,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            versions=self._spans(int(self.started[request]), int(self.lengths[request])),
            log_mass=self.log_mass[request, : len(ids)].tolist() if self.requests[request].sampling.truncates else [],
        )

    def _spans(self, started: int, length: int) -> list[tuple[int, int, int]]:
        """The version of each of `length` tokens from step `started` on, run-length coded."""
        stops = [*(start for _, start in self._versions), self.step_count][1:]
        spans = zip(self._versions, stops, strict=bool(self._versions))
        own = [(version, max(0, start - started), min(length, stop - started)) for (version, start), stop in spans]
        return [(version, start, stop) for version, start, stop in own if start < stop]

    def _compact(self) -> None:
        """Drop finished rows once there are enough of them; at once where rows did not start together.

        A finished row goes on until then, as far as the others: it must not be older than they may become.
        """
        enough = self.compact_when_finished if self._uniform and not self._joining else 0.0
        if self._finished_R.mean() < enough or not self._finished_R.any():
            return
        kept = (~self._finished_R).nonzero()[0]
        keep = torch.from_numpy(kept)
        self.rows = self.rows[keep]
        self._budget_R, self._finished_R = self._budget_R[kept], self._finished_R[kept]
        self._uniform = len(np.unique(self.started[self.rows.numpy()])) <= 1
        keep = keep.to(self.device)
        for name in ("_started_R", "_prompt_R", "_last_R"):
            setattr(self, name, getattr(self, name)[keep])
        self.sampler.keep(keep)
        self._ends_RE = self.sampler.ends_RE.cpu().numpy()
        self._keep_cache(keep)

    def _keep_cache(self, keep: Tensor) -> None:
        if self.cache is not None:
            self.cache.keep(keep)

    def _live(self) -> list[Request]:
        """The requests of the live rows."""
        return [self.requests[request] for request in self.rows.tolist()]


class OwnCacheRun(BatchRun):
    """One batch of prompts of one length, decoded with the model's own attention and cache.

    Args:
        rotary: whether positions are given to the model; one without rotary positions counts them itself.
    """

    def __init__(self, *args: Any, rotary: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rotary = rotary

    def takes(self, request: Request) -> bool:
        """None: prompts are of one length, and the model's own cache knows one position."""
        return False

    def _prefill(self, model: nn.Module) -> Tensor:
        distinct, which = _distinct_prompts(self._live())
        ids = torch.tensor(distinct, device=self.device)
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        rows = torch.tensor(which, device=self.device)
        self.cache = output.past_key_values
        self.cache.reorder_cache(rows)
        self.counters.prefill_tokens += ids.numel()
        return output.logits[:, -1][rows]

    def _decode(self, model: nn.Module) -> Tensor:
        positions = {"position_ids": self._positions()[:, None]} if self.rotary else {}
        output = model(input_ids=self._last_R[:, None], past_key_values=self.cache, use_cache=True, **positions)
        return output.logits[:, -1]

    def _keep_cache(self, keep: Tensor) -> None:
        if keep.numel() and self.cache is not None:
            self.cache.reorder_cache(keep)


def _distinct_prompts(requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The different prompts in order of appearance, and which of them each request has."""
    index: dict[tuple[int, ...], int] = {}
    which = [index.setdefault(tuple(request.prompt_ids), len(index)) for request in requests]
    return list(index), which


def _spans_of(prompts: Sequence[Sequence[int]]) -> list[Span]:
    """Where prompts lie when they follow each other."""
    spans: list[Span] = []
    for prompt in prompts:
        spans.append(Span(spans[-1].stop if spans else 0, len(prompt)))
    return spans


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
    """Keys and values of R rows, written in place; a row's prompt ends, and its own tokens begin, anywhere.

    Args:
        captured: per layer (key, value) of the packed prompts, [1, Hkv, T, D].
        spans: for each row, where its prompt lies in the packed stream.
        budgets: for each row, the most tokens that it will have.
    """

    is_compileable = False

    def __init__(self, captured: list[tuple[Tensor, Tensor]], spans: Sequence[Span], budgets: Sequence[int]) -> None:
        self.device = captured[0][0].device
        self.used = max(span.length for span in spans)
        """Slots up to the latest token."""
        self._first = torch.empty(0, dtype=torch.long)  # [R] the first slot of each row, on the CPU
        self._last = self._first  # [R] the last slot that it may need
        empty = [tuple(one.new_empty(0, one.shape[1], 0, one.shape[3]) for one in layer) for layer in captured]
        self.layers: list[tuple[Tensor, ...]] = empty
        self.add(captured, spans, budgets)

    def add(self, captured: list[tuple[Tensor, Tensor]], spans: Sequence[Span], budgets: Sequence[int]) -> None:
        """Rows behind those that are there; all move so that the first slot in use is slot 0."""
        lengths = torch.tensor([span.length for span in spans])
        shift = -int(torch.cat([self._first, self.used - lengths]).min())
        self.used += shift
        first = self.used - lengths
        self._first = torch.cat([self._first + shift, first])
        self._last = torch.cat([self._last + shift, self.used - 1 + torch.tensor(budgets) - 1])
        capacity = int(self._last.max()) + 1
        slots = torch.arange(self.used)
        source = (torch.tensor([span.start for span in spans])[:, None] + slots - first[:, None]).clamp(min=0)
        before = (slots < first[:, None])[:, None, :, None].to(self.device)
        source = source.to(self.device)
        for index, layer in enumerate(captured):  # never more than one layer exists twice
            rows = []
            for old, new in zip(self.layers[index], layer, strict=True):
                made = new.new_zeros(len(old) + len(source), new.shape[1], capacity, new.shape[3])
                moved = old[:, :, max(0, -shift) :][:, :, : capacity - max(0, shift)]
                made[: len(old), :, max(0, shift) :][:, :, : moved.shape[2]] = moved
                # padding holds nothing of a neighbour: a mask does not keep NaN away
                made[len(old) :, :, : self.used] = new[0][:, source].transpose(0, 1).masked_fill(before, 0.0)
                rows.append(made)
            self.layers[index] = tuple(rows)
        self._look()

    def _look(self) -> None:
        """[R, K] which slots each row sees; None when that is all."""
        self.visible: Tensor | None = None
        if self._first.numel() and int(self._first.max()) > 0:
            capacity = self.layers[0][0].shape[2]
            self.visible = (torch.arange(capacity)[None] >= self._first[:, None]).to(self.device)

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
        for index, layer in enumerate(self.layers):
            self.layers[index] = tuple(states[rows] for states in layer)
        rows = rows.cpu()
        self._first, self._last = self._first[rows], self._last[rows]
        self._look()
