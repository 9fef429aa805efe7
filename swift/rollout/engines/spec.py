"""Everything that is needed to make an engine, as plain data that can cross process borders.

`build_engine` is the one place that knows which backend lives where. Backends are named; a plugin adds its own with
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

if TYPE_CHECKING:
    from swift.rollout.engines.base import InferenceEngine

USUAL_NUM_SEQS = 256
"""Sequences decoded together where nothing else is said."""
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
    dtype: torch dtype name. eos_token_ids: end a completion, the only ids that do so by themselves.
    max_model_len: prompt + completion limit in tokens; None takes the model's.
    devices: where it runs, in order of its tensor-parallel ranks (`cuda:3`, `cpu:0`); ("cpu",) leaves the CPU to it.
    cores: CPU cores it is bound to; () leaves them as they are.
    sleep: whether `sleep` will be used, which some backends must know from the start.
    max_num_seqs: sequences decoded together; None is vLLM's own number, and `USUAL_NUM_SEQS` elsewhere.
    in_ranks: tensor parallelism over the calling torch.distributed ranks (colocate) instead of processes of its own.
    engine_kwargs: the backend's own arguments, passed on unchecked. plugins: files that register further backends.
    limit_s: longest time of a call to it, in seconds (`--engine_timeout`).
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


def call_limit_s(model: str) -> float:
    """Default of `--engine_timeout` for the checkpoint of this folder: all its bytes may have to move, at 50 MB/s."""
    files = [file for pattern in ("*.safetensors", "*.bin") for file in Path(model).glob(pattern)]
    return 300.0 + sum(file.stat().st_size for file in files) / 50e6


def visible_devices(devices: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES for a process that has these of our devices only; "" for the CPU."""
    ours = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    numbers = [int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")]
    return ",".join(ours[one] if one < len(ours) else str(one) for one in numbers)


OWN_SHARE = 0.9
"""Of a device's memory for vLLM that has it alone."""


def spec_from(args: Any, *, vllm_share: float = OWN_SHARE, **fields: Any) -> EngineSpec:
    """The spec of an engine from resolved settings, as a trainer and a server read them alike.

    vllm_share: of a device's memory, if the settings name none.
    fields: of the spec, what differs between the two: model, devices, lengths, sleep.
    """
    vllm_share = args.vllm_gpu_memory_utilization or vllm_share
    memory = args.lmdeploy_cache_max_entry_count if args.use_lmdeploy else vllm_share
    return EngineSpec(
        backend=args.infer_backend,
        dtype=args.torch_dtype,
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
        **fields,
    )


def build_engine(spec: EngineSpec) -> InferenceEngine:
    """Makes the engine in this process.

    Raises:
        ConfigError: no backend of that name, or settings that it refuses.
        ResourceError: the backend's package is missing or has an unsupported version.
    """
    return factory(spec.backend)(spec)


def factory(backend: str) -> Callable[[EngineSpec], InferenceEngine]:
    """The function that makes engines of a backend. Raises ConfigError: no such backend."""
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
