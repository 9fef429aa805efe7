"""Starts vLLM for an `EngineSpec`, and turns start failures into errors for the user. The executors:

uni                 this process, on one device
external_launcher   the training ranks, each of them one tensor-parallel rank; all of them call `start`
mp                  processes that vLLM starts, one per tensor-parallel rank

The trainer may run in this process too. Besides what `engines/process.py` restores, vLLM destroys torch.distributed at
its end and leaves shared-memory files behind.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist

from swift.devices import available_bytes
from swift.errors import ConfigError, EngineError, ResourceError, SwiftError, first_line, shortened, suggest
from swift.rollout.engines.base import Capabilities
from swift.rollout.engines.expected_weights import kv_token_bytes
from swift.rollout.engines.process import same_environment, same_randomness
from swift.rollout.engines.spec import EngineSpec, visible_devices
from swift.rollout.engines.vllm import settings
from swift.rollout.engines.vllm.versions import no_routes, quiet_logs
from swift.rollout.weights.base import dtype_name

logger = logging.getLogger(__name__)

Executor = Literal["uni", "external_launcher", "mp"]


def executor_of(spec: EngineSpec) -> Executor:
    """The executor of an engine. Raises ConfigError: `in_ranks` without torch.distributed."""
    if spec.tensor_parallel_size == 1:
        return "uni"
    if spec.in_ranks and not default_group_exists():
        raise ConfigError(
            f"--vllm_tensor_parallel_size: {spec.tensor_parallel_size}: torch.distributed is not initialised, "
            "but the engine runs over the training ranks; start them with torchrun"
        )
    return "external_launcher" if spec.in_ranks else "mp"


def start(vllm: SimpleNamespace, spec: EngineSpec, config: Any, *, on_cpu: bool) -> Any:
    """Build vLLM's engine with its first weights and restore the process's state. Raises: see `_start_error`."""
    executor = executor_of(spec)
    arguments = arguments_for(vllm, spec, config, executor, on_cpu=on_cpu)
    with same_randomness(), same_environment(environment(spec, executor)):
        try:
            with quiet_logs():
                # LLM_CLASS: vLLM's defaults for offline inference; those for servers suit short completions
                vllm_config = vllm.EngineArgs(**arguments).create_engine_config(
                    usage_context=vllm.UsageContext.LLM_CLASS
                )
                if executor == "uni" and spec.devices[0].startswith("cuda:"):  # vLLM would use cuda:0
                    vllm_config.device_config.device = torch.device(spec.devices[0])
                llm = vllm.LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
        except SwiftError:
            raise
        except Exception as error:
            gc.collect()
            raise _start_error(spec, error) from error
    # all processes have mapped the segments; unlinked, they are freed when the last of these processes ends
    in_ranks = executor == "external_launcher"
    remove_segments({SEGMENTS_IN_RANKS} if in_ranks else set(llm.collective_rpc("swift_segments")) - {""})
    return llm


def capabilities(vllm: SimpleNamespace, llm: Any, spec: EngineSpec, config: Any, *, on_cpu: bool) -> Capabilities:
    """The capabilities of a started engine."""
    model = llm.vllm_config.model_config
    if spec.max_model_len is None and model.max_model_len < settings.context_limit(spec, config.get_text_config()):
        logger.warning("vllm: prompt and completion are limited to %d tokens by the KV cache", model.max_model_len)
    return Capabilities(
        name="vllm",
        logprob_support="truncated",
        shares_weights=False,
        max_model_len=int(model.max_model_len),
        dtype=dtype_name(model.dtype),
        devices=spec.devices,
        tensor_parallel_size=spec.tensor_parallel_size,
        lora=spec.lora,
        sleep_levels=(0, 1, 2) if on_cpu or spec.sleep else (0,),
        in_flight_updates=True,
        guided=True,
        sampling_fields=settings.sampling_fields(vllm),
        quantization=str(model.quantization or ""),
        seeds_are_slow=not on_cpu,  # a kernel for each seeded row
        images=spec.sees,
        routes=spec.returns_routes,
    )


def arguments_for(
    vllm: SimpleNamespace, spec: EngineSpec, config: Any, executor: Executor, *, on_cpu: bool
) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs`. Raises ConfigError: this vLLM does not have one of `engine_kwargs`."""
    text = config.get_text_config()
    limit = settings.context_limit(spec, text)
    kv_bytes = None
    if on_cpu:
        width = getattr(torch, spec.dtype).itemsize
        token_bytes = kv_token_bytes(text, width=width, ranks=spec.tensor_parallel_size)
        kv_bytes = settings.cpu_kv_bytes(spec, token_bytes, limit, available_bytes())
    arguments = settings.engine_arguments(
        spec,
        on_cpu=on_cpu,
        limit=limit,
        kv_bytes=kv_bytes,
        executor=executor,
        layer_types=getattr(text, "layer_types", None) or (),
    )
    known = {argument.name for argument in dataclasses.fields(vllm.EngineArgs)}
    if spec.returns_routes and (reason := no_routes(vllm.version, on_cpu=on_cpu)):
        raise ConfigError(f"--moe_router_replay: rollout: {reason}")
    for name in (key.replace("-", "_") for key in spec.engine_kwargs):
        if name not in known:
            near = suggest(name, sorted(known))
            raise ConfigError(f"--vllm_engine_kwargs: {name}: vLLM {vllm.version} has no such argument; {near}")
    return arguments


