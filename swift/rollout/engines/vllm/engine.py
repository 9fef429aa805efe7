"""vLLM in this process: the engine shares the trainer's device and takes turns with it.

One request is one sample with its own seed. Prompts of a group share their prefill through the prefix cache, whose
blocks are told apart by the version of the weights, beside being dropped when these change. Only our end tokens end a
completion, and the ending token belongs to it; log-probs are of the sampled token after temperature, penalties and
truncation. What the trainer has in the same process (random generators, environment, process group) stays as it was.

A step samples one token of every running request with one version of the weights, so that versions change between
tokens only. Requests kept over an update (`pause("keep")`) are prefilled again with the new weights when they go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from swift.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    RequestRefused,
    SwiftError,
    SyncFailed,
    Unsupported,
    first_line,
)
from swift.rollout.engines.base import EngineCounters, PauseMode
from swift.rollout.engines.expected_weights import merged_adapters
from swift.rollout.engines.process import same_randomness
from swift.rollout.engines.running import Running
from swift.rollout.engines.vllm import settings
from swift.rollout.engines.vllm.adapters import adapter_rank
from swift.rollout.engines.vllm.life import VLLMLife
from swift.rollout.engines.vllm.weights import ReloadUpdate, loses_bits
from swift.rollout.weights.base import Ack, AdapterWeights, Live, TensorInfo, WeightUpdate, dtype_name
from swift.types import Completion, FinishReason, Request, SamplingParams

logger = logging.getLogger(__name__)

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""vLLM's finish reasons in our words; any other is an error."""


