"""Batches of the in-process engine: prefill, decode steps, and the removal of finished rows.

A prompt is prefilled once for all its samples. Each sample has its own counter-based uniforms, so other requests in
the batch do not change it. Two ways to compute a step:

* `BatchRun`: for models with packed attention. Rows can join between two steps. Finished rows are removed once they are
  a quarter of the batch.
* `OwnCacheRun`: for models that cannot be packed (recurrent layers, learned positions), with their own attention and
  cache. Prompts are padded on the left, or have one length if padding changes what the model says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swift.data.image_store import brought
from swift.errors import NumericError
from swift.models.attention.layout import DecodeLayout, SegmentLayout
from swift.models.attention.spans import GroupSpans, Span
from swift.models.forward import placed, stream_inputs
from swift.models.routing import Routing
from swift.models.transfer import to_device
from swift.models.vision import forbid_placeholders, vision_of
from swift.rollout.engines.base import EngineCounters
from swift.rollout.engines.guided import allowed_tokens, guide_of
from swift.rollout.engines.running import ends_with_stop
from swift.rollout.engines.transformers.cache import PromptCapture, RowCache
from swift.rollout.engines.transformers.sampling import BatchSampler, Row
from swift.types import Alternatives, Completion, FinishReason, Request

logger = logging.getLogger(__name__)

COMPACT_SHARE = 0.25
"""Share of finished rows at which they are removed; removal copies the cache, so rows are not removed one by one."""
JOIN_SHARE = 1 / 8
"""Minimum number of joining rows relative to the batch, because joining copies the cache; fewer if no others wait."""


class BatchRun:
    """One batch from prefill to its last token.

    tokenizer: for stop strings. routing: records the routes of rows; None keeps none.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        tokenizer: Any,
        device: torch.device,
        counters: EngineCounters,
        routing: Routing | None = None,
    ) -> None:
        self.rows: list[Row] = []  # in the cache, finished ones included until they are removed
        self.joining = list(rows)
        self.tokenizer, self.device, self.counters, self.routing = tokenizer, device, counters, routing
        self.cache: Any = None
        self._sampler: BatchSampler | None = None  # of `rows`; None if these have changed
        self._last_R: Any = None  # last tokens of `rows`
        self._num_rows, self._num_broken = len(self.joining), 0

    def unfinished(self) -> list[Row]:
        """Rows that have not ended, those that are joining included."""
        return [*(row for row in self.rows if not row.ended), *self.joining]

    def takes(self, request: Request) -> bool:
        """Whether a request can join; with guided decoding none can."""
        return guide_of(request.sampling) is None and all(row.guide is None for row in self.rows)

    def join(self, rows: Sequence[Row]) -> None:
        self.joining += rows
        self._num_rows += len(rows)

    def end(self, rows: Iterable[Row]) -> None:
        """End rows without a further token; the next step removes them."""
        for row in rows:
            row.ended = True
        self.joining = [row for row in self.joining if not row.ended]

    def step(self, model: nn.Module, version: int) -> list[Completion]:
        """Sample one token per unfinished row; returns the completions that end with it.

        The weights may have changed since the last step; version: of the present ones. A row whose logits are not
        finite ends with "error". Raises NumericError if that holds for every row of the batch.
        """
        logits = []
        self._compact(0.0 if self.joining else COMPACT_SHARE)
        if self.rows:
            decoded_RV, routes = self._computed(lambda: self._decode(model))
            logits.append(decoded_RV)
            self._keep_routes(routes)
        if self.joining:
            with brought([[shown.image for shown in row.request.images] for row in self.joining]):
                self._place(model, self.joining)
                first_RV, routes = self._computed(lambda: self._prefill(model, self.joining))
            logits.append(first_RV)
            self._keep_prompt_routes(routes)
            self.rows += self.joining
            self.joining, self._sampler = [], None
        logits_RV = forbid_placeholders(model, torch.cat(logits) if len(logits) > 1 else logits[0])
        if self._sampler is None:
            self._sampler = BatchSampler(self.rows, self.device)
        is_guided = any(row.guide is not None for row in self.rows)
        allowed_RV = allowed_tokens([row.guide for row in self.rows], logits_RV) if is_guided else None
        uniforms = np.array([row.uniforms[min(len(row.token_ids), row.budget - 1)] for row in self.rows])
        uniform_R = to_device(uniforms, self.device)
        self._last_R, logprob_R, log_mass_R, tops = self._sampler.draw(logits_RV, uniform_R, allowed_RV)
        drawn = [self._last_R, logprob_R, *([log_mass_R] if log_mass_R is not None else [])]
        tokens, logprobs, *rest = torch.stack([one.double() for one in drawn]).tolist()  # the host waits once
        masses, tops = rest[0] if rest else [0.0] * len(self.rows), tops or [[]] * len(self.rows)
        ended = []
        for row, token, logprob, mass, top in zip(self.rows, tokens, logprobs, masses, tops, strict=True):
            if not row.ended and (reason := self._add(row, int(token), logprob, mass, top, version)) is not None:
                row.ended = True
                ended.append(row.completion(reason))
        self.counters.decode_steps += 1
        if ended:
            self._compact(COMPACT_SHARE)
        return ended

    def _add(
        self, row: Row, token: int, logprob: float, mass: float, top: Alternatives, version: int
    ) -> FinishReason | None:
        """Append a token to a row; returns the finish reason if the row ends with it."""
        self.counters.decode_rows += 1
        if not logprob > -torch.inf:  # also false for NaN
            self._count_broken(row, version)
            return "error"
        wanted = row.request.sampling
        if not row.spans or row.spans[-1][0] != version:
            row.spans.append((version, len(row.token_ids)))
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        if wanted.truncates:
            row.log_mass.append(mass)
        if wanted.top_logprobs:
            row.tops.append(top)
        if row.guide is not None:
            row.guide.accept_token(token)
        if token in row.ends:
            return "stop"
        if wanted.stop and ends_with_stop(row.token_ids, wanted.stop, self.tokenizer, wanted.min_tokens):
            return "stop"
        return "length" if len(row.token_ids) >= row.budget else None

    def _count_broken(self, row: Row, version: int) -> None:
        """Count a row whose logits are not finite; raises NumericError if that is every row of the batch."""
        self._num_broken += 1
        problem = (
            f"request: {row.request.request_id}: token {len(row.token_ids) + 1} cannot be sampled with the "
            f"weights of version {version}: their logits are not finite"
        )
        if self._num_broken == self._num_rows:
            diverged = "the policy has diverged, lower --learning_rate"
            loaded = "these are the loaded weights: check --model, --adapters and --torch_dtype"
            raise NumericError(f"{problem}; {diverged if version > 0 else loaded}")
        logger.warning("%s; it is left out, with %d of %d completions", problem, self._num_broken, self._num_rows)

    def _compact(self, share: float) -> None:
        """Remove the finished rows if they are at least this share of the rows."""
        kept = [place for place, row in enumerate(self.rows) if not row.ended]
        num_ended = len(self.rows) - len(kept)
        if not num_ended or num_ended < share * len(self.rows):
            return
        self.rows = [self.rows[place] for place in kept]
        self._sampler = None
        if not kept:
            self.cache = None
        elif self.cache is not None:
            keep = torch.tensor(kept)
            self._last_R = self._last_R[to_device(keep, self.device)]
            self._keep(keep)

    def _keep(self, rows: Tensor) -> None:
        """Remove the other rows from the cache."""
        self.cache.reorder_cache(rows)

    def _place(self, model: nn.Module, rows: Iterable[Row]) -> None:
        """Set the position of the first token of rows."""
        for row in rows:
            row.first = placed(row.request.prompt_ids, vision_of(model))[1]

    def _positions(self) -> Tensor:
        """[R, 1] positions of the last tokens."""
        ends = [row.first + len(row.token_ids) - 1 for row in self.rows]
        return to_device(ends, self.device)[:, None]

    # --- routes -----------------------------------------------------------------------------------------------

    def _computed(self, compute: Callable[[], Tensor]) -> tuple[Tensor, np.ndarray | None]:
        """The logits of one forward pass, and the routes of its tokens if they are recorded."""
        if self.routing is None:
            return compute(), None
        with self.routing.recording() as recording:
            logits_RV = compute()
        return logits_RV, self.routing.array(recording)

    def _keep_routes(self, routes: np.ndarray | None) -> None:
        """Keep the routes of the last tokens of `rows`."""
        if routes is not None:
            for row, route in zip(self.rows, routes, strict=True):
                if not row.ended:
                    row.routes.append(route[None])

    def _keep_prompt_routes(self, routes: np.ndarray | None) -> None:
        """Keep the routes of the prompts of the rows that join, each prompt's for all its rows."""
        if routes is not None:
            distinct, which = _distinct_prompts(self.joining)
            places = self._places(distinct)
            for row, number in zip(self.joining, which, strict=True):
                row.routes.append(routes[places[number]])

    def _places(self, prompts: Sequence[Sequence[int]]) -> list[slice]:
        """Where each prompt is among the tokens of `_prefill`."""
        ends = np.cumsum([len(prompt) for prompt in prompts]).tolist()
        return [slice(end - len(prompt), end) for prompt, end in zip(prompts, ends, strict=True)]

    # --- forward passes ---------------------------------------------------------------------------------------

    def _prefill(self, model: nn.Module, rows: Sequence[Row]) -> Tensor:
        """Prefill each distinct prompt once and copy it into the cache for each of its rows; first logits [R, V]."""
        distinct, which = _distinct_prompts(rows)
        spans: list[Span] = []
        for prompt in distinct:
            spans.append(Span(spans[-1].stop if spans else 0, len(prompt)))
        vision = vision_of(model)
        images = [vision.spans(ids, span.start) if vision else () for ids, span in zip(distinct, spans, strict=True)]
        groups = [GroupSpans(span, (), images=shown) for span, shown in zip(spans, images, strict=True)]
        ids = [token for prompt in distinct for token in prompt]
        capture = PromptCapture()
        output = model(
            **stream_inputs(ids, distinct, groups, self.device, vision),
            attention_layout=SegmentLayout(groups, self.device),
            logits_to_keep=to_device([span.stop - 1 for span in spans], self.device),
            past_key_values=capture,
            use_cache=True,
        )
        self.counters.prefill_tokens += len(ids)
        if self.cache is None:
            self.cache = RowCache(capture.layers)
        self.cache.add(capture.layers, [spans[i] for i in which], [row.budget for row in rows])
        return output.logits[0][to_device(which, self.device)]

    def _decode(self, model: nn.Module) -> Tensor:
        """One decode step of the rows in the cache; logits [R, V]."""
        output = model(
            input_ids=self._last_R[:, None],
            position_ids=self._positions(),
            attention_layout=DecodeLayout(self.cache.begin_step()),
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]


