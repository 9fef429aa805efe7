"""vLLM in this process: the engine shares the trainer's device and takes turns with it.

One request is one sample with its own seed. Prompts of a group share their prefill through the prefix cache. Its blocks
are keyed by the version of the weights, and dropped when the weights change. Only the end tokens of the spec end a
completion, which includes the ending token. Log-probs are those of the sampled tokens after temperature, penalties and
truncation. The trainer's state in the same process (environment, process group) does not change. The start restores
its random generators; callers that sample restore them once per phase (`same_randomness`).

A step samples one token of every running request with one version of the weights, so versions change between tokens
only. vLLM returns tokens when a completion has ended. Whoever needs them before, such as an update, which ends the
tokens of a version, reads vLLM's own lists (`_collect`). Requests that are paused during an update are prefilled again
with the new weights when they resume.

On a CPU vLLM has no sleep mode: the engine returns the KV cache's pages to the system, and weights stay resident.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift.data.image_store import images_shown
from swift.data.images import open_image
from swift.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    NumericError,
    RequestRefused,
    SwiftError,
    Unsupported,
    first_line,
)
from swift.models.vision import as_written, has_images, placeholder_ids, resized
from swift.rollout.engines.base import EngineCounters, SleepLevel, Tag
from swift.rollout.engines.expected_weights import ExpectedWeights, few, merged_adapters, model_config
from swift.rollout.engines.process import bind_to_cores, same_randomness
from swift.rollout.engines.running import Running, RunningRequests, SoFar
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.engines.states import StatefulEngine
from swift.rollout.engines.stepped import SteppedEngine
from swift.rollout.engines.vllm import settings, start
from swift.rollout.engines.vllm.single_copy import SingleCopy
from swift.rollout.engines.vllm.versions import load_vllm, lora_rank_at_least, shut_down
from swift.rollout.engines.vllm.weights import Adapters, adapter_rank, packed_file
from swift.rollout.scores import from_entries
from swift.rollout.weights.base import Ack, AdapterWeights, PolicyParameters, WeightStream
from swift.rollout.weights.broadcast import Announcement
from swift.types import Completion, FinishReason, Request, SamplingParams

logger = logging.getLogger(__name__)

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""vLLM's finish reason -> ours; any other is an error."""
CLOSE_S = 10
"""Maximum wait of `close` for the step in progress, in seconds."""


@dataclass(slots=True)
class _Running(Running):
    """One request. internal_id: its id in vLLM."""

    internal_id: str = ""


