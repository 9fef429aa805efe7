"""Starting vLLM for an `EngineSpec`: who runs the model, on what, and what a failure to start means for the user.

uni                 this process, on one device
external_launcher   the training ranks together, each of them one tensor-parallel part; all of them call this
mp                  processes that vLLM starts, one for each tensor-parallel part

The trainer may live in this process, too. Besides what `engines/process.py` undoes, vLLM destroys torch.distributed at
its end and leaves names of shared memory behind.
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
from swift.errors import ConfigError, EngineError, ResourceError, SwiftError, first_line, suggest
from swift.rollout.engines.base import Capabilities
from swift.rollout.engines.expected_weights import kv_token_bytes
from swift.rollout.engines.process import same_environment, same_randomness
from swift.rollout.engines.spec import EngineSpec, visible_devices
from swift.rollout.engines.vllm import settings
from swift.rollout.engines.vllm.versions import quiet_logs
from swift.rollout.weights.base import dtype_name

logger = logging.getLogger(__name__)

Executor = Literal["uni", "external_launcher", "mp"]


def executor_of(spec: EngineSpec) -> Executor:
    """Who runs the model. Raises ConfigError: the training ranks should, but there are none."""
    if spec.tensor_parallel_size == 1:
        return "uni"
    if spec.in_ranks and not default_group_exists():
        raise ConfigError(
            f"--vllm_tensor_parallel_size: {spec.tensor_parallel_size}: torch.distributed is not initialised, "
            "but the engine runs over the training ranks; start them with torchrun"
        )
    return "external_launcher" if spec.in_ranks else "mp"


def start(vllm: SimpleNamespace, spec: EngineSpec, config: Any, *, on_cpu: bool) -> Any:
    """Make vLLM's engine, first weights loaded; the process is otherwise as before. Raises: see `_start_error`."""
    executor = executor_of(spec)
    arguments = arguments_for(vllm, spec, config, executor, on_cpu=on_cpu)
    with same_randomness(), same_environment(environment(spec, executor)):
        try:
            with quiet_logs():
                # as its offline class: budgets of a server, its default, are made for short answers
                made = vllm.EngineArgs(**arguments).create_engine_config(usage_context=vllm.UsageContext.LLM_CLASS)
                if executor == "uni" and spec.devices[0].startswith("cuda:"):  # vLLM takes the first of the machine
                    made.device_config.device = torch.device(spec.devices[0])
                llm = vllm.LLMEngine.from_vllm_config(made, disable_log_stats=True)
        except SwiftError:
            raise
        except Exception as error:
            gc.collect()
            raise _start_error(spec, error) from error
    # everybody has joined them: without a name they end with the last process that has them, however it ends
    in_ranks = executor == "external_launcher"
    remove_segments({SEGMENTS_IN_RANKS} if in_ranks else set(llm.collective_rpc("swift_segments")) - {""})
    return llm


def capabilities(vllm: SimpleNamespace, llm: Any, spec: EngineSpec, config: Any, *, on_cpu: bool) -> Capabilities:
    """What an engine can do, as vLLM settled it."""
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
    )


def arguments_for(
    vllm: SimpleNamespace, spec: EngineSpec, config: Any, executor: Executor, *, on_cpu: bool
) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs`. Raises ConfigError: this vLLM lacks one that the user gave."""
    text = config.get_text_config()
    limit = settings.context_limit(spec, text)
    kv_bytes = None
    if on_cpu:
        width = getattr(torch, spec.dtype).itemsize
        each = kv_token_bytes(text, width=width, ranks=spec.tensor_parallel_size)
        kv_bytes = settings.cpu_kv_bytes(spec, each, limit, available_bytes())
    arguments = settings.engine_arguments(spec, on_cpu=on_cpu, limit=limit, kv_bytes=kv_bytes, executor=executor)
    known = {one.name for one in dataclasses.fields(vllm.EngineArgs)}
    for name in [one.replace("-", "_") for one in spec.engine_kwargs]:
        if name not in known:
            near = suggest(name, sorted(known))
            raise ConfigError(f"--vllm_engine_kwargs: {name}: vLLM {vllm.version} has no such argument; {near}")
    return arguments


def environment(spec: EngineSpec, executor: Executor) -> dict[str, str]:
    """Variables that vLLM reads while it is made.

    In this process threads are bound to cores by `bind_to_cores`; vLLM binds those of its own processes.
    """
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if executor != "mp":
        return wanted
    wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a process that has counted its GPUs cannot fork; vLLM would
    if spec.cores:
        each = max(1, len(spec.cores) // spec.tensor_parallel_size)
        parts = [spec.cores[index : index + each] for index in range(0, len(spec.cores), each)]
        shares = [parts[rank % len(parts)] for rank in range(spec.tensor_parallel_size)]
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    if spec.devices[0].startswith("cuda:"):
        wanted["CUDA_VISIBLE_DEVICES"] = visible_devices(spec.devices)
    return wanted


def _start_error(spec: EngineSpec, error: Exception) -> SwiftError:
    """What a failure to start means."""
    line = first_line(error)
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
            f"engine: vllm: its shared memory is there already ({line}): remove /dev/shm/*-cpushm_*, which a run left "
            "that was killed while it started, unless another run starts just now"
        )
    if isinstance(error, ValueError | NotImplementedError):
        return ConfigError(f"--model: {spec.model}: vLLM refuses it ({line}); --infer_backend transformers")
    return EngineError(f"engine: vllm: did not start ({type(error).__name__}: {line})")


SEGMENTS_IN_RANKS = "//"
"""Prefix of the shared-memory names of an engine over training ranks: vLLM takes what follows the colon of `env://`,
and the variable that it keeps this in is gone once the engine is made."""


class SharedGroups:
    """The groups that vLLM makes in torch.distributed: one set per process, for all engines in it.

    The last engine that leaves removes them; the default group goes with them only if the first engine made it.
    """

    def __init__(self) -> None:
        self._engines = 0
        self._made_default = False

    def enter(self) -> None:
        """An engine is about to be made."""
        if self._engines == 0:
            self._made_default = not default_group_exists()
        self._engines += 1

    def leave(self, *destroy: Callable[[], None]) -> None:
        """An engine has ended. destroy: vLLM's functions that remove its groups, and the default group at the end."""
        self._engines -= 1
        if self._engines > 0:
            return
        default = dist.destroy_process_group

        def destroy_other(group: Any = None) -> None:
            if group is not None and group is not dist.group.WORLD:
                default(group)

        if not self._made_default:
            dist.destroy_process_group = destroy_other
        try:
            for step in destroy:
                step()
        finally:
            dist.destroy_process_group = default


groups = SharedGroups()
"""Those of this process."""


def default_group_exists() -> bool:
    """Whether torch.distributed is initialised, by whomever."""
    return dist.is_available() and dist.is_initialized()


def remove_segments(idents: Iterable[str]) -> None:
    """Unlink the shared memory by which the parts of one engine talk; processes that have mapped it keep it.

    Left to vLLM, the names stay when a process is killed, and those of an engine over training ranks are the same for
    every run: the next one could not start.
    """
    folder = Path("/dev/shm")
    if folder.is_dir():
        for ident in idents:
            for segment in folder.glob(f"{ident.strip('/')}-*cpushm*"):
                segment.unlink(missing_ok=True)