class OwnCacheRun(BatchRun):
    """One batch, decoded with the model's own attention and cache.

    positions: whether they are passed to the model; a model that counts them itself takes prompts of one length.
    """

    def __init__(self, *args: Any, positions: bool) -> None:
        super().__init__(*args)
        self.positions = positions
        self._mask_RC: Tensor | None = None  # 0 in the padding; None without any

    def takes(self, request: Request) -> bool:
        """Always False: the model's own cache has one position for all rows."""
        return False

    def _prefill(self, model: nn.Module, rows: Sequence[Row]) -> Tensor:
        distinct, which = _distinct_prompts(rows)
        output, mask_RP = prefilled(model, distinct, self.device, positions=self.positions)
        places = to_device(which, self.device)
        self.cache = output.past_key_values
        self.cache.reorder_cache(places)
        self._mask_RC = None if mask_RP is None else mask_RP[places]
        self.counters.prefill_tokens += sum(map(len, distinct))
        return output.logits[:, -1][places]

    def _places(self, prompts: Sequence[Sequence[int]]) -> list[slice]:
        width = max(map(len, prompts))
        ends = range(width, width * len(prompts) + 1, width)
        return [slice(end - len(prompt), end) for prompt, end in zip(prompts, ends, strict=True)]

    def _decode(self, model: nn.Module) -> Tensor:
        if self._mask_RC is not None:
            self._mask_RC = nn.functional.pad(self._mask_RC, (0, 1), value=1)
        positions = self._positions() if self.positions else None
        return decoded(model, self._last_R[:, None], self.cache, mask_RC=self._mask_RC, positions=positions)

    def _keep(self, rows: Tensor) -> None:
        there = to_device(rows, self.device)  # once, not in each layer
        super()._keep(there)
        if self._mask_RC is not None:
            self._mask_RC = self._mask_RC[there]