class VLLMEngine(SteppedEngine, StatefulEngine):
    """See the module's docstring."""

    name = "vllm"

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self.spec, self.keeps_base = spec, spec.lora
        self.counters = EngineCounters()
        self._vllm = load_vllm()
        self._on_cpu = bool(self._vllm.platform.is_cpu())
        self._running: RunningRequests[_Running] = RunningRequests()
        self._ready: deque[Completion] = deque()
        self._problems: list[Exception] = []  # of requests that have ended without a completion
        self._reset_states()
        self._single_copy: SingleCopy | None = None
        self._sharing_ended = ""  # reason why the single copy ended
        self._adapters = Adapters(self._vllm.LoRARequest)
        self._busy = threading.Lock()  # held while vLLM works; `close` on another thread waits for it
        self.executor = start.executor_of(spec)
        self._config = model_config(spec)
        self.vocab_size = self._config.get_text_config().vocab_size
        self.placeholders = placeholder_ids(self._config) if spec.sees else []
        bind_to_cores(spec.cores if self.executor != "mp" else ())
        self._llm: Any = None
        start.groups.enter()
        try:
            self._llm = start.start(self._vllm, spec, self._config, on_cpu=self._on_cpu)
            self.capabilities = start.capabilities(self._vllm, self._llm, spec, self._config, on_cpu=self._on_cpu)
            self._try_out()
            self._merge_adapters()
        except BaseException:
            self.close()
            raise
        if spec.lora and self._on_cpu:
            logger.warning("vllm: adapters decode 5 to 10 times slower on a CPU; --vllm_enable_lora false merges them")

    # --- start and end ----------------------------------------------------------------------------------------

    def _try_out(self) -> None:
        """Sample one token. Raises ConfigError: this device cannot run the model.

        The prompt has two: vLLM's convolutions on a CPU refuse a prompt of one.
        """
        try:
            with same_randomness():
                list(self.sample([Request("trial", [0, 0], SamplingParams(max_new_tokens=1, temperature=0.0))]))
            self.reset_caches()
        except EngineDead as error:
            cause = first_line(error.__cause__ or error)
            raise ConfigError(
                f"--model: {self.spec.model}: vLLM cannot run it on this device ({cause}); --infer_backend transformers"
            ) from error
        self.counters = EngineCounters()

    def rebuild(self) -> None:
        """See `InferenceEngine.rebuild`; outstanding requests end with "abort".

        With tensor parallelism over ranks, all ranks call this together.
        """
        self._check_alive()
        self._invalidate("it is being rebuilt")
        self.abort()
        self._end_aborted()
        self.separate()
        if self._asleep:
            self.wake()  # CUDA cannot free the memory of a sleeping engine
        try:
            self._shut_down()
            self._llm = start.start(self._vllm, self.spec, self._config, on_cpu=self._on_cpu)
        except SwiftError as error:
            self._dead = f"it could not be rebuilt ({first_line(error)})"
            raise EngineDead(f"engine: vllm: {self._dead}") from error
        self._reset_states()
        self._adapters.close()
        self._merge_adapters()

    def _shut_down(self) -> None:
        """End vLLM's engine; its groups in torch.distributed remain, for `rebuild`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            shut_down(llm)
        del llm
        gc.collect()

    def close(self) -> None:
        """End the engine; a process group that existed before the engine stays."""
        if self._closed:
            return
        self._closed = True
        at_rest = self._busy.acquire(timeout=CLOSE_S)
        if not at_rest:
            logger.warning("vllm: closed in the middle of a step that has taken %d s", CLOSE_S)
        try:
            self._single_copy = None
            self._adapters.close()
            self._running.clear()
            self._ready.clear()
            self._shut_down()
        finally:
            start.groups.leave(self._vllm.destroy_model_parallel, self._vllm.destroy_distributed_environment)
            if at_rest:
                self._busy.release()

    # --- sampling ---------------------------------------------------------------------------------------------

    def check_length(self, request: Request) -> None:
        """Also refuses sampling parameters that vLLM refuses."""
        super().check_length(request)
        try:
            self._parameters(request)
        except Exception as error:  # the types differ between versions of vLLM
            name = request.request_id
            raise RequestRefused(name, f"request: {name}: vLLM refuses it ({first_line(error)})") from error

    def submit(self, request: Request) -> None:
        self._check_usable()
        self.check_length(request)
        adapter = self._adapters.current
        running = _Running(request, None if adapter is None else adapter.version)
        self._running.insert(running)
        try:
            running.internal_id = self._llm.add_request(
                request.request_id,
                {**self._prompt(request), "cache_salt": f"version {self.version}"},
                self._parameters(request),
                lora_request=None if adapter is None else adapter.request,
            )
        except Exception as error:  # such as a schema that cannot be compiled
            self._running.take(request.request_id)
            self._llm.abort_request([request.request_id])  # vLLM may have added a part of it
            name = request.request_id
            raise RequestRefused(name, f"request: {name}: vLLM refuses it ({first_line(error)})") from error
        if has_images(request.prompt_ids):
            self._check_seen(running)

    def _prompt(self, request: Request) -> dict[str, Any]:
        """A prompt as vLLM takes it: it writes the tokens of images itself."""
        if not has_images(request.prompt_ids):
            return {"prompt_token_ids": list(request.prompt_ids)}
        images = request.images or images_shown(request.prompt_ids)
        pixels = [resized(open_image(shown.image), self.spec.max_pixels) for shown in images]
        return {"prompt_token_ids": as_written(request.prompt_ids, images), "multi_modal_data": {"image": pixels}}

    def _check_seen(self, running: _Running) -> None:
        """Raises RequestRefused: vLLM has written other tokens for images than the trainer will train on."""
        request = running.request
        seen = self._llm.output_processor.request_states[running.internal_id].prompt_token_ids
        ours = [token if token >= 0 else None for token in request.prompt_ids]
        if [None if token in self.placeholders else token for token in seen] != ours:
            self._llm.abort_request([request.request_id])
            self._running.take(request.request_id)
            raise RequestRefused(
                request.request_id,
                f"request: {request.request_id}: vLLM makes {len(seen)} tokens of its prompt with images, the trainer "
                f"{len(request.prompt_ids)}; give both the same --max_pixels, or use --infer_backend transformers",
            )

    def _parameters(self, request: Request) -> Any:
        return settings.sampling_parameters(
            self._vllm,
            request.sampling,
            room=self.room(request),
            end_token_ids=self.spec.eos_token_ids,
            banned_ids=self.placeholders,
        )

    def advance(self) -> list[Completion] | None:
        """Make a decode step unless completions are ready; returns those that have ended.

        An error of one request is raised after the outputs of all requests are stored and delivered.
        """
        self._check_alive()
        self._end_aborted()
        if not self._ready:
            if not self._problems and (not self._running or self._paused):
                return None
            if not self._problems:
                self._check_usable()
                for output in self._outputs():
                    self._take(output)
            if self._problems:
                problem, self._problems = self._problems[0], []
                raise problem
        ended = list(self._ready)
        self._ready.clear()
        return ended

    def _outputs(self) -> list[Any]:
        """The outputs of one decode step of vLLM."""
        try:
            with self._busy:
                self._check_alive()
                outputs: list[Any] = self._llm.step()
        except EngineDead:
            raise
        except Exception as error:
            self._dead = f"a decode step failed ({type(error).__name__}: {first_line(error)})"
            raise EngineDead(f"engine: vllm: {self._dead}; rebuild the engine") from error
        scheduler = self._llm.engine_core.engine_core.scheduler
        self.counters.decode_steps += bool(outputs or scheduler.running)  # not if all requests wait
        return outputs

    def _take(self, output: Any) -> None:
        """Make a request that has ended ready."""
        running = self._running.take(output.request_id)
        if running is None:
            return  # it was aborted
        part = output.outputs[0]
        if self.spec.returns_routes and part.routed_experts is not None:
            running.routes = [part.routed_experts]  # of aborted requests there are none
        if running.request.sampling.prompt_logprobs:
            self._ready.append(_scored(running.request, output.prompt_logprobs))
            return
        if self._add(running, part.token_ids, part.logprobs, output.num_cached_tokens):
            self._ready.append(running.completion(REASONS.get(part.finish_reason, "error")))

    def _add(self, running: _Running, token_ids: Sequence[int], logprobs: Any, num_cached_tokens: int | None) -> bool:
        """Add to a request the tokens that it does not have yet; False if they are wrong (`_problems`).

        Args:
            running: the request.
            token_ids: all of its tokens.
            logprobs: see `settings.sampled`.
            num_cached_tokens: tokens of its prompt that were not computed.
        """
        first, most = len(running.token_ids), running.request.sampling.top_logprobs
        try:
            if len(logprobs) != len(token_ids):
                raise ValueError(f"{len(logprobs)} log-probs of {len(token_ids)} tokens")
            new, sampled, tops = settings.sampled(token_ids, logprobs, first=first, most=most)
            running.add(new, sampled, self.version)
        except (NumericError, ValueError) as error:
            self._problems.append(error)
            return False
        running.tops += tops
        self.counters.decode_rows += len(new)
        if new and not first:
            self.counters.prefill_tokens += len(running.request.prompt_ids) - (num_cached_tokens or 0)
        return True

    def _collect(self, running: _Running) -> bool:
        """Add to an unfinished request what vLLM has sampled for it with the current version of the weights.

        False if that is wrong.
        """
        state = None if self._llm is None else self._llm.output_processor.request_states.get(running.internal_id)
        if state is None:
            return True
        held = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
        return self._add(running, *held, state.num_cached_tokens)

    def _collect_all(self) -> None:
        """Before another version of the weights, which what was sampled until now does not have."""
        wrong = [name for name, running in self._running.items() if not self._collect(running)]
        if wrong:
            self._llm.abort_request(wrong)
        for name in wrong:
            self._running.take(name)

    def so_far(self, request_id: str) -> SoFar:
        running = self._running.get(request_id)
        if running is not None and not self._collect(running):
            self._llm.abort_request([request_id])
            self._running.take(request_id)
        return self._running.so_far(request_id)

    def abort_submitted(self, request_ids: Collection[str] | None) -> None:
        self._running.abort(request_ids)

    def pause(self) -> None:
        self._check_alive()
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def _outstanding(self) -> int:
        self._end_aborted()
        return len(self._running)

    def _end_aborted(self) -> None:
        """End the requests that `abort` named; their completions are the tokens so far."""
        ended = self._running.take_aborted()
        right = [running for running in ended if self._collect(running)]
        if ended and not self._invalid and not self._dead:
            self._llm.abort_request([running.request.request_id for running in ended])
        self._ready.extend(running.completion("abort") for running in right)

    # --- weights ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def expected(self) -> ExpectedWeights:
        return ExpectedWeights.of_model(self.spec.model, self._config)

    def _check_takes_weights(self) -> None:
        """Also raises Unsupported: vLLM 0.26 cannot replace weights below LoRA layers."""
        if self.spec.lora and not self._vllm.reloads_under_adapters:
            raise Unsupported(
                f"--vllm_enable_lora: true: vLLM {self._vllm.version} cannot replace the weights below LoRA layers; "
                "send adapters only, install a newer vLLM, or --vllm_enable_lora false"
            )
        super()._check_takes_weights()
        if any(running.pinned is not None for running in self._running.values()):
            raise EngineError("engine: vllm: kept requests sample with an adapter; drain them before new weights")

    def _check_takes_adapters(self) -> None:
        if not self.spec.lora:
            raise self._unsupported("LoRA adapters (--vllm_enable_lora true)")
        self._check_takes("other adapters")

    def update(self, stream: WeightStream) -> Ack:
        if self._single_copy is not None:  # an update would write into the trainer's parameters
            raise EngineError("engine: vllm: its weights are the trainer's own memory; separate them before an update")
        self._collect_all()
        return super().update(stream)

    def _load(self, stream: WeightStream) -> str:
        """Make one layerwise reload in all workers.

        A worker in this process gets the tensors themselves. Worker processes receive them in a broadcast, or read
        them from a file in shared memory.
        """
        expected = self.expected
        self._check_fits(stream, expected.check(stream.manifest))
        head = [expected.tied] if expected.lacks_head(stream.manifest) else []
        buckets = stream if self.executor == "mp" else self._received(stream)
        begun = False
        for bucket in buckets:
            if not begun:
                self._call("swift_begin_update")
                begun = True
            copies = {name: info.name for name in head for info in bucket.infos if expected.is_embedding(info.name)}
            if self.executor != "mp":
                self._call("swift_load", bucket.tensors, copies, bucket.checksums())
            elif isinstance(bucket, Announcement):
                self._call("swift_receive", bucket.header, copies)
            else:
                with packed_file(bucket) as (path, entries):
                    self._call("swift_load_file", path, entries, copies)
            del bucket  # before the next one is gathered
        reply, *others = self._call("swift_end_update")
        if any(other != reply for other in others):
            raise ValueError(f"the workers disagree: {[reply, *others]}")
        if reply["missing"]:
            raise ValueError(f"nothing arrived in {', '.join(reply['missing'][:3])}")
        if (count := reply["tensors"]) != stream.count:
            raise ValueError(f"{count} of {stream.count} tensors were loaded")
        return str(reply["digest"])

    def leave_broadcast(self) -> None:
        if self.executor == "mp" and self.health().alive:
            self._call("swift_leave_broadcast")
        super().leave_broadcast()

    @property
    def receivers(self) -> int:
        return self.spec.tensor_parallel_size if self.executor == "mp" else 1

    def share(self, parameters: PolicyParameters) -> str:
        """See `InferenceEngine.share`; engine and trainer must hold equal weights."""
        if self._sharing_ended:
            return self._sharing_ended
        if self.spec.sleep and not self._on_cpu:
            return "its weights leave the device while it sleeps (--sleep_level)"
        if self.spec.tensor_parallel_size > 1:
            return "its weights are cut for tensor parallelism"
        single_copy = self._call("swift_share", parameters, self.expected.tied, self.expected.embedding)[0]
        if isinstance(single_copy, str):
            return single_copy
        self._single_copy = single_copy
        return ""

    def take_shared(self, parameters: PolicyParameters, version: int) -> Ack | None:
        if self._single_copy is None:
            return None
        self._check_takes_weights()
        if not self._single_copy.holds(parameters):
            self.separate()
            self._sharing_ended = "the trainer's parameters have moved to other memory"
            logger.warning("vllm: %s; updates are copied from now on", self._sharing_ended)
            return None
        self._collect_all()
        try:
            self._weights_arrived(version)
        except EngineError as error:
            self._invalidate(f"the update to version {version} failed ({first_line(error)})")
            raise
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in parameters.values())
        return Ack(version, len(parameters), nbytes, digest="")

    def separate(self) -> None:
        if self._single_copy is not None:
            self._single_copy.separate()
        self._single_copy = None

    def _weights_arrived(self, version: int) -> None:
        """After all weights have arrived: drop adapters and caches, then set the version."""
        self._adapters.drop(self._llm)
        if not self._on_cpu and self.executor != "mp":
            torch.accelerator.synchronize()  # vLLM may use another stream than the one that wrote the weights
        self._reset_awake_caches()
        super()._weights_arrived(version)

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """See `InferenceEngine.load_adapter`; paused requests finish with the adapter that they began with."""
        self._check_takes_adapters()
        rank, limit = adapter_rank(adapter), lora_rank_at_least(self.spec.max_lora_rank)
        if rank > limit:
            raise ConfigError(
                f"--vllm_max_lora_rank: {limit}: the adapter has rank {rank}; set it to {rank} (on a server, there)"
            )
        if problems := self.expected.check_adapter(adapter):
            raise Unsupported(
                f"weights: adapter version {version} for vllm: {few(problems)}; --vllm_enable_lora false merges it"
            )
        self._collect_all()
        in_use = {running.pinned for running in self._running.values()}
        ack = self._adapters.load(self._llm, adapter, version, in_use=in_use)
        self._reset_awake_caches()
        self.version = version
        return ack

    def drop_adapter(self) -> None:
        self._check_takes_adapters()
        self._collect_all()
        self._adapters.drop(self._llm)
        self._reset_awake_caches()
        self.version = self._base_version

    def _merge_adapters(self) -> None:
        """Load the weights with `spec.adapters` merged, as version 0."""
        if self.spec.adapters:
            with same_randomness():
                self.load_weights(merged_adapters(self.spec), 0)

    def reset_caches(self) -> None:
        """See `InferenceEngine.reset_caches`; paused requests are prefilled again when they resume."""
        self._check_valid()
        self._llm.reset_mm_cache()
        self._llm.reset_encoder_cache()
        if not self._llm.reset_prefix_cache(reset_running_requests=bool(self._running)):
            raise EngineError("engine: vllm: the prefix cache was not reset: a request still holds a part of it")

    def _reset_awake_caches(self) -> None:
        """Reset the caches after a change of weights; a sleeping KV cache is empty already."""
        if "kv_cache" not in self._asleep:
            self.reset_caches()

    # --- memory -----------------------------------------------------------------------------------------------

    def _fall_asleep(self, level: SleepLevel) -> tuple[int, list[str]]:
        self.reset_caches()
        if not self._on_cpu:
            has_device = self.executor != "mp"  # with "mp" the devices belong to the worker processes
            before = torch.cuda.mem_get_info()[0] if has_device else 0
            self._llm.sleep(level)
            return torch.cuda.mem_get_info()[0] - before if has_device else 0, []
        freed, obstacles = zip(*self._call("swift_release_kv"), strict=True)
        size = sum(self._call("swift_kv_bytes")) >> 20
        reasons = [obstacle for obstacle in dict.fromkeys(obstacles) if obstacle]
        notes = [f"KV cache of {size} MiB cannot be released: {reason}" for reason in reasons]
        if level == 2:
            notes.append(f"weights stay resident ({self._weight_bytes() >> 20} MiB)")
        return sum(freed), notes

    def _wake_up(self, tag: Tag) -> None:
        if not self._on_cpu:
            self._llm.wake_up([tag])

    def memory(self) -> dict[str, int]:
        if not self.health().alive:
            return {}
        released = not self._on_cpu and "weights" in self._asleep
        kv = 0 if "kv_cache" in self._asleep else sum(self._call("swift_kv_bytes"))
        return {"weights": 0 if released else self._weight_bytes(), "kv": kv}

    def _weight_bytes(self) -> int:
        """Bytes of this process's weights in the engine's dtype, computed because vLLM repacks its parameters."""
        total = self.expected.numbers * getattr(torch, self.capabilities.dtype).itemsize
        return total // (self.spec.tensor_parallel_size if self.executor == "external_launcher" else 1)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; returns their replies."""
        with self._busy, same_randomness():
            self._check_alive()
            replies: list[Any] = self._llm.collective_rpc(method, timeout=self.spec.limit_s, args=args)
        return replies


def _scored(request: Request, entries: Sequence[Any]) -> Completion:
    """The scores of a prompt, whose first token has none, without the token that vLLM samples behind it."""
    first = max(1, request.sampling.scored_from)
    tokens = list(request.prompt_ids)[first:]
    found = [entries[place] for place in range(first, first + len(tokens))]
    scores = from_entries(found, tokens, request.sampling.prompt_logprobs)
    return Completion(request.request_id, [], [], "stop", prompt_scores=scores)
