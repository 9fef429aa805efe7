"""vLLM in this process: the engine shares the trainer's device and takes turns with it.

One request is one sample with its own seed. Prompts of a group share their prefill through the prefix cache, whose
blocks are told apart by the version of the weights, beside being dropped when these change. Only our end tokens end a
completion, and the ending token belongs to it; log-probs are of the sampled token after temperature, penalties and
truncation. What the trainer has in the same process (environment, process group) stays as it was; its random generators
are those of before the start, and whoever samples keeps them (`same_randomness`), once for a phase.

A step samples one token of every running request with one version of the weights, so that versions change between
tokens only. Requests that are paused over an update are prefilled again with the new weights when they go on.

On a CPU vLLM cannot sleep; the KV cache's pages are given back to the system here instead, and weights stay resident.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections import deque
from collections.abc import Collection
from typing import Any

import torch

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
from swift.rollout.weights.base import Ack, AdapterWeights, Live, WeightStream
from swift.rollout.weights.broadcast import Announcement
from swift.types import Completion, FinishReason, Request, SamplingParams

logger = logging.getLogger(__name__)

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""vLLM's finish reasons in our words; any other is an error."""
CLOSE_S = 10
"""How long `close` waits for the step in progress, in seconds."""


class VLLMEngine(SteppedEngine, StatefulEngine):
    """See the module's docstring."""

    name = "vllm"

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self.spec, self.keeps_base = spec, spec.lora
        self.counters = EngineCounters()
        self._vllm = load_vllm()
        self._on_cpu = bool(self._vllm.platform.is_cpu())
        self._running: RunningRequests[Running] = RunningRequests()
        self._ready: deque[Completion] = deque()
        self._reset_states()
        self._single_copy: SingleCopy | None = None
        self._parted = ""  # why a single copy ended
        self._adapters = Adapters(self._vllm.LoRARequest)
        self._busy = threading.Lock()  # held while vLLM works, so that `close` from another thread waits
        self.executor = start.executor_of(spec)
        self._config = model_config(spec)
        self.vocab_size = self._config.get_text_config().vocab_size
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
        """Sample one token: a model that this device cannot run is refused here and not in the first step."""
        try:
            with same_randomness():
                list(self.sample([Request("trial", [0], SamplingParams(max_new_tokens=1, temperature=0.0))]))
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
        self._settle()
        self.separate()
        if self._asleep:
            self.wake()  # CUDA cannot free memory that sleeps
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
        """End vLLM's engine; its groups within torch.distributed remain, for `rebuild`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            shut_down(llm)
        del llm
        gc.collect()

    def close(self) -> None:
        """A process group that was there before the engine stays."""
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
        """Also refuses what vLLM would, as far as that can be known before it is submitted."""
        super().check_length(request)
        try:
            self._parameters(request)
        except Exception as error:  # which types these are changes with vLLM
            name = request.request_id
            raise RequestRefused(name, f"request: {name}: vLLM refuses it ({first_line(error)})") from error

    def submit(self, request: Request) -> None:
        self._check_usable()
        self.check_length(request)
        adapter = self._adapters.current
        self._running.insert(Running(request, None if adapter is None else adapter.version))
        try:
            self._llm.add_request(
                request.request_id,
                {"prompt_token_ids": list(request.prompt_ids), "cache_salt": f"version {self.version}"},
                self._parameters(request),
                lora_request=None if adapter is None else adapter.request,
            )
        except Exception as error:
            self._running.take(request.request_id)
            self._llm.abort_request([request.request_id])  # it may have been noted by half
            name = request.request_id  # such as a schema that cannot be compiled
            raise RequestRefused(name, f"request: {name}: vLLM refuses it ({first_line(error)})") from error

    def _parameters(self, request: Request) -> Any:
        room, ends = self.room(request), self.spec.eos_token_ids
        return settings.sampling_parameters(self._vllm, request.sampling, room=room, end_token_ids=ends)

    def advance(self) -> list[Completion] | None:
        """One token of every running request, unless some have ended already; raises for one after all are read."""
        self._check_alive()
        self._settle()
        if not self._ready:
            if not self._running or self._paused:
                return None
            self._check_usable()
            problems = []
            for output in self._outputs():
                try:
                    self._take(output)
                except Exception as error:  # the tokens of the others come only once
                    problems.append(error)
            if problems:
                raise problems[0]
        ended = list(self._ready)
        self._ready.clear()
        return ended

    def _outputs(self) -> list[Any]:
        """What vLLM returns of a decode step."""
        try:
            with self._busy:
                self._check_alive()
                outputs: list[Any] = self._llm.step()
        except EngineDead:
            raise
        except Exception as error:
            self._dead = f"a decode step failed ({type(error).__name__}: {first_line(error)})"
            raise EngineDead(f"engine: vllm: {self._dead}; rebuild the engine") from error
        self.counters.decode_steps += bool(outputs)
        return outputs

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
            if most := running.request.sampling.top_logprobs:
                running.tops += [settings.likeliest(entry, most) for entry in part.logprobs or ()]
        except (NumericError, ValueError):  # what it has sampled is lost
            self._running.take(output.request_id)
            self._llm.abort_request([output.request_id])
            raise
        if first and tokens:
            self.counters.prefill_tokens += len(running.request.prompt_ids) - (output.num_cached_tokens or 0)
        self.counters.decode_rows += bool(tokens)
        if output.finished:
            self._running.take(output.request_id)
            self._ready.append(running.completion(REASONS.get(part.finish_reason, "error")))

    def so_far(self, request_id: str) -> SoFar:
        return self._running.so_far(request_id)

    def abort_submitted(self, request_ids: Collection[str] | None) -> None:
        self._running.abort(request_ids)

    def pause(self) -> None:
        self._check_alive()
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def _outstanding(self) -> int:
        self._settle()
        return len(self._running)

    def _settle(self) -> None:
        """End the requests that `abort` named: their tokens so far are their completions."""
        ended = self._running.take_aborted()
        if ended and not self._invalid and not self._dead:
            self._llm.abort_request([running.request.request_id for running in ended])
        self._ready.extend(running.completion("abort") for running in ended)

    # --- weights ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def expected(self) -> ExpectedWeights:
        return ExpectedWeights.of_model(self.spec.model, self._config)

    def _check_takes_weights(self) -> None:
        """In 0.26 vLLM cannot replace weights below LoRA layers."""
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
        if self._single_copy is not None:  # writing it could overwrite values that the trainer has put aside
            raise EngineError("engine: vllm: its weights are the trainer's own memory; separate them before an update")
        return super().update(stream)

    def _load(self, stream: WeightStream) -> str:
        """One layerwise reload in all workers.

        A single worker gets tensors as they are; several take them out of a broadcast, or out of a file in shared
        memory.
        """
        expected = self.expected
        self._check_fits(stream, expected.check(stream.manifest))
        head = [expected.tied] if expected.lacks_head(stream.manifest) else []
        buckets = stream if self.executor == "mp" else self._received(stream)
        for number, bucket in enumerate(buckets):
            if number == 0:
                self._call("swift_begin_update")
            copies = {name: info.name for name in head for info in bucket.infos if expected.is_embedding(info.name)}
            if self.executor != "mp":
                self._call("swift_load", bucket.tensors, copies, bucket.checksums())
            elif isinstance(bucket, Announcement):
                self._call("swift_receive", bucket.header, copies)
            else:
                with packed_file(bucket) as (path, entries):
                    self._call("swift_load_file", path, entries, copies)
        reply, *others = self._call("swift_end_update")
        if any(other != reply for other in others):
            raise ValueError(f"the workers disagree: {[reply, *others]}")
        if reply["missing"]:
            raise ValueError(f"nothing arrived in {', '.join(reply['missing'][:3])}")
        if (count := reply["tensors"]) != stream.count:
            raise ValueError(f"{count} of {stream.count} tensors were loaded")
        return str(reply["digest"])

    @property
    def receivers(self) -> int:
        return self.spec.tensor_parallel_size if self.executor == "mp" else 1

    def share(self, live: Live) -> str:
        """To be called when both have the same weights."""
        if self._parted:
            return self._parted
        if self.spec.sleep and not self._on_cpu:
            return "its weights leave the device while it sleeps (--sleep_level)"
        if self.spec.tensor_parallel_size > 1:
            return "its weights are cut for tensor parallelism"
        made = self._call("swift_share", live, self.expected.tied, self.expected.embedding)[0]
        if isinstance(made, str):
            return made
        self._single_copy = made
        return ""

    def take_shared(self, live: Live, version: int) -> Ack | None:
        if self._single_copy is None:
            return None
        self._check_takes_weights()
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
        return Ack(version, len(live), nbytes, digest="")

    def separate(self) -> None:
        if self._single_copy is not None:
            self._single_copy.separate()
        self._single_copy = None

    def _weights_arrived(self, version: int) -> None:
        """All weights are in: adapters and what was computed with the old ones are gone, then the version changes."""
        self._adapters.drop(self._llm)
        if not self._on_cpu and self.executor != "mp":
            torch.accelerator.synchronize()  # vLLM may run on another stream than what has written them
        self._reset_awake_caches()
        super()._weights_arrived(version)

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """Requests kept by a pause end with the adapter they have."""
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
        in_use = {running.pinned for running in self._running.values()}
        ack = self._adapters.load(self._llm, adapter, version, in_use=in_use)
        self._reset_awake_caches()
        self.version = version
        return ack

    def drop_adapter(self) -> None:
        self._check_takes_adapters()
        self._adapters.drop(self._llm)
        self._reset_awake_caches()
        self.version = self._base_version

    def _merge_adapters(self) -> None:
        """Bring the merged weights of `spec.adapters` in, as version 0."""
        if self.spec.adapters:
            with same_randomness():
                self.load_weights(merged_adapters(self.spec), 0)

    def reset_caches(self) -> None:
        """Requests kept by a pause are computed again when they go on."""
        self._check_valid()
        self._llm.reset_mm_cache()
        self._llm.reset_encoder_cache()
        if not self._llm.reset_prefix_cache(reset_running_requests=bool(self._running)):
            raise EngineError("engine: vllm: the prefix cache was not reset: a request still holds a part of it")

    def _reset_awake_caches(self) -> None:
        """After a change of weights; a cache that sleeps was emptied before."""
        if "kv_cache" not in self._asleep:
            self.reset_caches()

    # --- memory -----------------------------------------------------------------------------------------------

    def _fall_asleep(self, level: SleepLevel) -> tuple[int, list[str]]:
        self.reset_caches()
        if not self._on_cpu:
            own = self.executor != "mp"  # else its workers have devices, and this process none
            before = torch.cuda.mem_get_info()[0] if own else 0
            self._llm.sleep(level)
            return torch.cuda.mem_get_info()[0] - before if own else 0, []
        freed, obstacles = zip(*self._call("swift_release_kv"), strict=True)
        size = sum(self._call("swift_kv_bytes")) >> 20
        notes = [f"KV cache of {size} MiB cannot be released: {one}" for one in dict.fromkeys(obstacles) if one]
        if level == 2:
            notes.append(f"weights stay resident ({self._weight_bytes() >> 20} MiB)")
        return sum(freed), notes

    def _wake_up(self, tag: Tag) -> None:
        if not self._on_cpu:
            self._llm.wake_up([tag])

    def memory(self) -> dict[str, int]:
        if not self.health().alive:
            return {}
        gone = not self._on_cpu and "weights" in self._asleep
        kv = 0 if "kv_cache" in self._asleep else sum(self._call("swift_kv_bytes"))
        return {"weights": 0 if gone else self._weight_bytes(), "kv": kv}

    def _weight_bytes(self) -> int:
        """Bytes of this process's weights in the engine's type; vLLM's parameters do not say once they are repacked."""
        total = self.expected.numbers * getattr(torch, self.capabilities.dtype).itemsize
        return total // (self.spec.tensor_parallel_size if self.executor == "external_launcher" else 1)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; their replies."""
        with self._busy, same_randomness():
            self._check_alive()
            replies: list[Any] = self._llm.collective_rpc(method, timeout=self.spec.limit_s, args=args)
        return replies
