"""The specification of an engine, as plain data that can be sent to other processes.

`build_engine` finds the factory of a backend by its name. A plugin adds a backend with
`swift.plugin.backends["mine"] = factory`, where `factory(spec)` returns an `InferenceEngine`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, suggest
from swift.models.rope import recorded

if TYPE_CHECKING:
    from swift.rollout.engines.base import InferenceEngine

USUAL_NUM_SEQS = 256
"""Default number of sequences that are decoded together."""
BACKENDS: dict[str, str] = {
    "transformers": "swift.rollout.engines.transformers:build",
    "vllm": "swift.rollout.engines.vllm:build",
    "lmdeploy": "swift.rollout.engines.lmdeploy:build",
}
"""Name -> "module:function" of the built-in factories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine.

    model: folder with config, weights and tokenizer. adapters: LoRA folders that are merged at the start.
    dtype: torch dtype name. eos_token_ids: the tokens that end every completion.
    max_model_len: maximum tokens of prompt and completion; None takes the model's.
    devices: one per tensor-parallel rank, in their order (`cuda:3`, `cpu:0`); ("cpu",) is the whole CPU.
    cores: CPU cores that the engine is bound to; () binds it to none.
    sleep: whether `sleep` will be used; some backends need it at the start.
    max_num_seqs: maximum number of sequences decoded together; None is vLLM's default, for others `USUAL_NUM_SEQS`.
    in_ranks: tensor parallelism over the calling torch.distributed ranks (colocate) instead of new processes.
    memory_share: share of the device's memory. lora: whether the engine samples with LoRA adapters.
    engine_kwargs: arguments of the backend, passed on unchecked. plugins: files that register further backends.
    limit_s: timeout of a call to the engine, in seconds (`--engine_timeout`).
    returns_routes: whether completions have the experts of their tokens, `Completion.routes`.
    sees: whether prompts have images; the model is loaded with its tower. max_pixels: see `swift.models.vision.Vision`.
    template: chat template, as `--template`; it shows images.
    """

    backend: str
    model: str
    adapters: tuple[str, ...] = ()
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int | None = None
    seed: int = 0
    devices: tuple[str, ...] = ("cpu",)
    cores: tuple[int, ...] = ()
    tensor_parallel_size: int = 1
    in_ranks: bool = False
    memory_share: float = 0.9
    max_num_seqs: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool = True
    lora: bool = False
    max_lora_rank: int = 16
    sleep: bool = False
    trust_remote_code: bool = False
    limit_mm_per_prompt: dict[str, Any] | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    limit_s: float = 300.0
    returns_routes: bool = False
    sees: bool = False
    max_pixels: int | None = None
    template: str | None = None


def call_limit_s(model: str) -> float:
    """Default of `--engine_timeout` for a checkpoint folder, in seconds: 300, and its size at 50 MB/s, 1500 at most.

    That is below `--ddp_timeout`: the other ranks wait for the one with the engine.
    """
    files = [file for pattern in ("*.safetensors", "*.bin") for file in Path(model).glob(pattern)]
    return min(1500.0, 300.0 + sum(file.stat().st_size for file in files) / 50e6)


def visible_devices(devices: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES for a process with these of this process's devices; "" for the CPU."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    indexes = [int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")]
    return ",".join(visible[index] if index < len(visible) else str(index) for index in indexes)


OWN_SHARE = 0.9
"""Default share of a device's memory for vLLM if no trainer uses the device."""


def spec_from(args: Any, *, vllm_share: float = OWN_SHARE, **fields: Any) -> EngineSpec:
    """The spec of an engine from the resolved settings of a trainer or a server.

    vllm_share: share of a device's memory if the settings have none.
    fields: of the spec, those that differ between trainer and server: model, devices, lengths, sleep.
    """
    vllm_share = args.vllm_gpu_memory_utilization or vllm_share
    memory = args.lmdeploy_cache_max_entry_count if args.use_lmdeploy else vllm_share
    return EngineSpec(
        backend=args.infer_backend,
        dtype=getattr(args, "autocast", None) or args.torch_dtype,  # a server has no trainer
        seed=args.seed,
        memory_share=memory,
        max_num_seqs=args.vllm_max_num_seqs,
        enforce_eager=args.vllm_enforce_eager,
        prefix_caching=args.vllm_enable_prefix_caching,
        lora=args.vllm_enable_lora,
        max_lora_rank=args.vllm_max_lora_rank or 16,
        trust_remote_code=args.trust_remote_code,
        limit_mm_per_prompt=args.vllm_limit_mm_per_prompt,
        engine_kwargs=dict(args.vllm_engine_kwargs),
        plugins=tuple(str(Path(path).expanduser().resolve()) for path in args.external_plugins),
        limit_s=args.engine_timeout or call_limit_s(fields["model"]),
        returns_routes=getattr(args, "moe_router_replay", "off") == "rollout",
        max_pixels=getattr(args, "max_pixels", None),
        template=getattr(args, "template", None),
        **fields,
    )


def build_engine(spec: EngineSpec) -> InferenceEngine:
    """Build the engine in this process.

    Raises:
        ConfigError: no backend of that name, or the backend refuses the settings or the adapters.
        ResourceError: the backend's package is missing or has an unsupported version.
    """
    if spec.backend != "transformers" and any(recorded(spec.adapters)):
        raise ConfigError(
            f"--adapters: {spec.adapters[-1]}: trained with another context than that of the base, which "
            f"{spec.backend} would read; merge it with swift merge-lora, or use --infer_backend transformers"
        )
    return factory(spec.backend)(spec)


def factory(backend: str) -> Callable[[EngineSpec], InferenceEngine]:
    """The factory of a backend. Raises ConfigError: no such backend."""
    from swift.plugin import inference_backends

    if backend in inference_backends:
        made: Callable[[EngineSpec], InferenceEngine] = inference_backends[backend]
        return made
    if backend not in BACKENDS:
        names = [*BACKENDS, *inference_backends]
        raise ConfigError(f"--infer_backend: {backend}: no such backend; {suggest(backend, names)}")
    module, _, name = BACKENDS[backend].partition(":")
    found: Callable[[EngineSpec], InferenceEngine] = getattr(importlib.import_module(module), name)
    return found
