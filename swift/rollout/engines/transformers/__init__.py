"""The in-process engine: samples with a transformers module, the trainer's own or a copy."""

from __future__ import annotations

from typing import Any

from torch import nn

from swift.errors import ConfigError
from swift.rollout.engines.process import bind_to_cores, same_randomness
from swift.rollout.engines.spec import USUAL_NUM_SEQS, EngineSpec
from swift.rollout.engines.transformers.engine import TransformersEngine
from swift.startup import collector_resting

__all__ = ["TransformersEngine", "build"]


def build(spec: EngineSpec) -> TransformersEngine:
    """Build an engine with its own copy of the weights, read from the folder.

    `engine_kwargs`: `cache_bytes`, `attn_impl`.

    Raises:
        ConfigError: unreadable files, an architecture that cannot be sampled from, or unsupported settings.
    """
    from swift.models import load_chat, load_for_inference
    from swift.models.arguments import CheckpointArguments, SeeingArguments
    from swift.models.tokenizer import read_tokenizer

    options = {"attn_impl": "sdpa", "cache_bytes": 2 << 30, **spec.engine_kwargs}
    if unknown := options.keys() - {"attn_impl", "cache_bytes"}:
        raise ConfigError(
            f"--vllm_engine_kwargs: {', '.join(sorted(unknown))}: the transformers engine has no such argument; "
            "valid: cache_bytes, attn_impl"
        )
    if spec.tensor_parallel_size != 1 or len(spec.devices) != 1:
        raise ConfigError(
            f"--vllm_tensor_parallel_size: {spec.tensor_parallel_size}: the transformers engine uses one device; "
            "use 1, or --infer_backend vllm"
        )
    seen: dict[str, Any] = {"max_pixels": spec.max_pixels, "template": spec.template} if spec.sees else {}
    args = (SeeingArguments if spec.sees else CheckpointArguments)(
        model=spec.model,
        adapters=list(spec.adapters),
        torch_dtype=spec.dtype,  # type: ignore[arg-type]
        attn_impl=options["attn_impl"],
        trust_remote_code=spec.trust_remote_code,
        **seen,
    )
    vision = load_chat(args).vision if spec.sees else None
    device = "cpu" if spec.devices[0].startswith("cpu") else spec.devices[0]

    def load() -> nn.Module:
        with same_randomness():
            model = load_for_inference(args, device=device)
        if vision is not None:
            vision.attach(model)
        return model

    bind_to_cores(spec.cores)
    with collector_resting():
        model = load()
        tokenizer = read_tokenizer(spec.model, trust_remote_code=spec.trust_remote_code)
    return TransformersEngine(
        model,
        eos_token_ids=spec.eos_token_ids,
        tokenizer=tokenizer,
        max_model_len=spec.max_model_len,
        max_rows=spec.max_num_seqs or USUAL_NUM_SEQS,
        cache_bytes=int(options["cache_bytes"]),
        reload=load,
        keeps_base=spec.lora,
        returns_routes=spec.returns_routes,
    )
