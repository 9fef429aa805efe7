"""The in-process engine: samples with a transformers module, the trainer's own or a copy.

With the trainer's module (the default of a run) a weight sync copies nothing: every step uses the current weights.
With its own copy (`build`: actors, servers) it supports updates, adapters and sleep like other engines.

This module has the queue of requests and the decode steps; `batch` computes a batch; `weights` updates a copy.
The samples of a prompt are in one batch. On an accelerator later requests join the running batch if it has room. On a
CPU they wait until it ends, so that runs repeat bit for bit: the rounding of matrix products depends on the number of
rows.
`abort`, `pause` and `close` take effect between two steps. The running batch is kept during a pause, and its rows
continue with the weights of the resumption. Between batches the engine holds no cache.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from swift.data.image_store import brought
from swift.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    RefusedChat,
    RequestRefused,
    SwiftError,
    SyncFailed,
    first_line,
    is_out_of_memory,
)
from swift.models.attention.choice import choose_attention
from swift.models.attention.interface import transformers_model
from swift.models.autocast import autocast_dtype, autocasting
from swift.models.routing import routing_of
from swift.models.sharded import device_of, is_sharded
from swift.models.vision import placeholder_ids, vision_of
from swift.rollout.engines import guided
from swift.rollout.engines.base import (
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    SleepLevel,
    Tag,
)
from swift.rollout.engines.expected_weights import kv_token_bytes
from swift.rollout.engines.running import Running, RunningRequests, SoFar
from swift.rollout.engines.states import StatefulEngine
from swift.rollout.engines.stepped import SteppedEngine
from swift.rollout.engines.transformers.batch import BatchRule, BatchRun, OwnCacheRun, state_bytes, takes_padding
from swift.rollout.engines.transformers.prompt_scores import PromptScores
from swift.rollout.engines.transformers.sampling import Row
from swift.rollout.engines.transformers.weights import InPlaceWeights, MergedAdapter
from swift.rollout.seeds import sample_uniforms
from swift.rollout.weights.base import WeightStream, dtype_name
from swift.types import Completion, Request, SamplingParams

logger = logging.getLogger(__name__)

PLAIN_FIELDS = ("frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs", "prompt_logprobs")
"""Sampling fields that need no optional package."""
IDLE_LIMIT_S = 60.0
"""Timeout of the wait for a step in another thread, in seconds; a step takes milliseconds to seconds."""


class TransformersEngine(SteppedEngine, StatefulEngine):
    """Samples from a transformers decoder in this process.

    Args:
        model: the policy, unwrapped (no DDP); PEFT models are supported. Its weights are read at every step.
        eos_token_ids: tokens that end a completion.
        tokenizer: needed for stop strings and guided decoding only.
        max_model_len: maximum tokens of prompt and completion; None takes the model's own.
        max_rows: maximum number of rows decoded together.
        cache_bytes: maximum size of the key/value cache; a fixed number keeps batch shapes reproducible.
        reload: loads the weights of version 0 again; None if `model` is the trainer's.
        keeps_base: whether level 2 of `sleep` keeps the weights, because only adapters are synced.
        returns_routes: whether completions have the experts of their tokens.

    Attributes:
        obstacle: reason why the model uses its own attention and cache, which is slower; None if it is packed.

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
        returns_routes: bool = False,
    ) -> None:
        super().__init__()
        self._reset_states()
        self.tokenizer, self.eos_token_ids = tokenizer, sorted(set(eos_token_ids))
        self.max_rows, self.cache_bytes = max_rows, cache_bytes
        self.keeps_base, self._returns_routes = keeps_base, returns_routes
        self.counters = EngineCounters()
        self._reload = reload
        self._guides: guided.GuideFactory | None = None
        self._running: RunningRequests[Row] = RunningRequests()
        self._scoring = PromptScores()
        self._run: BatchRun | None = None
        self._step = threading.Lock()  # held during a decode step
        self._may_have_room = self._is_sharded = False
        self._use_model(model)
        self._pads, self._gives_positions = False, hasattr(self._config, "rope_parameters")
        self._state_bytes = 0
        has_copy, can_guide = reload is not None, tokenizer is not None and guided.available()
        parameter = next(model.parameters())
        self.capabilities = Capabilities(
            name=self.name,
            logprob_support="truncated",
            shares_weights=not has_copy,
            max_model_len=int(max_model_len or getattr(self._config, "max_position_embeddings", None) or 1 << 30),
            dtype=dtype_name(autocast_dtype(model) or parameter.dtype),
            devices=(str(parameter.device),),
            lora=has_copy,
            sleep_levels=(0, 1, 2) if has_copy else (0,),
            in_flight_updates=True,
            guided=can_guide,
            images=vision_of(model) is not None,
            sampling_fields=(*PLAIN_FIELDS, "structured_outputs") if can_guide else PLAIN_FIELDS,
            routes=returns_routes,
        )
        if self.obstacle is not None:
            self._try_own_cache()

    def _use_model(self, model: nn.Module) -> None:
        self.model = model
        self._config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self.vocab_size = self._config.vocab_size
        self.obstacle = choose_attention(model)
        self._routing = routing_of(model) if self._returns_routes else None
        self.placeholders = [] if vision_of(model) is None else placeholder_ids(model.config)
        self._shapes = [parameter.shape for parameter in model.parameters()]
        self._device = self.device
        self._adapter: MergedAdapter | None = None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.model)

    @property
    def joins(self) -> bool:
        """Whether requests join a running batch."""
        return self.device.type != "cpu"

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self._check_usable()
        self.check_length(request)
        if request.images:
            self._check_seen(request)
        wanted, budget = request.sampling, self.room(request)
        if wanted.prompt_logprobs:
            self._scoring.insert(Running(request))
            return
        row = Row(request, budget=budget, ends=frozenset((*self.eos_token_ids, *wanted.stop_token_ids)))
        row.uniforms = sample_uniforms(wanted.seed, budget)
        if self._guides is not None and (guide := guided.guide_of(wanted)) is not None:
            row.guide = self._guides.matcher(guide, sorted(row.ends))
        self._running.insert(row)
        self._may_have_room = True

    def advance(self) -> list[Completion] | None:
        if self._paused or not (self._running or self._scoring):
            return None
        self._check_usable()
        try:
            with self._inference(), self._step:
                return self._step_batch()
        except BaseException as error:
            batch = [row.request for row in self._running.values() if row.started]
            if not is_out_of_memory(error) or len(batch) < 2 or self._scoring or self._is_sharded:
                self._drop_requests()  # the batch is in an undefined state
                raise
        self._sample_in_halves(batch)  # here the traceback, which holds tensors, is gone
        return []

    def _sample_in_halves(self, requests: Sequence[Request]) -> None:
        """Sample a batch that ran out of memory again; each sample has its own uniforms, so it stays the same.

        The time limits of its requests begin anew.
        """
        self._run, self.max_rows = None, len(requests) // 2
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        logger.warning(
            "memory: ran out in a batch of %d completions; again, with %d at most from here on",
            len(requests),
            self.max_rows,
        )
        for request in requests:
            self._running.take(request.request_id)
            self.submit(request)
            if (asked := self._pending.get(request.request_id)) is not None:
                asked.elapsed_s = None

    def check_length(self, request: Request) -> None:
        """Also refuses stop strings without a tokenizer, and guided decoding that cannot end or does not compile."""
        super().check_length(request)
        wanted, problem = request.sampling, ""
        if wanted.stop and self.tokenizer is None:
            problem = "stop strings need a tokenizer; use stop_token_ids"
        elif wanted.max_new_tokens < 1:
            problem = f"max_new_tokens {wanted.max_new_tokens}: below 1"
        if problem:
            raise RequestRefused(request.request_id, f"request: {request.request_id}: {problem}")
        if wanted.regex is None and not wanted.extra:
            return
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

    def _check_seen(self, request: Request) -> None:
        """Raises RequestRefused: the images of a request cannot be used, or its prompt shows them in another size."""
        vision, problem = vision_of(self.model), ""
        assert vision is not None, "checked with the prompt's ids"
        with brought([[shown.image for shown in request.images]]):
            try:
                if not vision.fits(request.prompt_ids):
                    problem = "its prompt has other tokens for its images than are made of them here; give both sides "
                    problem += "the same --max_pixels"
            except RefusedChat as error:
                problem = error.problems[0]
        if problem:
            raise RequestRefused(request.request_id, f"request: {request.request_id}: {problem}")

    def so_far(self, request_id: str) -> SoFar:
        return self._running.so_far(request_id)

    def abort_submitted(self, request_ids: Collection[str] | None) -> None:
        self._running.abort(request_ids)
        self._scoring.abort(request_ids)

    def pause(self) -> None:
        self._paused = True
        self._wait_for_step()

    def resume(self) -> None:
        self._paused = False

    def _outstanding(self) -> int:
        return len(self._running) + len(self._scoring)

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        """The model in evaluation mode, without gradients; its mode is restored afterwards."""
        if self._run is None:
            self._is_sharded = is_sharded(self.model)
        was_training = self.model.training
        try:
            if was_training:
                self.model.eval()
            # training uses the parameters that are gathered here, so they must not be inference tensors
            with torch.no_grad() if self._is_sharded else torch.inference_mode(), autocasting(self.model):
                yield
        finally:
            if was_training:
                self.model.train()

    def _step_batch(self) -> list[Completion]:
        """End aborted requests, or else make one decode step; returns the completions that end."""
        if self._scoring:
            withdrawn = [one.completion("abort") for one in self._scoring.take_aborted()]
            return withdrawn or self._scoring.step(self.model, self.device, self.version)
        aborted = self._running.take_aborted()
        ended = [row.completion("abort") for row in aborted]
        if aborted and self._run is not None:
            self._run.end(aborted)
        elif not aborted:
            if self._closed:  # by another thread after the last check
                return []
            self._fill_batch()
            assert self._run is not None, "no request is outstanding"
            ended = self._run.step(self.model, self.version)
            for completion in ended:
                self._running.take(completion.request_id)
        if ended:
            self._may_have_room = True
            if self._run is not None and not self._run.unfinished():
                self._run = None
        return ended

    def _fill_batch(self) -> None:
        """Begin a batch of waiting rows, or let them join the running one."""
        if self._run is not None and not (self.joins and self._may_have_room):
            return
        waiting = [row for row in self._running.values() if not row.started]
        if not waiting:
            return
        self._may_have_room = False
        token_bytes = kv_token_bytes(self._config, width=next(self.model.parameters()).element_size())
        slots = max(1, self.cache_bytes // max(1, token_bytes))
        one_length = self.obstacle is not None and not self._pads
        rule = BatchRule(self.max_rows, slots, one_length, self._state_bytes // max(1, token_bytes))
        rows = rule.first(waiting) if self._run is None else rule.joining(waiting, self._run)
        for row in rows:
            row.started = True
        arguments = (rows, self.tokenizer, self.device, self.counters, self._routing)
        if self._run is not None:
            self._run.join(rows)
        elif self.obstacle is None:
            self._run = BatchRun(*arguments)
        else:
            self._run = OwnCacheRun(*arguments, positions=self._gives_positions)

    def _drop_requests(self) -> None:
        """Drop all requests after a failure."""
        self._run = None
        self._running, self._scoring = RunningRequests(), PromptScores()

    def _try_own_cache(self) -> None:
        """Find out how the model's own cache can be used.

        Raises ConfigError if it does not have the common interface of transformers.
        """
        request = Request("trial", [0, 0], SamplingParams(max_new_tokens=2))
        try:
            list(self.sample([request]))
        except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"--model: {self._config.model_type}: the transformers engine cannot sample from this architecture "
                f"({type(error).__name__}: {first_line(error)}); choose a decoder with a key/value cache"
            ) from error
        self.counters = EngineCounters()
        positions = "position_ids" in signature(transformers_model(self.model).base_model.forward).parameters
        with self._inference():
            self._pads = takes_padding(self.model, self.device, positions=positions)
            self._state_bytes = state_bytes(self.model, self.device)
        self._gives_positions = positions if self._pads else self._gives_positions

    # --- weights ----------------------------------------------------------------------------------------------

    def _check_takes_weights(self) -> None:
        self._require_copy("a weight update: it shares the trainer's weights, so that only `version` changes")
        super()._check_takes_weights()

    def _load(self, stream: WeightStream) -> str:
        weights = InPlaceWeights(self.model)
        self._check_fits(stream, weights.problems(stream.manifest))
        for bucket in self._received(stream):
            weights.write(bucket)
            del bucket  # before the next one is gathered
        return weights.digest.hexdigest()

    def _weights_arrived(self, version: int) -> None:
        super()._weights_arrived(version)
        self._adapter = None  # the update has overwritten it and the base values

    def rebuild(self) -> None:
        """Load the weights of version 0 again; outstanding requests are kept."""
        reload = self._require_copy("rebuild")
        self._check_alive()
        self._drop_weights()  # before the other copy is loaded
        paused = self._paused
        try:
            self._use_model(reload())
        except (SwiftError, OSError, RuntimeError) as error:
            self._dead = f"it cannot be made again ({first_line(error)})"
            raise EngineDead(f"engine: transformers: {self._dead}") from error
        self._reset_states()
        self._paused = paused

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """Merge a LoRA adapter into the base weights; it replaces the previous one."""
        self._require_copy("LoRA adapters: the trainer's own is part of its model")
        self._check_takes("an adapter")
        merged = MergedAdapter(self.model, adapter, version)  # raises before any change
        with self._changing(f"adapter version {version}"):
            self._remove_adapter()
            merged.merge()
        self._adapter, self.version = merged, version
        return Ack(version, len(adapter.tensors), adapter.nbytes, adapter.digest())

    def drop_adapter(self) -> None:
        self._require_copy("LoRA adapters: the trainer's own is part of its model")
        self._check_takes("a change of adapter")
        with self._changing("the base"):
            self._remove_adapter()

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Context for changes of weights; an error inside invalidates them."""
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
        """No effect: the keys and values of a prompt are freed with its batch."""

    # --- memory -----------------------------------------------------------------------------------------------

    def _fall_asleep(self, level: SleepLevel) -> tuple[int, list[str]]:
        held = self._held_bytes()
        if self._adapter is not None:
            self._adapter.to_host()
        if level == 2:
            self._drop_weights()
        elif self._device.type == "cpu":
            return 0, [f"weights stay resident ({held >> 20} MiB): host and device are the same memory"]
        else:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to("cpu")
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        return held - self._held_bytes(), []

    def _drop_weights(self) -> None:
        """Free the memory of the parameters, also if other objects reference them."""
        self._adapter = None
        for parameter in self.model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)

    def _held_bytes(self) -> int:
        if self._device.type != "cpu":
            return torch.accelerator.memory_reserved(self._device)
        return sum(parameter.untyped_storage().nbytes() for parameter in self.model.parameters())

    def _wake_up(self, tag: Tag) -> None:
        if tag != "weights":
            return  # between batches the engine holds no cache
        for parameter, shape in zip(self.model.parameters(), self._shapes, strict=True):
            if parameter.shape == shape:
                parameter.data = parameter.data.to(self._device)
            else:
                parameter.data = parameter.new_empty(shape, device=self._device)

    def close(self) -> None:
        """Stop sampling; an own copy of the weights is freed."""
        if self._closed:
            return
        self._closed = True  # the sampling thread ends at its next step
        self._wait_for_step()
        self._run = None
        if self._reload is not None:
            self._drop_weights()

    def _require_copy(self, what: str) -> Callable[[], nn.Module]:
        """The function that loads the engine's copy. Raises Unsupported: the engine samples with the trainer's."""
        if self._reload is None:
            raise self._unsupported(what)
        return self._reload

    def _wait_for_step(self) -> None:
        """Wait until no thread is inside a decode step."""
        if not self._step.acquire(timeout=IDLE_LIMIT_S):
            raise EngineDead(f"engine: transformers: a decode step takes more than {IDLE_LIMIT_S:.0f} s")
        self._step.release()
