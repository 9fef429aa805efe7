"""vLLM in this process: the engine shares the trainer's device and takes turns with it.

One request is one sample with its own seed. Prompts of a group share their prefill through the prefix cache, whose
blocks are told apart by the version of the weights, beside being dropped when these change. Only our end tokens end a
completion, and the ending token belongs to it; log-probs are of the sampled token after temperature, penalties and
truncation. What the trainer has in the same process (random generators, environment, process group) stays as it was.

    awake -- sleep(1|2) --> asleep -- wake(weights) --> weights awake -- wake(kv_cache) --> awake
    whole -- first bucket --> taken apart -- commit --> whole            (a failure or abort: void, until `rebuild`)

A step samples one token of every running request with one version of the weights, so that versions change between
tokens only. Requests kept over an update (`pause("keep")`) are prefilled again with the new weights when they go on.

On a CPU vLLM cannot sleep; the KV cache's pages are given back to the system here instead, and weights stay resident.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

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
from swift.rollout.engines import vllm_settings, vllm_start, vllm_versions
from swift.rollout.engines.base import (
    ALL_TAGS,
    Capabilities,
    EngineCounters,
    Health,
    InferenceEngine,
    PauseMode,
    SleepLevel,
    SleepReport,
    Tag,
)
from swift.rollout.engines.expected_weights import ExpectedWeights
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.engines.vllm_direct import Layout, NoLayout
from swift.rollout.engines.vllm_process import (
    SEGMENTS_IN_RANKS,
    bind_to_cores,
    groups,
    remove_segments,
    same_randomness,
)
from swift.rollout.engines.vllm_start import first_line
from swift.rollout.engines.vllm_weights import (
    AdapterShelf,
    DirectUpdate,
    LoadedAdapter,
    ReloadUpdate,
    adapter_rank,
    loses_bits,
)
from swift.rollout.weight_sync.base import Ack, AdapterWeights, Live, TensorInfo, WeightUpdate, dtype_name
from swift.types import Completion, FinishReason, Request, SamplingParams

logger = logging.getLogger(__name__)

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""vLLM's finish reasons in our words; any other is an error."""
RPC_TIMEOUT_S = 300.0
"""Bound on one call to worker processes, in seconds."""
CLOSE_S = 10
"""How long `close` waits for the step in progress, in seconds."""


def require() -> None:
    """Checks that a supported vLLM is installed, without importing it.

    Raises:
        ResourceError: there is none.
    """
    vllm_versions.require_version()


def build(spec: EngineSpec) -> VLLMEngine:
    """Makes the engine in this process; with torch.distributed initialised, all ranks call this together.

    Raises:
        ResourceError: vLLM is missing or not supported, or memory does not suffice.
        ConfigError: arguments or a model that vLLM refuses.
        EngineError: vLLM failed to start.
    """
    return VLLMEngine(spec)


