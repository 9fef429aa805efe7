"""The in-process engine: samples with a transformers module, the trainer's own or a copy.

Over the trainer's own module (the default of a run) a weight sync copies nothing: the weights are read at every step.
Over an own copy (`build`: actors, servers) it takes updates, adapters and sleep like any other engine.

Owns the queue and the loop; `batch` is the arithmetic of a batch; `weights` is how an own copy changes.
Batches are cut so that the samples of a prompt stay together. On an accelerator requests that come later join the
running batch if it has room. On a CPU they wait until it is done: runs repeat to the last bit there, and products round
by the number of their rows.
Between two steps the loop looks whether somebody wants to abort, pause or close, so none of these waits for more than
one step. Nothing but the running batch is held between calls; it lasts over a pause, and its rows go on with the
weights that are there then.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from swift.errors import ConfigError, EngineDead, EngineError, RequestRefused, SwiftError, SyncFailed, first_line
from swift.models.attention.choice import choose_attention
from swift.models.sharded import is_sharded
from swift.rollout.engines import guided
from swift.rollout.engines.base import (
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    SleepLevel,
    Tag,
    TensorInfo,
)
from swift.rollout.engines.expected_weights import kv_token_bytes
from swift.rollout.engines.life import EngineLife
from swift.rollout.engines.running import RunningRequests, SoFar
from swift.rollout.engines.transformers.batch import BatchRule, BatchRun, OwnCacheRun, Sampler
from swift.rollout.engines.transformers.sampling import Row
from swift.rollout.engines.transformers.weights import InPlaceUpdate, MergedAdapter
from swift.rollout.weights.base import dtype_name
from swift.types import Completion, Request, SamplingParams

COUNTING = ("frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs")
"""Sampling fields that need no package."""
IDLE_LIMIT_S = 60.0
"""Longest wait for the step that another thread is in; a step takes milliseconds to seconds."""


class TransformersEngine(EngineLife):
    """Samples from a transformers decoder in this process.

    Args:
        model: the policy, unwrapped (no DDP); PEFT is fine. Its weights are read at every step.
        eos_token_ids: tokens that end a completion.
        tokenizer: needed for stop strings and regular expressions only.
        max_model_len: prompt + completion limit in tokens; None takes the model's own.
        max_rows: most rows decoded together.
        cache_bytes: most bytes of key/value cache; a fixed number keeps batch shapes reproducible.
        reload: loads the weights of version 0 again. Given, `model` is a copy that belongs to this engine; None says
            that it is the trainer's.
        keeps_base: only adapters will be synced, so that level 2 of `sleep` must not drop the weights.

    Attributes:
        obstacle: why the model keeps its own attention and cache, which is slower; None when it does not.

    Raises:
        ConfigError: an architecture that can neither be packed nor decoded with its own cache.
    """

    name = "transformers"

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        tokenizer: Any = None,
        max_model_len: int | None = None,
        max_rows: int = 256,
        cache_bytes: int = 2 << 30,
        reload: Callable[[], nn.Module] | None = None,
        keeps_base: bool = False,
    ) -> None:
        self._reset_life()
        self.tokenizer, self.eos_token_ids = tokenizer, sorted(set(eos_token_ids))
        self.max_rows, self.cache_bytes = max_rows, cache_bytes
        self.keeps_base = keeps_base
        self.counters = EngineCounters()
        self._reload = reload
        self._guides: guided.GuideFactory | None = None
        self._running: RunningRequests[Row] = RunningRequests()
        self._run: BatchRun | None = None
        self._finished: deque[Completion] = deque()
        self._step = threading.Lock()  # of the batch and the weights, for a step
        self._look_for_room = self._spread = False
        self._take_model(model)
        self.capabilities = self._describe(max_model_len)
        if self.obstacle is not None:
            self._try_own_cache()

    def _take_model(self, model: nn.Module) -> None:
        self.model = model
        self._config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self.vocab_size = self._config.vocab_size
        self.obstacle = choose_attention(model)
        self._shapes = [parameter.shape for parameter in model.parameters()]
        self._home = self.device
        self._adapter: MergedAdapter | None = None

    def _describe(self, max_model_len: int | None) -> Capabilities:
        own = self._reload is not None
        parameter = next(self.model.parameters())
        can_guide = self.tokenizer is not None and guided.available()
        return Capabilities(
            name=self.name,
            logprob_support="truncated",
            shares_weights=not own,
            max_model_len=int(max_model_len or getattr(self._config, "max_position_embeddings", None) or 1 << 30),
            dtype=dtype_name(parameter.dtype),
            devices=(str(parameter.device),),
            lora=own,
            sleep_levels=(0, 1, 2) if own else (0,),
            in_flight_updates=True,
            guided=can_guide,
            sampling_fields=(*COUNTING, "structured_outputs") if can_guide else COUNTING,
        )

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @property
    def joins(self) -> bool:
        """Whether requests join a batch that runs."""
        return self.device.type != "cpu"

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self._check_usable()
        self.check_length(request)
        self._running.insert(self._sampler().row(request, self.room(request)))
        self._look_for_room = True

    def stream(self) -> Iterator[Completion]:
        while True:
            while self._finished:
                yield self._finished.popleft()
            if self._paused or not self._outstanding():
                return
            self._advance()

    def advance(self) -> list[Completion] | None:
        if not self._finished and not self._paused and self._outstanding():
            self._advance(one_step=True)
        elif not self._finished:
            return None
        ended = list(self._finished)
        self._finished.clear()
        return ended

    def check_length(self, request: Request) -> None:
        """Also refuses what the model cannot read, and stop words without a tokenizer."""
        super().check_length(request)
        wanted, problem = request.sampling, ""
        if wanted.stop and self.tokenizer is None:
            problem = "stop strings need a tokenizer; use stop_token_ids"
        elif wanted.max_new_tokens < 1:
            problem = f"max_new_tokens {wanted.max_new_tokens}: below 1"
        if problem:
            raise RequestRefused(request.request_id, f"request: {request.request_id}: {problem}")
        try:
            guide = guided.guide_of(wanted)
            if guide is None:
                return
            if not self.eos_token_ids and not wanted.stop_token_ids:
                raise EngineError("regex: there is no end token that could follow a match; name one in stop_token_ids")
            self._guides = self._guides or guided.GuideFactory(self.tokenizer, self.vocab_size)
            self._guides.compiled(guide)
        except EngineError as error:
            raise RequestRefused(request.request_id, *error.problems) from error

    def stream_tokens(self, request: Request) -> Iterator[tuple[int, float]]:
        """Sample one request and yield (token id, log-prob) as they come; the last one ends the completion."""
        self._check_usable()
        self.check_length(request)
        row = self._sampler().row(request, self.room(request))
        run, seen = self._start([row]), 0
        while not run.done:
            self._check_usable()
            with self._step, self._sampling():
                run.step(self.model, self.version)
            yield from zip(row.token_ids[seen:], row.logprobs[seen:], strict=True)
            seen = len(row.token_ids)

    def so_far(self, request_id: str) -> SoFar:
        return self._running.so_far(request_id)

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End requests, from any thread; takes effect at the next step of `stream`."""
        self._running.abort(request_ids)

    def pause(self) -> None:
        self._paused = True
        self._wait_for_step()

    def resume(self) -> None:
        self._paused = False

    def _outstanding(self) -> int:
        return len(self._running)

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """The model in evaluation, without gradients; as it was afterwards."""
        if self._run is None:
            self._spread = is_sharded(self.model)
        was_training = self.model.training
        try:
            if was_training:
                self.model.eval()
            # parameters that are gathered inside are used by training afterwards
            with torch.no_grad() if self._spread else torch.inference_mode():
                yield
        finally:
            if was_training:
                self.model.train()

    def _advance(self, *, one_step: bool = False) -> None:
        """Decode until a row ends, or somebody wants something; what ended is in `_finished`."""
        self._check_usable()
        ended: list[Completion] = []
        try:
            with self._sampling():
                while self._outstanding() and not ended and not self._paused and not self._closed:
                    with self._step:
                        ended = self._one_step()
                    if one_step:
                        break
        except BaseException:
            self._forget()  # the batch is in no state to go on from
            raise
        self._finished.extend(ended)

    def _one_step(self) -> list[Completion]:
        """Carry out what was aborted, else one decode step of the batch; the completions that end."""
        aborted = self._running.take_aborted()
        ended = [row.completion("abort") for row in aborted]
        if aborted and self._run is not None:
            self._run.end(aborted)
        elif not aborted:
            if self._closed:  # by another thread, since the last look
                return []
            self._take_up()
            assert self._run is not None, "something is outstanding"
            ended = self._run.step(self.model, self.version)
            for completion in ended:
                self._running.take(completion.request_id)
        if ended:
            self._look_for_room = True
            if self._run is not None and self._run.done:
                self._run = None
        return ended

    def _take_up(self) -> None:
        """Begin a batch of waiting rows, or let them join the one that runs."""
        if self._run is not None and not (self.joins and self._look_for_room):
            return
        waiting = [row for row in self._running.values() if not row.started]
        if not waiting:
            return
        self._look_for_room = False
        token_bytes = kv_token_bytes(self._config, width=next(self.model.parameters()).element_size())
        slots = max(1, self.cache_bytes // max(1, token_bytes))
        rule = BatchRule(self.max_rows, slots, one_length=self.obstacle is not None)
        rows = rule.first(waiting) if self._run is None else rule.joining(waiting, self._run)
        for row in rows:
            row.started = True
        if self._run is None:
            self._run = self._start(rows)
        else:
            self._run.join(rows)

    def _forget(self) -> None:
        """After a failure nobody waits for the rest: what was asked for is gone."""
        self._run = None
        self._running = RunningRequests()

    def _sampler(self) -> Sampler:
        return Sampler(self.eos_token_ids, self.tokenizer, self._guides)

    def _start(self, rows: Sequence[Row]) -> BatchRun:
        parts = (rows, self._sampler(), self.device, self.counters)
        if self.obstacle is None:
            return BatchRun(*parts)
        return OwnCacheRun(*parts, rotary=hasattr(self._config, "rope_parameters"))

    def _try_own_cache(self) -> None:
        """Raises ConfigError when the model's own cache is not one that transformers' models share."""
        request = Request("trial", [0, 0], SamplingParams(max_new_tokens=2))
        try:
            list(self.generate([request]))
        except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"--model: {self._config.model_type}: the transformers engine cannot sample from this architecture "
                f"({type(error).__name__}: {first_line(error)}); choose a decoder with a key/value cache"
            ) from error
        self.counters = EngineCounters()

    # --- weights ----------------------------------------------------------------------------------------------

    def _check_takes_weights(self) -> None:
        self._own("a weight update: it shares the trainer's weights, so that only `version` changes")
        super()._check_takes_weights()

    def _make_update(self, manifest: Sequence[TensorInfo], version: int) -> InPlaceUpdate:
        return InPlaceUpdate(self, manifest, version)

    def _weights_arrived(self, version: int) -> None:
        super()._weights_arrived(version)
        self._adapter = None  # overwritten, with what it replaced

    def rebuild(self) -> None:
        """Load the weights of version 0 again; requests that are outstanding stay so."""
        reload = self._own("rebuild")
        self._check_alive()
        self._drop_weights()  # never two copies at once
        paused = self._paused
        try:
            self._take_model(reload())
        except (SwiftError, OSError, RuntimeError) as error:
            self._dead = f"it cannot be made again ({first_line(error)})"
            raise EngineDead(f"engine: transformers: {self._dead}") from error
        self._reset_life()
        self._paused = paused

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """Merge a LoRA adapter into the base weights, in place of the former one."""
        self._own("LoRA adapters: the trainer's own is part of its model")
        self._check_takes("an adapter")
        merged = MergedAdapter(self.model, adapter, version)  # refuses before anything is changed
        with self._changing(f"adapter version {version}"):
            self._remove_adapter()
            merged.merge()
        self._adapter, self.version = merged, version
        return Ack(version, len(adapter.tensors), adapter.nbytes, adapter.digest())

    def drop_adapter(self) -> None:
        self._own("LoRA adapters: the trainer's own is part of its model")
        self._check_takes("a change of adapter")
        with self._changing("the base"):
            self._remove_adapter()

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Weights are written inside; they are invalid unless it ends well."""
        try:
            yield
        except Exception as error:
            self._invalidate(f"{what} is in its weights by half")
            raise SyncFailed(
                f"weights: {what} for transformers: {type(error).__name__}: {first_line(error)}; rebuild the engine"
            ) from error

    def _remove_adapter(self) -> None:
        if self._adapter is not None:
            self._adapter.remove()
        self._adapter, self.version = None, self._base_version

    def reset_caches(self) -> None:
        """Nothing to forget: a prompt's keys and values live as long as its batch."""

    # --- memory -----------------------------------------------------------------------------------------------

    def _fall_asleep(self, level: SleepLevel) -> tuple[int, list[str]]:
        held = self._held_bytes()
        if self._adapter is not None:
            self._adapter.to_host()
        if level == 2:
            self._drop_weights()
        elif self._home.type == "cpu":
            return 0, [f"weights stay resident ({held >> 20} MiB): host and device are the same memory"]
        else:
            for one in self.model.parameters():
                one.data = one.data.to("cpu")
        if self._home.type != "cpu":
            torch.accelerator.empty_cache()
        return held - self._held_bytes(), []

    def _drop_weights(self) -> None:
        """Give the parameters' memory up, whatever else holds on to them."""
        self._adapter = None
        for one in self.model.parameters():
            one.data = torch.empty(0, dtype=one.dtype, device=self._home)

    def _held_bytes(self) -> int:
        if self._home.type != "cpu":
            return torch.accelerator.memory_reserved(self._home)
        return sum(one.untyped_storage().nbytes() for one in self.model.parameters())

    def _wake_up(self, tag: Tag) -> None:
        if tag != "weights":
            return  # no cache is held between calls
        for one, shape in zip(self.model.parameters(), self._shapes, strict=True):
            dropped = one.shape != shape
            one.data = one.new_empty(shape, device=self._home) if dropped else one.data.to(self._home)

    def close(self) -> None:
        """Sample nothing any more; an own copy gives its memory back."""
        if self._closed:
            return
        self._closed = True  # the loop of another thread ends at its next step
        self._wait_for_step()
        self._run = None
        if self._reload is not None:
            self._drop_weights()

    def _own(self, what: str) -> Callable[[], nn.Module]:
        """How the own copy is loaded; raises Unsupported without one."""
        if self._reload is None:
            raise self._unsupported(what)
        return self._reload

    def _wait_for_step(self) -> None:
        """Until no thread is inside a decode step."""
        if not self._step.acquire(timeout=IDLE_LIMIT_S):
            raise EngineDead(f"engine: transformers: a decode step takes more than {IDLE_LIMIT_S:.0f} s")
        self._step.release()