def environment(spec: EngineSpec, executor: Executor) -> dict[str, str]:
    """Environment variables for the start of vLLM.

    `bind_to_cores` binds the threads of this process to cores; vLLM binds those of its own processes.
    """
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if executor != "mp":
        return variables
    # vLLM's default, fork, fails after CUDA is initialised
    variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if spec.cores:
        size = max(1, len(spec.cores) // spec.tensor_parallel_size)
        parts = [spec.cores[start : start + size] for start in range(0, len(spec.cores), size)]
        cores_by_rank = [parts[rank % len(parts)] for rank in range(spec.tensor_parallel_size)]
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores)) for cores in cores_by_rank)
    if spec.devices[0].startswith("cuda:"):
        variables["CUDA_VISIBLE_DEVICES"] = visible_devices(spec.devices)
    return variables


def _start_error(spec: EngineSpec, error: Exception) -> SwiftError:
    """The error for the user after vLLM failed to start."""
    problems = getattr(error, "errors", None)  # of pydantic, whose first line only counts them
    line = shortened(str(problems()[0]["msg"]), 200) if callable(problems) else first_line(error)
    if re.search("expandable.segments", str(error), re.IGNORECASE):
        return ConfigError(f"PYTORCH_CUDA_ALLOC_CONF: expandable_segments: vLLM refuses it ({line}); unset it")
    if "on startup" in line and "utilization" in line:
        return ResourceError(f"engine: vllm: {line}; lower --vllm_gpu_memory_utilization to the share that is free")
    if re.search(r"\bmemory\b|kv cache", line, re.IGNORECASE) and not isinstance(error, AttributeError):
        return ResourceError(
            f"engine: vllm: {line}; lower --vllm_max_model_len, --vllm_gpu_memory_utilization, or max_num_seqs "
            "(--vllm_engine_kwargs)"
        )
    if "create shm" in line and "errno: 17" in line:
        return ResourceError(
            f"engine: vllm: its shared memory exists already ({line}): a run was killed during its start; remove "
            "/dev/shm/*-cpushm_* unless another run is starting now"
        )
    if isinstance(error, ValueError | NotImplementedError):
        return ConfigError(f"--model: {spec.model}: vLLM refuses it ({line}); --infer_backend transformers")
    return EngineError(f"engine: vllm: did not start ({type(error).__name__}: {line})")


SEGMENTS_IN_RANKS = "//"
"""Prefix of the shared-memory names of an engine over training ranks: what follows the colon of `env://`. vLLM removes
the variable with this prefix after the start."""


class SharedGroups:
    """The groups that vLLM creates in torch.distributed: one set per process, shared by its engines.

    They are destroyed when the last engine ends; the default group only if the first engine created it.
    """

    def __init__(self) -> None:
        self._engines = 0
        self._made_default = False

    def enter(self) -> None:
        """Count an engine that is about to start."""
        if self._engines == 0:
            self._made_default = not default_group_exists()
        self._engines += 1

    def leave(self, *destroy: Callable[[], None]) -> None:
        """Count an engine that has ended; after the last one, destroy the groups.

        destroy: vLLM's functions that destroy its groups, at last the default group.
        """
        self._engines -= 1
        if self._engines > 0:
            return
        destroy_group = dist.destroy_process_group

        def destroy_other(group: Any = None) -> None:
            if group is not None and group is not dist.group.WORLD:
                destroy_group(group)

        if not self._made_default:
            dist.destroy_process_group = destroy_other
        try:
            for step in destroy:
                step()
        finally:
            dist.destroy_process_group = destroy_group


groups = SharedGroups()
"""The groups of this process."""


def default_group_exists() -> bool:
    """Whether torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def remove_segments(idents: Iterable[str]) -> None:
    """Unlink the shared memory between the processes of one engine; processes that have mapped it keep it.

    vLLM unlinks it at its end only, so it would stay after a kill. Its names are equal in all runs over training ranks,
    and the next run could not start.
    """
    folder = Path("/dev/shm")
    if folder.is_dir():
        for ident in idents:
            for segment in folder.glob(f"{ident.strip('/')}-*cpushm*"):
                segment.unlink(missing_ok=True)