@dataclass(slots=True)
class _Running:
    """A request that vLLM has. pinned: the version of its adapter, or None when it follows the weights."""

    request: Request
    pinned: int | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (version, first token)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Tokens sampled in one step."""
        version = version if self.pinned is None else self.pinned
        if token_ids and (not self.spans or self.spans[-1][0] != version):
            self.spans.append((version, len(self.token_ids)))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)

    def completion(self, reason: FinishReason) -> Completion:
        """What it has, as it ends."""
        ends = [*(start for _, start in self.spans[1:]), len(self.token_ids)][: len(self.spans)]
        return Completion(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=reason,
            versions=[(version, start, end) for (version, start), end in zip(self.spans, ends, strict=True)],
        )


class VLLMEngine(InferenceEngine):
    """See the module's docstring.

    Args:
        spec: the engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.counters = EngineCounters()
        self.version = 0
        self._vllm = vllm_versions.load_vllm()
        self._on_cpu = bool(self._vllm.platform.is_cpu())
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._ready: deque[Completion] = deque()
        self._to_abort: set[str] = set()
        self._paused = False
        self._asleep: set[Tag] = set()
        self._dropped = False  # level 2 took the weights; an update brings them back
        self._void = ""  # why the weights cannot be used, until `rebuild`
        self._dead = ""  # why nothing works any more, until `rebuild`
        self._closed = False
        self._update: ReloadUpdate | None = None
        self._layout: Layout | None = None  # where updates can be written without a reload, once that is proven
        self._obstacle = ""  # why they cannot
        self._shared = False  # the trainer's parameters are this memory
        self._parted = ""  # why they are no longer
        self._base_version = 0
        self._shelf = AdapterShelf()
        self._adapter: LoadedAdapter | None = None
        self._busy = threading.Lock()  # held while vLLM works, so that `close` from another thread waits
        self._executor = vllm_start.executor_of(spec)
        self._config = vllm_start.model_config(spec)
        self._expected: ExpectedWeights | None = None
        bind_to_cores(spec.cores if self._executor != "mp" else ())
        self._llm: Any = None
        groups.enter()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Make vLLM's engine, find out what it can, and bring it to the weights of the spec."""
        spec = self.spec
        self._llm = self._new_llm()
        self.capabilities = self._find_capabilities()
        self._try_out()
        if spec.adapters:
            self._fold_adapters()
        if spec.lora and self._on_cpu:
            logger.warning("vllm: adapters decode 5 to 10 times slower on a CPU; --vllm_enable_lora false merges them")

    # --- sampling ---------------------------------------------------------------------------------------------

    def check_length(self, request: Request) -> None:
        """Also refuses what vLLM would, as far as that can be known before it is submitted."""
        super().check_length(request)
        vocabulary = self._config.get_text_config().vocab_size
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            raise RequestRefused(
                request.request_id,
                f"request: {request.request_id}: its prompt has token ids outside of 0..{vocabulary - 1}; "
                "tokenize it with the model's tokenizer",
            )
        try:
            self._parameters(request)
        except Exception as error:  # which types these are changes with vLLM
            raise RequestRefused(
                request.request_id, f"request: {request.request_id}: vLLM refuses it ({first_line(error)})"
            ) from error

    def submit(self, request: Request) -> None:
        """See `InferenceEngine.submit`."""
        self._check_usable()
        self.check_length(request)
        if request.request_id in self._running:
            raise EngineError(f"request: {request.request_id}: submitted twice; ids must differ while in flight")
        adapter = self._adapter
        lora = self._lora_request(adapter) if adapter is not None else None
        try:
            with same_randomness():
                self._llm.add_request(
                    request.request_id,
                    {"prompt_token_ids": list(request.prompt_ids), "cache_salt": f"version {self.version}"},
                    self._parameters(request),
                    lora_request=lora,
                )
        except Exception as error:
            self._llm.abort_request([request.request_id])  # it may have been noted by half
            raise EngineError(f"request: {request.request_id}: vLLM refuses it ({first_line(error)})") from error
        with self._lock:
            self._running[request.request_id] = _Running(request, adapter.version if adapter is not None else None)

    def _parameters(self, request: Request) -> Any:
        """A request's sampling parameters in vLLM's words."""
        wanted: SamplingParams = request.sampling
        return self._vllm.SamplingParams(
            max_tokens=self.room(request),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k if wanted.top_k > 0 else 0,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty,
            seed=wanted.seed if wanted.temperature > 0 else None,
            stop=list(wanted.stop) or None,
            stop_token_ids=sorted({*self.spec.eos_token_ids, *wanted.stop_token_ids}),
            ignore_eos=True,  # the model's own; ours are among the stop ids
            detokenize=bool(wanted.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            logprobs=0,
            output_kind=self._vllm.DELTA,
            **vllm_settings.unusual_sampling(self._vllm, wanted),
        )

    def stream(self) -> Iterator[Completion]:
        """See `InferenceEngine.stream`."""
        while True:
            self._check_alive()
            self._apply_aborts()
            while self._ready:
                yield self._ready.popleft()
            self._between()
            if not self._running or self._paused:
                return
            self._check_usable()
            self._step()

    def _step(self) -> None:
        """One token of every running request; those that ended with it are ready.

        Raises:
            EngineDead: vLLM failed.
            EngineError: what it gave one request is no token; the other requests have theirs.
        """
        started = time.monotonic()
        try:
            with self._busy, same_randomness():
                self._check_alive()
                outputs = self._llm.step()
        except EngineDead:
            raise
        except Exception as error:
            self._dead = f"a decode step failed ({type(error).__name__}: {first_line(error)})"
            raise EngineDead(f"engine: vllm: {self._dead}; rebuild the engine") from error
        finally:
            self.counters.generate_s += time.monotonic() - started
        self.counters.decode_steps += bool(outputs)
        problem: Exception | None = None
        for output in outputs:
            try:
                done = self._take(output)
            except Exception as error:  # the tokens of the others come only once
                problem = problem or error
            else:
                self._ready.extend([done] if done is not None else [])
        if problem is not None:
            raise problem

    def _take(self, output: Any) -> Completion | None:
        """Note what a step gave one request; its completion when that was the end.

        Raises:
            EngineError: a log-prob that cannot be one.
        """
        running = self._running.get(output.request_id)
        if running is None:
            return None  # aborted meanwhile
        part = output.outputs[0]
        token_ids = list(part.token_ids)
        if token_ids and not running.token_ids:
            self.counters.prefill_tokens += len(running.request.prompt_ids) - (output.num_cached_tokens or 0)
        self.counters.decode_rows += bool(token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(token_ids, part.logprobs or (), strict=True)]
        for place, logprob in enumerate(logprobs, start=len(running.token_ids)):
            if not (logprob <= 0 and math.isfinite(logprob)):
                self._drop(output.request_id)
                raise EngineError(
                    f"request: {output.request_id}: token {place} has log-prob {logprob}: the model's output is not "
                    "finite; look at its weights"
                )
        running.add(token_ids, logprobs, self.version)
        if not output.finished:
            return None
        with self._lock:
            del self._running[output.request_id]
        return running.completion(REASONS.get(part.finish_reason, "error"))

    def _drop(self, request_id: str) -> None:
        """Forget a request without a completion."""
        with self._lock:
            self._running.pop(request_id, None)
        self._llm.abort_request([request_id])

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `InferenceEngine.abort`; takes effect with the next step, from any thread."""
        with self._lock:
            self._to_abort |= set(self._running if request_ids is None else request_ids) & set(self._running)

    def _apply_aborts(self) -> None:
        """End the requests that `abort` named: their tokens so far are their completions."""
        with self._lock:
            named = [name for name in self._running if name in self._to_abort]
            ended = [self._running.pop(name) for name in named]
            self._to_abort.clear()
        if named and not self._void and not self._dead:
            self._llm.abort_request(named)
        self._ready.extend(running.completion("abort") for running in ended)

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `InferenceEngine.pause`."""
        if mode not in ("abort", "wait", "keep"):
            raise ConfigError(f"pause: {mode}: no such mode; valid: abort, wait, keep")
        self._check_alive()
        if mode == "abort":
            self.abort()
            self._apply_aborts()
        while mode == "wait" and self._running:
            self._check_usable()
            self._step()
            self._apply_aborts()
        self._paused = True

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._paused = False

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """See `InferenceEngine.begin_update`.

        Raises:
            EngineError: also when kept requests sample with an adapter, which the update drops.
            Unsupported: also with LoRA layers, below which an older vLLM cannot replace weights.
        """
        self._check_ready(version)
        if self._shared:  # writing it could overwrite values that the trainer has put aside
            raise EngineError("engine: vllm: its weights are the trainer's own memory; separate them before an update")
        expected = self._expect()
        problems = expected.check(manifest)
        if problems:
            raise SyncFailed(f"weights: version {version} for vllm: {_few(problems)}")
        settings: dict[str, Any] = {
            "expected": expected,
            "call": self._call,
            "apart": self._executor == "mp",
            "dtype": self.capabilities.dtype,
            "spoiled": self._spoil,
            "done": self._weights_arrived,
        }
        layout = self._layout
        # what sleep(2) took is more than the tensors of an update: padding, which only the loaders write
        if layout is not None and not self._dropped and layout.fits(manifest) and layout.in_place():
            self._update = DirectUpdate("vllm", manifest, version, layout=layout, **settings)
            return self._update
        self._layout = None
        learn = self._find_layout(manifest, expected)

        def learned(obstacle: str) -> None:
            self._layout = learn if not obstacle else None
            self._note_obstacle(obstacle)

        self._update = ReloadUpdate("vllm", manifest, version, learn=learn, learned=learned, **settings)
        return self._update

    def _find_layout(self, manifest: Sequence[TensorInfo], expected: ExpectedWeights) -> Layout | None:
        """Where an update should lie after a reload; None once something was found to stand against it."""
        if self._obstacle or self._executor == "mp" or self._dropped:
            return None
        if self.spec.tensor_parallel_size > 1:
            self._note_obstacle("its weights are cut for tensor parallelism")
            return None
        found = self._call("swift_layout", manifest, expected.tied, expected.embedding)[0]
        if isinstance(found, str):
            self._note_obstacle(found)
            return None
        layout: Layout = found
        return layout

    def _note_obstacle(self, obstacle: str) -> None:
        """Say once why every update is a reload."""
        if obstacle and not self._obstacle:
            self._obstacle = obstacle
            logger.info("vllm: every update is a reload: %s", obstacle)

    def share(self, live: Live) -> str:
        """See `InferenceEngine.share`; done once, after an update has shown where each tensor lies."""
        if self._parted:
            return self._parted
        if self.spec.sleep and not self._on_cpu:
            return "its weights leave the device while it sleeps (--sleep_level)"
        if self._layout is None:
            return self._obstacle or "no update has shown yet how it stores its weights"
        try:
            self._layout.share(live)
        except NoLayout as error:
            return str(error)
        self._shared = True
        return ""

    def take_shared(self, live: Live, version: int) -> Ack | None:
        """See `InferenceEngine.take_shared`."""
        if not self._shared or self._layout is None:
            return None
        self._check_ready(version)
        began = time.monotonic()
        if not (self._layout.in_place() and self._layout.shared_with(live)):
            self.separate()
            self._parted = "the trainer's parameters have moved to other memory"
            logger.warning("vllm: %s; updates are copied from now on", self._parted)
            return None
        try:
            self._weights_arrived(version)
        except EngineError as error:
            self._spoil(f"the update to version {version} failed ({first_line(error)})")
            raise
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in live.values())
        return Ack(version, len(live), nbytes, digest="", seconds=time.monotonic() - began, note="one memory for both")

    def separate(self) -> None:
        """See `InferenceEngine.separate`."""
        if self._shared and self._layout is not None:
            self._layout.separate()
        self._shared = False

    def _check_ready(self, version: int) -> None:
        """Raises what `begin_update` does when other weights cannot be taken now."""
        self._check_whole()
        if self.spec.lora and not self._vllm.reloads_under_adapters:
            raise Unsupported(
                f"--vllm_enable_lora: true: vLLM {self._vllm.version} cannot replace the weights below LoRA layers; "
                "send adapters only, install a newer vLLM, or --vllm_enable_lora false"
            )
        if "weights" in self._asleep:
            raise EngineAsleep("engine: vllm: asleep: it takes no weights; wake them first")
        self._check_idle("new weights")
        if any(running.pinned is not None for running in self._running.values()):
            raise EngineError("engine: vllm: kept requests sample with an adapter; drain them before new weights")
        if self._update is not None and self._update.loading:
            raise SyncFailed(f"weights: version {version} for vllm: another update is under way; abort it first")

    def _weights_arrived(self, version: int) -> None:
        """All weights are in: adapters and what was computed with the old ones are gone, then the version changes."""
        self._drop_adapters()
        if not self._on_cpu:
            torch.accelerator.synchronize()  # vLLM may run on another stream than what has written them
        self._reset_awake_caches()
        self._dropped = False
        self.version = self._base_version = version

    def rebuild(self) -> None:
        """See `InferenceEngine.rebuild`; outstanding requests end with "abort".

        With tensor parallelism over ranks, all ranks call this together.
        """
        if self._closed:
            raise EngineDead("engine: vllm: closed: it cannot be rebuilt")
        self._void = self._void or "it is being rebuilt"
        self.abort()
        self._apply_aborts()
        self.separate()
        try:
            self._shut_down()
            self._llm = self._new_llm()
        except SwiftError as error:
            self._dead = f"it could not be rebuilt ({first_line(error)})"
            raise EngineDead(f"engine: vllm: {self._dead}") from error
        self._void, self._dead, self._update, self._dropped, self._paused = "", "", None, False, False
        self._layout, self._obstacle = None, ""
        self._asleep = set()
        self._shelf.close()
        self._adapter = None
        self.version = self._base_version = 0
        if self.spec.adapters:
            self._fold_adapters()

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """See `InferenceEngine.load_adapter`; requests in flight (paused with "keep") end with the adapter they have.

        Raises:
            ConfigError: its rank is above `max_lora_rank`.
            Unsupported: vLLM would ignore a part of it.
        """
        if not self.spec.lora:
            raise self._unsupported("LoRA adapters (--vllm_enable_lora true)")
        self._check_whole()
        if "weights" in self._asleep:
            raise EngineAsleep("engine: vllm: asleep: it takes no adapter; wake its weights first")
        self._check_idle("a new adapter")
        rank, limit = adapter_rank(adapter), self.capabilities.max_lora_rank
        if rank > limit:
            raise ConfigError(f"--vllm_max_lora_rank: {limit}: the adapter has rank {rank}; set it to {rank}")
        problems = self._expect().check_adapter(adapter)
        if problems:
            raise Unsupported(
                f"weights: adapter version {version} for vllm: {_few(problems)}; --vllm_enable_lora false merges it"
            )
        began = time.monotonic()
        loaded, digest = self._shelf.add(adapter, version)
        try:
            if digest != adapter.digest():
                raise SyncFailed(
                    f"weights: adapter {loaded.name} for vllm: what was written differs from what was sent"
                )
            self._add_to_vllm(loaded)
        except BaseException:
            self._shelf.discard(loaded)
            raise
        self._shelf.held.append(loaded)
        self._adapter = loaded
        self._drop_old_adapters()
        self._reset_awake_caches()
        self.version = version
        tensors = adapter.tensors.values()
        return Ack(
            version=version,
            tensors=len(adapter.tensors),
            nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            digest=digest,
            seconds=time.monotonic() - began,
            rounded=any(loses_bits(dtype_name(tensor.dtype), self.capabilities.dtype) for tensor in tensors),
        )

    def _add_to_vllm(self, loaded: LoadedAdapter) -> None:
        try:
            with same_randomness():
                self._llm.add_lora(self._lora_request(loaded))
        except Exception as error:
            raise SyncFailed(
                f"weights: adapter {loaded.name} for vllm: {type(error).__name__}: {first_line(error)}"
            ) from error
        if loaded.number not in self._llm.list_loras():
            raise SyncFailed(f"weights: adapter {loaded.name} for vllm: it is not among the loaded ones afterwards")

    def _lora_request(self, adapter: LoadedAdapter) -> Any:
        return self._vllm.LoRARequest(lora_name=adapter.name, lora_int_id=adapter.number, lora_path=str(adapter.folder))

    def _drop_old_adapters(self) -> None:
        """Keep the newest ones, and those that a kept request still samples with."""
        in_use = {running.pinned for running in self._running.values()}
        for old in self._shelf.held[: -vllm_settings.SPARE_ADAPTERS]:
            if old.version not in in_use:
                self._llm.remove_lora(old.number)
                self._shelf.discard(old)

    def drop_adapter(self) -> None:
        """See `InferenceEngine.drop_adapter`."""
        if not self.spec.lora:
            raise self._unsupported("LoRA adapters (--vllm_enable_lora true)")
        self._check_whole()
        if "weights" in self._asleep:
            raise EngineAsleep("engine: vllm: asleep: it drops no adapter; wake its weights first")
        self._check_idle("the base weights")
        self._drop_adapters()
        self._reset_awake_caches()
        self.version = self._base_version

    def _drop_adapters(self) -> None:
        for adapter in list(self._shelf.held):
            self._llm.remove_lora(adapter.number)
            self._shelf.discard(adapter)
        self._adapter = None

    def reset_caches(self) -> None:
        """See `InferenceEngine.reset_caches`; requests kept by a pause are computed again when they go on.

        Raises:
            EngineError: vLLM did not reset them.
        """
        self._check_whole()
        self._llm.reset_mm_cache()
        self._llm.reset_encoder_cache()
        if not self._llm.reset_prefix_cache(reset_running_requests=bool(self._running)):
            raise EngineError("engine: vllm: the prefix cache was not reset: a request still holds a part of it")

    def _reset_awake_caches(self) -> None:
        """After a change of weights; a cache that sleeps was emptied before."""
        if "kv_cache" not in self._asleep:
            self.reset_caches()

    def _check_idle(self, what: str, *, kept: bool = True) -> None:
        """Raises EngineError when requests are outstanding; `kept`: those of a paused engine may be."""
        self._apply_aborts()
        if self._running and not (kept and self._paused):
            raise EngineError(
                f"engine: vllm: {what} while {len(self._running)} requests are outstanding; drain or abort them"
                + (', or pause("keep")' if kept else "")
            )

    def _expect(self) -> ExpectedWeights:
        if self._expected is None:
            text = self._config.get_text_config()
            tied = bool(getattr(text, "tie_word_embeddings", False) or self._config.tie_word_embeddings)
            model_class = vllm_start.model_class(self._config)
            self._expected = ExpectedWeights.of_checkpoint(self.spec.model, model_class=model_class, tied=tied)
        return self._expected

    def _fold_adapters(self) -> None:
        """Bring the merged weights of `spec.adapters` in, as version 0."""
        from swift.models.arguments import CheckpointArguments
        from swift.models.policy import load_for_inference
        from swift.rollout.weight_sync.policy import PolicyWeights

        folders = list(self.spec.adapters)
        args = CheckpointArguments(
            model=self.spec.model,
            adapters=folders,
            torch_dtype=cast(Any, self.capabilities.dtype),
            trust_remote_code=self.spec.trust_remote_code,
        )
        with same_randomness():
            self.load_weights(PolicyWeights(load_for_inference(args, device="cpu")), 0)

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """See `InferenceEngine.sleep`."""
        self._check_whole()
        if level not in self.capabilities.sleep_levels:
            raise self._unsupported(f"sleep({level})")
        notes = []
        if level == 2 and self.spec.lora:  # only adapters are published: nothing would bring the base back
            level, notes = 1, ["base weights are kept: only adapters are published"]
        if level == 0 or (self._asleep == set(ALL_TAGS) and (level == 1 or self._dropped)):
            return SleepReport()
        self._check_idle(f"sleep({level})", kept=False)
        if self._asleep:
            self.wake()  # vLLM does not go from one level to the other
        self.reset_caches()
        freed, more = self._release_on_cpu(level) if self._on_cpu else self._release_on_device(level)
        self._asleep, self._dropped = set(ALL_TAGS), self._dropped or level == 2
        return SleepReport(freed, "; ".join([*more, *notes]))

    def _release_on_cpu(self, level: int) -> tuple[int, list[str]]:
        """The KV cache's pages go back to the system, the weights stay; bytes freed, and remarks."""
        notes = [f"weights stay resident ({self._weight_bytes() >> 20} MiB)"] if level == 2 else []
        obstacle = self._kv_obstacle()
        if not obstacle:
            try:
                return max(0, sum(self._call("swift_release_kv"))), notes
            except OSError as error:
                obstacle = str(error)
        return 0, [self._kv_note(obstacle), *notes]

    def _release_on_device(self, level: int) -> tuple[int, list[str]]:
        """Use vLLM's own sleep mode; bytes freed, and remarks."""
        before = torch.cuda.mem_get_info()[0]
        self._llm.sleep(level)
        return max(0, torch.cuda.mem_get_info()[0] - before), []

    def _kv_obstacle(self) -> str:
        return next((reply for reply in self._call("swift_kv_obstacle") if reply), "")

    def _kv_note(self, reason: str) -> str:
        size = sum(reply["kv"] for reply in self._call("swift_memory")) >> 20
        return f"KV cache of {size} MiB cannot be released: {reason}"

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """See `InferenceEngine.wake`; of an unknown tag vLLM itself would only warn, and wake nothing."""
        self._check_alive()
        unknown = [tag for tag in tags if tag not in ALL_TAGS]
        if unknown:
            raise self._unsupported(f"wake({', '.join(unknown)}); valid: {', '.join(ALL_TAGS)}")
        if "kv_cache" in tags and "weights" in self._asleep and "weights" not in tags:
            raise EngineAsleep("engine: vllm: wake kv_cache: its weights are still asleep; wake them first")
        for tag in ALL_TAGS:
            if tag in tags and tag in self._asleep:
                if not self._on_cpu:
                    self._llm.wake_up([tag])
                self._asleep.discard(tag)
        return not self._asleep

    def memory(self) -> dict[str, int]:
        """See `InferenceEngine.memory`; on a CPU the pages of the cache that were used since it woke."""
        if not self.health().alive:
            return {}
        gone = not self._on_cpu and "weights" in self._asleep
        kv = sum(reply["kv_resident"] for reply in self._call("swift_memory"))
        return {
            "weights": 0 if gone else self._weight_bytes(),
            "kv": 0 if "kv_cache" in self._asleep else kv,
        }

    def _weight_bytes(self) -> int:
        """Bytes of this process's weights in the engine's type; vLLM's parameters do not say once they are repacked."""
        whole = self._expect().numbers * getattr(torch, self.capabilities.dtype).itemsize
        return whole // (self.spec.tensor_parallel_size if self._executor == "external_launcher" else 1)

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """See `InferenceEngine.health`."""
        if self._closed:
            return Health(False, self.version, "closed")
        if self._dead or self._void:
            return Health(False, self.version, self._dead or self._void)
        if self._asleep:
            return Health(True, self.version, f"asleep ({', '.join(sorted(self._asleep))})")
        return Health(True, self.version, "awake, but sleep(2) dropped its weights" if self._dropped else "")

    def info(self) -> dict[str, Any]:
        """See `InferenceEngine.info`."""
        facts: dict[str, Any] = {
            "engine": "vllm",
            "engine_version": self._vllm.version,
            "version": self.version,
            "model": self.spec.model,
            "dtype": self.capabilities.dtype,
            "tensor_parallel_size": self.spec.tensor_parallel_size,
            "max_model_len": self.capabilities.max_model_len,
            "adapter": self._adapter.name if self._adapter is not None else None,
            "asleep": sorted(self._asleep),
            "paused": self._paused,
            "outstanding": len(self._running),
        }
        if self.health().alive:
            scheduler = self._llm.engine_core.engine_core.scheduler
            facts |= {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
        return facts

    def close(self) -> None:
        """See `InferenceEngine.close`; a process group that was there before the engine stays."""
        if self._closed:
            return
        self._closed = True
        at_rest = self._busy.acquire(timeout=CLOSE_S)
        if not at_rest:
            logger.warning("vllm: closed in the middle of a step that has taken %d s", CLOSE_S)
        try:
            self._layout = None
            self._shelf.close()
            self._running.clear()
            self._ready.clear()
            self._shut_down()
        finally:
            groups.leave(self._vllm.destroy_model_parallel, self._vllm.destroy_distributed_environment)
            if at_rest:
                self._busy.release()

    # --- inside -----------------------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; their replies."""
        with self._busy, same_randomness():
            self._check_alive()
            replies: list[Any] = self._llm.collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)
        return replies

    def _spoil(self, reason: str) -> None:
        self._void = self._void or reason

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDead("engine: vllm: closed: it cannot be used any more")

    def _check_whole(self) -> None:
        self._check_alive()
        if self._dead:
            raise EngineDead(f"engine: vllm: {self._dead}; rebuild the engine")
        if self._void:
            raise SyncFailed(f"engine: vllm: {self._void}; rebuild the engine")

    def _check_usable(self) -> None:
        """Raises when it cannot sample now."""
        self._check_whole()
        if self._asleep:
            raise EngineAsleep(f"engine: vllm: asleep ({', '.join(sorted(self._asleep))}): it cannot sample; wake it")
        if self._dropped:
            raise EngineAsleep("engine: vllm: its weights were dropped by sleep(2); publish before sampling")
        if self._update is not None and self._update.loading:
            raise SyncFailed(f"engine: vllm: version {self._update.version} is being loaded; commit it first")

    def _new_llm(self) -> Any:
        """A new vLLM engine of the spec, first weights loaded."""
        llm = vllm_start.start(self._vllm, self.spec, self._config, on_cpu=self._on_cpu)
        vllm_versions.check_engine(llm)
        # everybody has joined them: without a name they end with the last process that has them, however it ends
        in_ranks = self._executor == "external_launcher"
        remove_segments({SEGMENTS_IN_RANKS} if in_ranks else set(llm.collective_rpc("swift_segments")) - {""})
        return llm

    def _try_out(self) -> None:
        """Sample one token: a model that this device cannot run fails here and not in the first step.

        Raises:
            ConfigError: it fails.
        """
        request = Request("trial", [0], dataclasses.replace(_GREEDY, max_new_tokens=1))
        try:
            self.submit(request)
            list(self.stream())
            self.reset_caches()
        except EngineDead as error:
            cause = error.__cause__ or error
            raise ConfigError(
                f"--model: {self.spec.model}: vLLM cannot run it on this device ({first_line(cause)}); --use_vllm false"
            ) from error
        self.counters = EngineCounters()

    def _find_capabilities(self) -> Capabilities:
        """What this engine can do, as vLLM settled it."""
        model = self._llm.vllm_config.model_config
        if self.spec.max_model_len is None and model.max_model_len < vllm_settings.context_limit(
            self.spec, self._config.get_text_config()
        ):
            logger.warning("vllm: prompt and completion are limited to %d tokens by the KV cache", model.max_model_len)
        obstacle = self._kv_obstacle() if self._on_cpu else ""
        if obstacle and self.spec.sleep:
            logger.warning("vllm: %s", self._kv_note(obstacle))
        sleeps = self._on_cpu or self.spec.sleep
        return Capabilities(
            name="vllm",
            logprob_support="truncated",
            seeded=True,
            shares_weights=False,
            max_model_len=int(model.max_model_len),
            dtype=dtype_name(model.dtype),
            devices=self.spec.devices,
            tensor_parallel_size=self.spec.tensor_parallel_size,
            lora=self.spec.lora,
            max_lora_rank=vllm_versions.lora_rank_at_least(self.spec.max_lora_rank) if self.spec.lora else 0,
            sleep_levels=(0, 1, 2) if sleeps else (0,),
            kv_release=sleeps and not obstacle,
            in_flight_updates=True,
            transports=("in_process",),
            guided=True,
            sampling_fields=vllm_settings.sampling_fields(self._vllm),
            extra={"vllm": self._vllm.version},
        )

    def _shut_down(self) -> None:
        """End vLLM's engine; its groups within torch.distributed remain, for `rebuild`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            vllm_versions.shut_down(llm)
        del llm
        gc.collect()


_GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0)


def _few(problems: Sequence[str]) -> str:
    """The first of many, and how many there are more."""
    return "; ".join(problems[:3]) + (f" (and {len(problems) - 3} more)" if len(problems) > 3 else "")
