"""The in-process engine: samples with a transformers module, the trainer's own or a copy.

Over the trainer's own module (the default of a run) publishing copies nothing: the weights are read at every step.
Over an own copy (`build`: worker processes, servers) it takes updates, adapters and sleep like any other engine.

Owns the queue and the loop; `decoding` is the arithmetic of a batch; `transformers_weights`, `transformers_adapter`
and `transformers_memory` are how an own copy changes.
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
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swift.errors import (
    ConfigError,
    EngineAsleep,
    EngineDead,
    EngineError,
    RequestRefused,
    SwiftError,
    SyncFailed,
    Unsupported,
)
from swift.models.attention.choice import choose_attention
from swift.models.sharded import is_sharded
from swift.rollout.engines import guided
from swift.rollout.engines.base import (
    ALL_TAGS,
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    Health,
    InferenceEngine,
    PauseMode,
    SleepLevel,
    SleepReport,
    Tag,
    TensorInfo,
    WeightUpdate,
)
from swift.rollout.engines.decoding import BatchRun, OwnCacheRun
from swift.rollout.engines.transformers_adapter import FoldedAdapter
from swift.rollout.engines.transformers_batches import BatchRule, cache_slots
from swift.rollout.engines.transformers_memory import WeightMemory
from swift.rollout.engines.transformers_weights import InPlaceUpdate
from swift.rollout.weights.base import dtype_name
from swift.startup import collector_resting
from swift.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from swift.rollout.engines.spec import EngineSpec

MAX_LORA_RANK = 1 << 16
"""No rank is too large to be folded into weights; this is above any that a matrix can have."""

IDLE_LIMIT_S = 60.0
"""Longest wait for the step that another thread is in; a step takes milliseconds to seconds."""


class TransformersEngine(InferenceEngine):
    """Samples from a transformers decoder in this process.

    Args:
        model: the policy, unwrapped (no DDP); PEFT is fine. Its weights are read at every step.
        eos_token_ids: tokens that end a completion.
        tokenizer: needed for textual stop words only.
        max_model_len: prompt + completion limit in tokens; None takes the model's own.
        max_rows: most rows decoded together.
        cache_bytes: most bytes of key/value cache; a fixed number keeps batch shapes reproducible.
        reload: loads the weights of version 0 again. Given, `model` is a copy that belongs to this engine; None says
            that it is the trainer's.
        keeps_base: only adapters will be published, so that level 2 of `sleep` must not drop the weights.

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
        reload: Callable[[], nn.Module] | None = None,
        keeps_base: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = sorted(set(eos_token_ids))
        self.max_rows = max_rows
        self.cache_bytes = cache_bytes
        self.version = 0
        self.counters = EngineCounters()
        self._config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._size = sum(parameter.numel() for parameter in model.parameters())
        self._guides: guided.GuideFactory | None = None
        self._reload = reload
        self._keeps_base = keeps_base
        self._memory = WeightMemory(model) if reload is not None else None
        self._adapter: FoldedAdapter | None = None
        self._base_version = 0
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._run: BatchRun | None = None
        self._running: set[str] = set()
        self._finished: deque[Completion] = deque()
        self._aborting: set[str] = set()
        self._paused = False
        self._update: InPlaceUpdate | None = None
        self._void = ""
        self._closed = False
        self._queue = threading.Lock()  # of the sets and queues above, for moments
        self._step = threading.Lock()  # of the batch and the weights, for a step
        self.capabilities = self._describe(max_model_len)
        self.obstacle = choose_attention(model)
        """Why the model keeps its own attention and cache, which is slower; None when it does not."""
        self.rotary = hasattr(self._config, "rope_parameters")
        self.joins = self.device.type != "cpu"
        """Whether requests join a batch that runs."""
        self._look_for_room = False
        self._was_training = False
        self._spread = False
        if self.obstacle is not None:
            self._try_own_cache()

    def _describe(self, max_model_len: int | None) -> Capabilities:
        own = self._reload is not None
        parameter = next(self.model.parameters())
        return Capabilities(
            name="transformers",
            logprob_support="truncated",
            seeded=True,
            shares_weights=not own,
            max_model_len=int(max_model_len or getattr(self._config, "max_position_embeddings", None) or 1 << 30),
            dtype=dtype_name(parameter.dtype),
            devices=(str(parameter.device),),
            lora=own,
            max_lora_rank=MAX_LORA_RANK if own else 0,
            sleep_levels=(0, 1, 2) if own else (0,),
            kv_release=True,
            in_flight_updates=True,
            guided=self.tokenizer is not None and guided.available(),
            sampling_fields=("frequency_penalty", "presence_penalty", "min_tokens"),
        )

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue one sample; see `InferenceEngine.submit`."""
        self._check_awake()
        self.check_length(request)
        with self._queue:
            if request.request_id in self._running or request.request_id in self._waiting:
                raise EngineError(f"request: {request.request_id}: is outstanding already; give each an id of its own")
            self._waiting[request.request_id] = request
            self._look_for_room = True

    def stream(self) -> Iterator[Completion]:
        """Completions as their rows end; see `InferenceEngine.stream`."""
        while True:
            while self._finished:
                yield self._finished.popleft()
            self._between()
            if self._paused or not self._outstanding:
                return
            self._advance(one_step=self.between_steps is not None)

    def check_length(self, request: Request) -> None:
        """Also refuses what the model cannot read, and stop words without a tokenizer."""
        super().check_length(request)
        vocabulary = self._config.vocab_size
        problem = ""
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            problem = f"its prompt has token ids outside of 0..{vocabulary - 1}; tokenize it with the model's tokenizer"
        elif request.sampling.stop and self.tokenizer is None:
            problem = "stop strings need a tokenizer; use stop_token_ids"
        elif request.sampling.max_new_tokens < 1:
            problem = f"max_new_tokens {request.sampling.max_new_tokens}: below 1"
        if problem:
            raise RequestRefused(request.request_id, f"request: {request.request_id}: {problem}")
        if request.sampling.regex is not None:
            self._check_regex(request)

    def _check_regex(self, request: Request) -> None:
        """Raises RequestRefused for an expression that cannot be compiled, or whose end no token could mark."""
        if not self.eos_token_ids and not request.sampling.stop_token_ids:
            raise RequestRefused(
                request.request_id,
                f"request: {request.request_id}: regex: there is no end token that could follow a match; "
                "name one in stop_token_ids",
            )
        if self._guides is None:
            self._guides = guided.GuideFactory(self.tokenizer, self._config.vocab_size)
        try:
            self._guides.compiled(request.sampling.regex)
        except EngineError as error:
            raise RequestRefused(request.request_id, *error.problems) from error

    def stream_tokens(self, request: Request) -> Iterator[tuple[int, float]]:
        """Sample one request and yield (token id, log-prob) as they come; the last one ends the completion."""
        self._check_awake()
        self.check_length(request)
        run = self._start([request])
        seen = 0
        while not run.done:
            self._check_awake()
            with self._step, _without_gradients(is_sharded(self.model)):
                self.model.eval()
                finished = run.step(self.model, self.version)
            ids, logprobs = (finished[0].token_ids, finished[0].logprobs) if finished else run.row(0)
            yield from zip(ids[seen:], logprobs[seen:], strict=True)
            seen = len(ids)

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End requests, from any thread; takes effect at the next step of `stream`."""
        with self._queue:
            outstanding = {*self._waiting, *self._running}
            self._aborting |= outstanding if request_ids is None else outstanding & set(request_ids)

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stop sampling; see `InferenceEngine.pause`. Also from another thread than that of `stream`."""
        if mode == "wait":
            while self._outstanding and not self._paused:
                self._advance()
        elif mode == "abort":
            self.abort()
            if self._outstanding:
                self._advance()
        self._paused = True
        self._wait_for_step()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    @property
    def _outstanding(self) -> int:
        return len(self._waiting) + len(self._running)

    def _advance(self, *, one_step: bool = False) -> None:
        """Decode until a row ends, or somebody wants something; what ended is in `_finished`."""
        self._check_awake()
        started = time.monotonic()
        ended: list[Completion] = []
        try:
            if self._run is None:
                self._spread = is_sharded(self.model)
            with _without_gradients(self._spread):
                while self._outstanding and not ended and not self._paused and not self._closed:
                    with self._step:
                        ended = self._one_step()
                    if one_step:
                        break
        except BaseException:
            self._forget()  # the batch is in no state to go on from
            raise
        finally:
            if self._was_training:
                self.model.train()
                self._was_training = False
            self.counters.generate_s += time.monotonic() - started
        self._finished.extend(ended)

    def _one_step(self) -> list[Completion]:
        """Carry out what was aborted, else one decode step of the batch; the completions that end."""
        ended: list[Completion] = []
        aborting: set[str] = set()
        if self._run is None or self._aborting or self._waiting:
            with self._queue:
                aborting, self._aborting = self._aborting, set()
                ended = [_unbegun(self._waiting.pop(name)) for name in list(self._waiting) if name in aborting]
                self._take_up()
        if self._run is not None:
            ended += self._run.end(aborting) if aborting else self._stepped(self._run)
        if ended:
            with self._queue:
                self._running -= {completion.request_id for completion in ended}
                self._look_for_room |= bool(self._waiting)
                if self._run is not None and self._run.done:
                    self._run = None
        return ended

    def _take_up(self) -> None:
        """Begin a batch of waiting requests, or let them join the one that runs."""
        if self._run is not None:
            batch = self._joining()
        elif self._waiting:
            batch = self._rule().first(list(self._waiting.values()))
        else:
            return
        for request in batch:
            del self._waiting[request.request_id]
            self._running.add(request.request_id)
        if batch and self._run is not None:
            self._run.join(batch, [self.room(request) for request in batch])
        elif batch:
            self._run = self._start(batch)

    def _stepped(self, run: BatchRun) -> list[Completion]:
        if self.model.training:
            self.model.eval()
            self._was_training = True
        return run.step(self.model, self.version)

    def _forget(self) -> None:
        """After a failure nobody waits for the rest: what was asked for is gone."""
        with self._queue:
            self._run = None
            self._running.clear()
            self._waiting.clear()
            self._aborting.clear()

    def _start(self, batch: list[Request]) -> BatchRun:
        options: dict[str, Any] = {
            "eos_token_ids": self.eos_token_ids,
            "tokenizer": self.tokenizer,
            "device": self.device,
            "counters": self.counters,
            "guides": self._guides,
        }
        budgets = [self.room(request) for request in batch]
        if self.obstacle is None:
            return BatchRun(batch, budgets, **options)
        return OwnCacheRun(batch, budgets, rotary=self.rotary, **options)

    def _joining(self) -> list[Request]:
        """Waiting requests that join the running batch."""
        if self._run is None or not self._look_for_room or not self.joins:
            return []
        self._look_for_room = False
        return self._rule().joining(list(self._waiting.values()), self._run)

    def _rule(self) -> BatchRule:
        slots = cache_slots(self._config, next(self.model.parameters()).element_size(), self.cache_bytes)
        return BatchRule(self.max_rows, slots, one_length=self.obstacle is not None, room=self.room)

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

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """Start to replace all weights, in place; see `InferenceEngine.begin_update`."""
        self._own("a weight update: it shares the trainer's weights, so that only `version` changes")
        self._check_loaded()
        self._check_at_rest("new weights")
        if self._update is not None:
            raise SyncFailed(
                f"weights: version {version} for transformers: version {self._update.version} is on its way; "
                "commit or abort it first"
            )
        update = InPlaceUpdate(self.model, manifest, version, ended=self._update_ended)
        self._update = update
        return update

    def _update_ended(self, update: InPlaceUpdate, void: str) -> None:
        """Called once by the update: committed (void is ""), or given up with the weights in this state."""
        if update is not self._update:
            return  # of weights that were rebuilt meanwhile
        self._update = None
        self._void = void or self._void
        if void or update.committed:
            self._adapter = None  # overwritten, with what it replaced
        if update.committed:
            self.version = self._base_version = update.version
            self._void = ""
            if self._memory is not None:
                self._memory.filled()

    def rebuild(self) -> None:
        """Load the weights of version 0 again; requests that are outstanding stay so."""
        reload = self._own("rebuild")
        self._check_open()
        self._void = "they could not be loaded again"
        if self._memory is not None:
            self._memory.drop()  # never two copies at once
        try:
            self.model = reload()
        except (SwiftError, OSError, RuntimeError) as error:
            raise EngineDead(f"engine: transformers: cannot be made again ({str(error).splitlines()[0]})") from error
        self.obstacle = choose_attention(self.model)
        self._memory = WeightMemory(self.model)
        self._adapter, self._update, self._void = None, None, ""
        self.version = self._base_version = 0

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """Fold a LoRA adapter into the base weights, in place of the former one."""
        self._own("LoRA adapters: the trainer's own is part of its model")
        self._check_whole()
        self._check_at_rest("an adapter")
        started = time.monotonic()
        folded = FoldedAdapter(self.model, adapter, version)  # refuses before anything is changed
        with self._changing(f"adapter version {version}"):
            self._drop_adapter()
            rounded = folded.fold()
        self._adapter = folded
        self.version = version
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in adapter.tensors.values())
        return Ack(version, len(adapter.tensors), nbytes, adapter.digest(), time.monotonic() - started, rounded)

    def drop_adapter(self) -> None:
        """Sample with the base weights again."""
        self._own("LoRA adapters: the trainer's own is part of its model")
        self._check_whole()
        self._check_at_rest("a change of adapter")
        with self._changing("the base"):
            self._drop_adapter()

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Weights are written inside; they are void unless it ends well."""
        self._void = f"{what} is in them by half"
        try:
            yield
        except Exception as error:
            raise SyncFailed(
                f"weights: {what} for transformers: {type(error).__name__}: {str(error).partition(chr(10))[0]}; "
                "rebuild the engine"
            ) from error
        self._void = ""

    def _drop_adapter(self) -> None:
        if self._adapter is not None:
            self._adapter.unfold()
        self._adapter, self.version = None, self._base_version

    def reset_caches(self) -> None:
        """Nothing to forget: a prompt's keys and values live as long as its batch."""

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """Release memory; see `InferenceEngine.sleep`. No key/value cache is held between calls anyway."""
        if level == 0:
            return SleepReport()
        self._own(f"sleep({level}): the weights are the trainer's")
        self._check_open()
        if self._outstanding:
            raise EngineError(f"engine: transformers: {self._outstanding} requests are outstanding; abort them first")
        assert self._memory is not None
        if self._adapter is not None:
            self._adapter.to_host()
        if level == 2 and self._keeps_base:
            report = self._memory.sleep(1)
            return replace(report, note=f"base weights are kept: only adapters are synced; {report.note}")
        if level == 2:
            self._adapter = None
        return self._memory.sleep(level)

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """Take memory back; returns whether everything is awake now."""
        self._check_open()
        unknown = [tag for tag in tags if tag not in ALL_TAGS]
        if unknown:
            raise Unsupported(
                f"engine: transformers: wake({', '.join(unknown)}): no such tag; use {', '.join(ALL_TAGS)}"
            )
        return self._memory.wake(tags) if self._memory is not None else True

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Whether it can sample, now or once it is awake."""
        if self._closed or self._void:
            return Health(False, self.version, "closed" if self._closed else f"its weights are void: {self._void}")
        return Health(True, self.version, self._memory.state if self._memory is not None else "")

    def info(self) -> dict[str, Any]:
        """What it is; JSON-safe."""
        return {
            "engine": self.capabilities.name,
            "version": self.version,
            "architecture": self._config.model_type,
            "parameters": self._size,
            "dtype": self.capabilities.dtype,
            "devices": list(self.capabilities.devices),
            "own_copy": self._reload is not None,
            "adapter_version": self._adapter.version if self._adapter is not None else None,
            "outstanding": self._outstanding,
            "state": self.health().detail or "ready",
        }

    def close(self) -> None:
        """Sample nothing any more; an own copy gives its memory back."""
        if self._closed:
            return
        self._closed = True  # the loop of another thread ends at its next step
        self._wait_for_step()
        self._run = None
        if self._memory is not None:
            self._memory.drop()

    # --- states -----------------------------------------------------------------------------------------------

    def _own(self, what: str) -> Callable[[], nn.Module]:
        """How the own copy is loaded; raises Unsupported without one."""
        if self._reload is None:
            raise self._unsupported(what)
        return self._reload

    def _gone(self) -> EngineDead:
        return EngineDead("engine: transformers: it is closed; make a new one")

    def _check_open(self) -> None:
        if self._closed:
            raise self._gone()

    def _check_loaded(self) -> None:
        """Raises when there are no weights to write to."""
        self._check_open()
        if self._memory is not None and "weights" in self._memory.asleep:
            raise EngineAsleep(f"engine: transformers: {self._memory.state}; wake its weights first")

    def _check_whole(self) -> None:
        """Raises when its weights are not those of a version."""
        self._check_open()
        if self._void:
            raise SyncFailed(f"engine: transformers: its weights are void: {self._void}; rebuild it")
        if self._memory is not None and (self._memory.lost or "weights" in self._memory.asleep):
            raise EngineAsleep(f"engine: transformers: {self._memory.state}; wake it, and publish what it dropped")
        if self._update is not None:
            raise SyncFailed(
                f"engine: transformers: version {self._update.version} has arrived in part; commit it first"
            )

    def _check_awake(self) -> None:
        """Raises when it cannot sample."""
        self._check_whole()
        if self._memory is not None and self._memory.asleep:
            raise EngineAsleep(f"engine: transformers: {self._memory.state}; wake it")

    def _check_at_rest(self, what: str) -> None:
        if self._outstanding and not self._paused:
            raise EngineError(
                f"engine: transformers: {what} while {self._outstanding} requests are outstanding; "
                "wait for them, or pause with keep"
            )

    def _wait_for_step(self) -> None:
        """Until no thread is inside a decode step."""
        if not self._step.acquire(timeout=IDLE_LIMIT_S):
            raise EngineDead(f"engine: transformers: a decode step takes more than {IDLE_LIMIT_S:.0f} s")
        self._step.release()


def build(spec: EngineSpec) -> TransformersEngine:
    """An engine with weights of its own, read from the folder.

    `engine_kwargs`: `cache_bytes`, `attn_impl`.

    Raises:
        ConfigError: unreadable files, an architecture that cannot be sampled from, or settings that it does not have.
    """
    from swift.models import load_for_inference
    from swift.models.arguments import CheckpointArguments
    from swift.models.tokenizer import read_tokenizer
    from swift.rollout.engines.process import bind_to_cores, same_randomness

    options = dict(spec.engine_kwargs)
    attention = options.pop("attn_impl", "sdpa")
    cache = int(options.pop("cache_bytes", 2 << 30))
    if options:
        raise ConfigError(
            f"--vllm_engine_kwargs: {', '.join(options)}: the transformers engine has no such argument; "
            "valid: cache_bytes, attn_impl"
        )
    if spec.tensor_parallel_size != 1 or len(spec.devices) != 1:
        raise ConfigError(
            f"--vllm_tensor_parallel_size: {spec.tensor_parallel_size}: the transformers engine uses one device; "
            "use 1, or --infer_backend vllm"
        )
    args = CheckpointArguments(
        model=spec.model,
        adapters=list(spec.adapters),
        torch_dtype=spec.dtype,  # type: ignore[arg-type]
        attn_impl=attention,
        trust_remote_code=spec.trust_remote_code,
    )
    device = "cpu" if spec.devices[0].startswith("cpu") else spec.devices[0]

    def load() -> nn.Module:
        with same_randomness():
            return load_for_inference(args, device=device)

    bind_to_cores(spec.cores)
    with collector_resting():
        model = load()
        tokenizer = read_tokenizer(spec.model, trust_remote_code=spec.trust_remote_code)
    return TransformersEngine(
        model,
        eos_token_ids=spec.eos_token_ids,
        tokenizer=tokenizer,
        max_model_len=spec.max_model_len,
        max_rows=spec.max_num_seqs,
        cache_bytes=cache,
        reload=load,
        keeps_base=spec.lora,
    )


def _without_gradients(spread: bool) -> AbstractContextManager[Any]:
    """Inference mode; plain no_grad where parameters are gathered inside, which training uses afterwards."""
    return torch.no_grad() if spread else torch.inference_mode()


def _unbegun(request: Request) -> Completion:
    """What an aborted request has that no step was done for."""
    return Completion(request.request_id, [], [], "abort")