def prefilled(
    model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device, *, positions: bool
) -> tuple[Any, Tensor | None]:
    """A model's output, with its own cache, for prompts padded on the left, and their mask; None without padding."""
    width, vision = max(map(len, prompts)), vision_of(model)
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    given: dict[str, Tensor] = {}
    if vision is not None:
        given = {**vision.features(prompts, device), **vision.token_kinds(rows, device)}
        rows = [vision.visible(row) for row in rows]
    ids = to_device(rows, device)
    if any(len(prompt) < width for prompt in prompts):
        mask = to_device([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device)
        given["attention_mask"] = mask
        if positions:
            of_prompts = [placed(prompt, vision)[0] for prompt in prompts]
            most = max(map(len, of_prompts))
            padded = [
                [[0] * (width - len(axes[0])) + list(axes[i % len(axes)]) for axes in of_prompts] for i in range(most)
            ]
            given["position_ids"] = to_device(padded if most > 1 else padded[0], device)
    return model(input_ids=ids, use_cache=True, logits_to_keep=1, **given), given.get("attention_mask")


def decoded(model: nn.Module, ids: Tensor, cache: Any, *, mask_RC: Tensor | None, positions: Tensor | None) -> Tensor:
    """Logits [R, V] after one more token for each row of a model's own cache."""
    given = {"attention_mask": mask_RC, "position_ids": positions}
    present = {name: value for name, value in given.items() if value is not None}
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, **present).logits
    return logits[:, -1]