class VLLMEngine(VLLMLife):
    """See the module's docstring.

    Args:
        spec: the engine.
    """

    def _begin(self) -> None:
        self._try_out()
        self._merge_adapters()
        if self.spec.lora and self._on_cpu:
            logger.warning("vllm: adapters decode 5 to 10 times slower on a CPU; --vllm_enable_lora false merges them")

    def _try_out(self) -> None:
        """Sample one token: a model that this device cannot run fails here and not in the first step.

        Raises:
            ConfigError: it fails.
        """
        try:
            self.submit(Request("trial", [0], SamplingParams(max_new_tokens=1, temperature=0.0)))
            list(self.stream())
            self.reset_caches()
        except EngineDead as error:
            cause = first_line(error.__cause__ or error)
            raise ConfigError(
                f"--model: {self.spec.model}: vLLM cannot run it on this device ({cause}); --use_vllm false"
            ) from error
        self.counters = EngineCounters()

    # --- sampling ---------------------------------------------------------------------------------------------

    def check_length(self, request: Request) -> None:
        """Also refuses what vLLM would, as far as that can be known before it is submitted."""
        super().check_length(request)
        vocabulary = self._config.get_text_config().vocab_size
        name = request.request_id
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            raise RequestRefused(
                name,
                f"request: {name}: its prompt has token ids outside of 0..{vocabulary - 1}; tokenize it with the "
                "model's tokenizer",
            )
        try:
            self._parameters(request)
        except Exception as error:  # which types these are changes with vLLM
            raise RequestRefused(name, f"request: {name}: vLLM refuses it ({first_line(error)})") from error

    def submit(self, request: Request) -> None:
        """See `InferenceEngine.submit`."""
        self._check_usable()
        self.check_length(request)
        if request.request_id in self._running:
            raise EngineError(f"request: {request.request_id}: submitted twice; ids must differ while in flight")
        adapter = self._adapters.current
        try:
            with same_randomness():
                self._llm.add_request(
                    request.request_id,
                    {"prompt_token_ids": list(request.prompt_ids), "cache_salt": f"version {self.version}"},
                    self._parameters(request),
                    lora_request=None if adapter is None else adapter.request,
                )
        except Exception as error:
            self._llm.abort_request([request.request_id])  # it may have been noted by half
            raise EngineError(f"request: {request.request_id}: vLLM refuses it ({first_line(error)})") from error
        self._running.insert(Running(request, None if adapter is None else adapter.version))

    def _parameters(self, request: Request) -> Any:
        """A request's sampling parameters in vLLM's words."""
        wanted: SamplingParams = request.sampling
        return self._vllm.SamplingParams(
            max_tokens=self.room(request),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=max(wanted.top_k, 0),
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
            **settings.unusual_sampling(self._vllm, wanted),
        )

    def stream(self) -> Iterator[Completion]:
        """See `InferenceEngine.stream`."""
        while True:
            self._check_alive()
            self._settle()
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
        problems = []
        for output in outputs:
            try:
                self._take(output)
            except Exception as error:  # the tokens of the others come only once
                problems.append(error)
        if problems:
            raise problems[0]

    def _take(self, output: Any) -> None:
        """Note what a step gave one request; it is ready when that was the end."""
        running = self._running.get(output.request_id)
        if running is None:
            return  # aborted meanwhile
        part, first = output.outputs[0], not running.token_ids
        tokens = list(part.token_ids)
        try:
            logprobs = [entry[token].logprob for token, entry in zip(tokens, part.logprobs or (), strict=True)]
            running.add(tokens, logprobs, self.version)
        except EngineError:
            self._running.take(output.request_id)
            self._llm.abort_request([output.request_id])
            raise
        if first and tokens:
            self.counters.prefill_tokens += len(running.request.prompt_ids) - (output.num_cached_tokens or 0)
        self.counters.decode_rows += bool(tokens)
        if output.finished:
            self._running.take(output.request_id)
            self._ready.append(running.completion(REASONS.get(part.finish_reason, "error")))

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `InferenceEngine.abort`; takes effect with the next step, from any thread."""
        self._running.abort(request_ids)

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `InferenceEngine.pause`."""
        if mode not in ("abort", "wait", "keep"):
            raise ConfigError(f"pause: {mode}: no such mode; valid: abort, wait, keep")
        self._check_alive()
        if mode == "abort":
            self.abort()
            self._settle()
        while mode == "wait" and self._running:
            self._check_usable()
            self._step()
            self._settle()
        self._paused = True

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._paused = False

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """See `InferenceEngine.begin_update`.

        Raises:
            EngineError: also when kept requests sample with an adapter, which the update drops.
            Unsupported: also with LoRA layers, below which vLLM 0.26 cannot replace weights.
        """
        self._check_ready()
        if self._single_copy is not None:  # writing it could overwrite values that the trainer has put aside
            raise EngineError("engine: vllm: its weights are the trainer's own memory; separate them before an update")
        expected = self._expect()
        if problems := expected.check(manifest):
            raise SyncFailed(f"weights: version {version} for vllm: {_few(problems)}")
        self._update = ReloadUpdate(
            manifest,
            version,
            expected=expected,
            call=self._call,
            apart=self._executor == "mp",
            dtype=self.capabilities.dtype,
            failed=self._invalidate,
            done=self._weights_arrived,
        )
        return self._update

    def share(self, live: Live) -> str:
        """See `InferenceEngine.share`; to be called when both have the same weights."""
        if self._parted:
            return self._parted
        if self.spec.sleep and not self._on_cpu:
            return "its weights leave the device while it sleeps (--sleep_level)"
        if self.spec.tensor_parallel_size > 1:
            return "its weights are cut for tensor parallelism"
        made = self._call("swift_share", live, self._expect().tied, self._expect().embedding)[0]
        if isinstance(made, str):
            return made
        self._single_copy = made
        return ""

    def take_shared(self, live: Live, version: int) -> Ack | None:
        """See `InferenceEngine.take_shared`."""
        if self._single_copy is None:
            return None
        self._check_ready()
        began = time.monotonic()
        if not self._single_copy.holds(live):
            self.separate()
            self._parted = "the trainer's parameters have moved to other memory"
            logger.warning("vllm: %s; updates are copied from now on", self._parted)
            return None
        try:
            self._weights_arrived(version)
        except EngineError as error:
            self._invalidate(f"the update to version {version} failed ({first_line(error)})")
            raise
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in live.values())
        return Ack(version, len(live), nbytes, digest="", seconds=time.monotonic() - began, note="single copy")

    def separate(self) -> None:
        """See `InferenceEngine.separate`."""
        if self._single_copy is not None:
            self._single_copy.separate()
        self._single_copy = None

    def _weights_arrived(self, version: int) -> None:
        """All weights are in: adapters and what was computed with the old ones are gone, then the version changes."""
        self._adapters.drop(self._llm)
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
        self._invalidate("it is being rebuilt")
        self.abort()
        self._settle()
        self.separate()
        try:
            self._shut_down()
            self._llm = self._new_llm()
        except SwiftError as error:
            self._dead = f"it could not be rebuilt ({first_line(error)})"
            raise EngineDead(f"engine: vllm: {self._dead}") from error
        self._reset_life()
        self._update = None
        self._adapters.close()
        self.version = self._base_version = 0
        self._merge_adapters()

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """See `InferenceEngine.load_adapter`; requests in flight (paused with "keep") end with the adapter they have.

        Raises:
            ConfigError: its rank is above `max_lora_rank`.
            Unsupported: vLLM would ignore a part of it.
        """
        self._check_takes_adapters("a new adapter")
        rank, limit = adapter_rank(adapter), self.capabilities.max_lora_rank
        if rank > limit:
            raise ConfigError(f"--vllm_max_lora_rank: {limit}: the adapter has rank {rank}; set it to {rank}")
        if problems := self._expect().check_adapter(adapter):
            raise Unsupported(
                f"weights: adapter version {version} for vllm: {_few(problems)}; --vllm_enable_lora false merges it"
            )
        began = time.monotonic()
        in_use = {running.pinned for running in self._running.values()}
        digest = self._adapters.load(self._llm, adapter, version, in_use=in_use)
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

    def drop_adapter(self) -> None:
        """See `InferenceEngine.drop_adapter`."""
        self._check_takes_adapters("the base weights")
        self._adapters.drop(self._llm)
        self._reset_awake_caches()
        self.version = self._base_version

    def _merge_adapters(self) -> None:
        """Bring the merged weights of `spec.adapters` in, as version 0."""
        if self.spec.adapters:
            with same_randomness():
                self.load_weights(merged_adapters(self.spec), 0)


def _few(problems: Sequence[str]) -> str:
    """The first of many, and how many there are more."""
    return "; ".join(problems[:3]) + (f" (and {len(problems) - 3} more)" if len(problems) > 3 else "")
