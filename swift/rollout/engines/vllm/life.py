"""How a vLLM engine in this process is made, sleeps and ends, and what it says of itself.

On a CPU vLLM cannot sleep; the KV cache's pages are given back to the system here instead, and weights stay resident.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from typing import Any

import torch

from swift.errors import EngineError, Unsupported
from swift.rollout.engines.base import Capabilities, EngineCounters, SleepLevel, Tag
from swift.rollout.engines.expected_weights import ExpectedWeights, model_config
from swift.rollout.engines.life import EngineLife
from swift.rollout.engines.process import bind_to_cores, same_randomness
from swift.rollout.engines.running import RunningRequests
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.engines.vllm import settings, start
from swift.rollout.engines.vllm.adapters import Adapters
from swift.rollout.engines.vllm.process import SEGMENTS_IN_RANKS, groups, remove_segments
from swift.rollout.engines.vllm.single_copy import SingleCopy
from swift.rollout.engines.vllm.versions import check_engine, load_vllm, lora_rank_at_least, shut_down
from swift.rollout.engines.vllm.weights import ReloadUpdate
from swift.rollout.weights.base import dtype_name
from swift.types import Completion

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 300.0
"""Bound on one call to worker processes, in seconds."""
CLOSE_S = 10
"""How long `close` waits for the step in progress, in seconds."""


class VLLMLife(EngineLife):
    """What `VLLMEngine` is built on; not used alone.

    Args:
        spec: the engine.
    """

    name = "vllm"

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.counters = EngineCounters()
        self.version = self._base_version = 0
        self._vllm = load_vllm()
        self._on_cpu = bool(self._vllm.platform.is_cpu())
        self._running = RunningRequests()
        self._ready: deque[Completion] = deque()
        self._reset_life()
        self._update: ReloadUpdate | None = None
        self._single_copy: SingleCopy | None = None
        self._parted = ""  # why a single copy ended
        self._adapters = Adapters(self._vllm.LoRARequest)
        self._busy = threading.Lock()  # held while vLLM works, so that `close` from another thread waits
        self._executor = start.executor_of(spec)
        self._config = model_config(spec)
        self._expected: ExpectedWeights | None = None
        bind_to_cores(spec.cores if self._executor != "mp" else ())
        self._llm: Any = None
        groups.enter()
        try:
            self._llm = self._new_llm()
            self.capabilities = self._find_capabilities()
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """First use of the engine that was just made."""
        raise NotImplementedError

    # --- start and end ----------------------------------------------------------------------------------------

    def _new_llm(self) -> Any:
        """A new vLLM engine of the spec, first weights loaded."""
        llm = start.start(self._vllm, self.spec, self._config, on_cpu=self._on_cpu)
        check_engine(llm)
        # everybody has joined them: without a name they end with the last process that has them, however it ends
        in_ranks = self._executor == "external_launcher"
        remove_segments({SEGMENTS_IN_RANKS} if in_ranks else set(llm.collective_rpc("swift_segments")) - {""})
        return llm

    def _find_capabilities(self) -> Capabilities:
        """What this engine can do, as vLLM settled it."""
        model, spec = self._llm.vllm_config.model_config, self.spec
        limit = settings.context_limit(spec, self._config.get_text_config())
        if spec.max_model_len is None and model.max_model_len < limit:
            logger.warning("vllm: prompt and completion are limited to %d tokens by the KV cache", model.max_model_len)
        obstacle = self._kv_obstacle() if self._on_cpu else ""
        if obstacle and spec.sleep:
            logger.warning("vllm: %s", self._kv_note(obstacle))
        sleeps = self._on_cpu or spec.sleep
        return Capabilities(
            name="vllm",
            logprob_support="truncated",
            seeded=True,
            shares_weights=False,
            max_model_len=int(model.max_model_len),
            dtype=dtype_name(model.dtype),
            devices=spec.devices,
            tensor_parallel_size=spec.tensor_parallel_size,
            lora=spec.lora,
            max_lora_rank=lora_rank_at_least(spec.max_lora_rank) if spec.lora else 0,
            sleep_levels=(0, 1, 2) if sleeps else (0,),
            kv_release=sleeps and not obstacle,
            in_flight_updates=True,
            transports=("in_process",),
            guided=True,
            sampling_fields=settings.sampling_fields(self._vllm),
            extra={"vllm": self._vllm.version},
        )

    def _shut_down(self) -> None:
        """End vLLM's engine; its groups within torch.distributed remain, for `rebuild`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            shut_down(llm)
        del llm
        gc.collect()

    def _expect(self) -> ExpectedWeights:
        if self._expected is None:
            self._expected = ExpectedWeights.of_model(self.spec.model, self._config)
        return self._expected

    def _loaded_version(self) -> int | None:
        return self._update.version if self._update is not None and self._update.loading else None

    def _outstanding(self) -> int:
        self._settle()
        return len(self._running)

    def _settle(self) -> None:
        """End the requests that `abort` named: their tokens so far are their completions."""
        ended = self._running.take_aborted()
        if ended and not self._invalid and not self._dead:
            self._llm.abort_request([running.request.request_id for running in ended])
        self._ready.extend(running.completion("abort") for running in ended)

    def reset_caches(self) -> None:
        """See `InferenceEngine.reset_caches`; requests kept by a pause are computed again when they go on.

        Raises:
            EngineError: vLLM did not reset them.
        """
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
            before = torch.cuda.mem_get_info()[0]
            self._llm.sleep(level)
            return torch.cuda.mem_get_info()[0] - before, []
        freed, notes = self._release_on_cpu()
        if level == 2:
            notes.append(f"weights stay resident ({self._weight_bytes() >> 20} MiB)")
        return freed, notes

    def _release_on_cpu(self) -> tuple[int, list[str]]:
        """The KV cache's pages go back to the system, the weights stay; bytes freed, and remarks."""
        obstacle = self._kv_obstacle()
        if not obstacle:
            try:
                return sum(self._call("swift_release_kv")), []
            except OSError as error:
                obstacle = str(error)
        return 0, [self._kv_note(obstacle)]

    def _kv_obstacle(self) -> str:
        return next((reply for reply in self._call("swift_kv_obstacle") if reply), "")

    def _kv_note(self, reason: str) -> str:
        size = sum(reply["kv"] for reply in self._call("swift_memory")) >> 20
        return f"KV cache of {size} MiB cannot be released: {reason}"

    def _wake_up(self, tag: Tag) -> None:
        if not self._on_cpu:
            self._llm.wake_up([tag])

    def memory(self) -> dict[str, int]:
        """See `InferenceEngine.memory`; on a CPU the pages of the cache that were used since it woke."""
        if not self.health().alive:
            return {}
        gone = not self._on_cpu and "weights" in self._asleep
        kv = sum(reply["kv_resident"] for reply in self._call("swift_memory"))
        return {"weights": 0 if gone else self._weight_bytes(), "kv": 0 if "kv_cache" in self._asleep else kv}

    def _weight_bytes(self) -> int:
        """Bytes of this process's weights in the engine's type; vLLM's parameters do not say once they are repacked."""
        total = self._expect().numbers * getattr(torch, self.capabilities.dtype).itemsize
        return total // (self.spec.tensor_parallel_size if self._executor == "external_launcher" else 1)

    # --- watching ---------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """See `InferenceEngine.info`."""
        adapter = self._adapters.current
        facts: dict[str, Any] = {
            "engine": "vllm",
            "engine_version": self._vllm.version,
            "version": self.version,
            "model": self.spec.model,
            "dtype": self.capabilities.dtype,
            "tensor_parallel_size": self.spec.tensor_parallel_size,
            "max_model_len": self.capabilities.max_model_len,
            "adapter": adapter.name if adapter is not None else None,
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
            self._single_copy = None
            self._adapters.close()
            self._running.clear()
            self._ready.clear()
            self._shut_down()
        finally:
            groups.leave(self._vllm.destroy_model_parallel, self._vllm.destroy_distributed_environment)
            if at_rest:
                self._busy.release()

    # --- what is allowed now ------------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; their replies."""
        with self._busy, same_randomness():
            self._check_alive()
            replies: list[Any] = self._llm.collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)
        return replies

    def _check_ready(self) -> None:
        """Raises what `begin_update` does when other weights cannot be taken now."""
        if self.spec.lora and not self._vllm.reloads_under_adapters:
            raise Unsupported(
                f"--vllm_enable_lora: true: vLLM {self._vllm.version} cannot replace the weights below LoRA layers; "
                "send adapters only, install a newer vLLM, or --vllm_enable_lora false"
            )
        self._check_takes("new weights")
        if any(running.pinned is not None for running in self._running.values()):
            raise EngineError("engine: vllm: kept requests sample with an adapter; drain them before new weights")

    def _check_takes_adapters(self, what: str) -> None:
        if not self.spec.lora:
            raise self._unsupported("LoRA adapters (--vllm_enable_lora true)")
        self._check_takes(what)