def takes_padding(model: nn.Module, device: torch.device, *, positions: bool) -> bool:
    """Whether a prompt that is padded on the left goes on as if it were alone; a trial, without gradients."""
    prompts, following = ([3, 5, 7, 9, 11, 4], [6, 8]), [10, 12]

    def logits(chosen: Sequence[int]) -> Tensor:
        output, mask = prefilled(model, [prompts[i] for i in chosen], device, positions=positions)
        ids = to_device([[following[i]] for i in chosen], device)
        mask = None if mask is None else nn.functional.pad(mask, (0, 1), value=1)
        places = to_device([[len(prompts[i])] for i in chosen], device) if positions else None
        second = decoded(model, ids, output.past_key_values, mask_RC=mask, positions=places)
        return torch.cat([output.logits[:, -1], second]).float()

    try:
        one_RV, other_RV, both_RV = logits([0]), logits([1]), logits([0, 1])
    except torch.OutOfMemoryError:
        raise
    except Exception:  # models refuse padding in types of their own
        return False
    alone_RV = torch.stack([one_RV[0], other_RV[0], one_RV[1], other_RV[1]])
    tolerance = 1e-2 if next(model.parameters()).dtype == torch.float32 else 1e-1
    return float((both_RV - alone_RV).abs().mean(-1).max()) <= tolerance * float(alone_RV.std())  # NaN is not


def state_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of convolution and recurrent states of a row in a model's own cache."""
    layers = prefilled(model, [[0, 0]], device, positions=False)[0].past_key_values.layers
    states = [getattr(layer, name, {}) for layer in layers for name in ("conv_states", "recurrent_states")]
    return sum(state.nbytes for held in states for state in held.values() if state is not None)


def _distinct_prompts(rows: Sequence[Row]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The distinct prompts in order of appearance, and the index of each row's prompt."""
    index: dict[tuple[int, ...], int] = {}
    which = [index.setdefault(tuple(row.request.prompt_ids), len(index)) for row in rows]
    return list(index), which


@dataclass(frozen=True, slots=True)
class BatchRule:
    """Limits of a batch: number of rows, of (row, position) slots of the cache, and whether prompts have one length.

    slots_of_states: that a row takes besides, in a model with recurrent states.
    """

    max_rows: int
    slots: int
    one_length: bool
    slots_of_states: int = 0

    def first(self, waiting: Sequence[Row]) -> list[Row]:
        """The rows of the next batch; samples of a prompt stay together."""
        ordered = sorted(waiting, key=lambda row: len(row.request.prompt_ids)) if self.one_length else waiting
        batch: list[Row] = []
        width = length = 0  # slots of a row: the longest prompt and the largest limit of new tokens
        for row in _grouped(ordered):
            size = len(row.request.prompt_ids)
            width, length = max(width, size), max(length, row.budget)
            differs = self.one_length and batch and size != len(batch[-1].request.prompt_ids)
            if batch and (differs or not self._fits(len(batch) + 1, width + length)):
                break
            batch.append(row)
        return batch

    def joining(self, waiting: Sequence[Row], run: BatchRun) -> list[Row]:
        """Waiting rows that join the running batch, in order up to the first that cannot."""
        present = run.unfinished()
        found: list[Row] = []
        width, length = max(len(row.request.prompt_ids) for row in present), max(row.budget for row in present)
        for row in _grouped(waiting):
            width, length = max(width, len(row.request.prompt_ids)), max(length, row.budget)
            if not run.takes(row.request) or not self._fits(len(present) + len(found) + 1, width + 2 * length):
                break
            found.append(row)
        return found if len(found) == len(waiting) or len(found) >= JOIN_SHARE * len(present) else []

    def _fits(self, num_rows: int, slots: int) -> bool:
        return num_rows <= self.max_rows and num_rows * (slots + self.slots_of_states) <= self.slots


def _grouped(rows: Iterable[Row]) -> list[Row]:
    """The rows in order, except that rows of a prompt follow its first one."""
    by_prompt: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(tuple(row.request.prompt_ids), []).append(row)
    return [row for group in by_prompt.values() for row in group]
