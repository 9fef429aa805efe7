"""vLLM's arguments, computed from an `EngineSpec`, the model's config and the device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from swift.rollout.arguments import EXTRA_FIELDS
from swift.rollout.engines.running import SoFar
from swift.rollout.engines.spec import USUAL_NUM_SEQS, EngineSpec
from swift.rollout.engines.vllm.versions import lora_rank_at_least
from swift.types import Alternatives, SamplingParams

CPU_BLOCK_TOKENS = 32
"""Size of a KV block on a CPU; with vLLM's default of 128, shorter prompts would not be shared."""
CPU_BATCH_TOKENS = 16384
"""Maximum number of tokens of one step on a CPU, where seeded requests cannot be prefilled in chunks."""
ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers whose keys and values are kept for prefixes on a CPU."""
CPU_KV_SHARE = 0.25
"""Maximum share of the free main memory (times the spec's share) for the KV cache."""
CPU_KV_BYTES = 4 << 30
"""Maximum size of the KV cache on a CPU; requests that do not fit wait."""
CPU_KV_MINIMUM = 16 << 20
"""Minimum size of the KV cache on a CPU."""
MOST_LOGPROBS = 1024
"""Of a token of a prompt, for students; vLLM's default is 20."""
IMPOSSIBLE = -1e30
"""What is added to the logit of a token that is never sampled."""
HELD_ADAPTERS = 2
"""Number of adapters that vLLM holds: the current one and the one before it."""


def context_limit(spec: EngineSpec, config: Any) -> int:
    """Maximum tokens of prompt and completion together: the spec's limit, or the model's."""
    own = getattr(config, "max_position_embeddings", None) or 4096
    return spec.max_model_len or int(own)


def cpu_kv_bytes(spec: EngineSpec, token_bytes: int, limit: int, free: int) -> int:
    """Size of the KV cache on a CPU: every sequence at full length, up to a bound.

    It has room for at least one sequence if the spec has a `max_model_len`.

    Args:
        spec: the engine.
        token_bytes: size of one token in the KV cache; 0 if not known.
        limit: see `context_limit`.
        free: free main memory, in bytes.
    """
    blocks = -(-limit // CPU_BLOCK_TOKENS) + 1
    sequence_bytes = blocks * CPU_BLOCK_TOKENS * token_bytes
    bound = min(CPU_KV_BYTES, int(free * spec.memory_share * CPU_KV_SHARE))
    wanted = sequence_bytes * (spec.max_num_seqs or USUAL_NUM_SEQS) if token_bytes else bound
    return max(CPU_KV_MINIMUM, min(wanted, bound), sequence_bytes if spec.max_model_len else 0)


def engine_arguments(
    spec: EngineSpec,
    *,
    on_cpu: bool,
    limit: int,
    kv_bytes: int | None,
    executor: str,
    layer_types: Collection[str] = (),
) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs`; the spec's `engine_kwargs` override the others.

    Args:
        spec: the engine.
        on_cpu: the device has no memory of its own.
        limit: see `context_limit`.
        kv_bytes: size of the KV cache; None: from the share of the device's memory.
        executor: "uni" (this process), "mp" (processes of vLLM) or "external_launcher" (the calling ranks).
        layer_types: as in the model's config.
    """
    arguments: dict[str, Any] = {
        "model": spec.model,
        "tokenizer": spec.model,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len or -1,  # -1: the model's, at most what the KV cache holds
        "enforce_eager": spec.enforce_eager or on_cpu,  # compilation takes minutes on a CPU and gains little
        "enable_prefix_caching": spec.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": spec.tensor_parallel_size,
        "distributed_executor_backend": executor,
        "worker_extension_cls": "swift.rollout.engines.vllm.worker.WorkerExtension",
        "trust_remote_code": spec.trust_remote_code,
        "generation_config": "vllm",  # all sampling parameters come from the request
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "async_scheduling": False,  # a step returns its tokens before weights change, so each has one version
    }
    sequences = spec.max_num_seqs or (USUAL_NUM_SEQS if on_cpu else None)
    if sequences is not None:
        arguments["max_num_seqs"] = sequences
    if on_cpu:
        arguments |= {
            "block_size": CPU_BLOCK_TOKENS,
            "enable_chunked_prefill": False,  # fails for seeded requests: "CPU Generator does not use offset"
            # vLLM keeps states of linear attention and the like for prefixes only if it prefills in chunks
            "enable_prefix_caching": spec.prefix_caching and set(layer_types) <= ATTENTION,
            "max_num_batched_tokens": max(limit, CPU_BATCH_TOKENS, arguments["max_num_seqs"]),
            "kv_cache_memory_bytes": kv_bytes,
        }
    else:
        arguments |= {"gpu_memory_utilization": spec.memory_share, "enable_sleep_mode": spec.sleep}
    if spec.lora:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": lora_rank_at_least(spec.max_lora_rank),
            "max_loras": HELD_ADAPTERS,
            "max_cpu_loras": HELD_ADAPTERS,
        }
    arguments["max_logprobs"] = MOST_LOGPROBS
    if spec.returns_routes:
        arguments["enable_return_routed_experts"] = True
    if spec.sees:
        # images by Pillow, as in the trainer; backend="pil" would be refused for the processor of videos
        arguments["mm_processor_kwargs"] = {"use_fast": False}
    if spec.limit_mm_per_prompt is not None:
        arguments["limit_mm_per_prompt"] = spec.limit_mm_per_prompt
    return arguments | {name.replace("-", "_"): value for name, value in spec.engine_kwargs.items()}


def sampling_fields(vllm: SimpleNamespace) -> tuple[str, ...]:
    """The fields of `SamplingParams.unusual` that the installed vLLM supports; 0.26 lacks some."""
    known = set(inspect.signature(vllm.SamplingParams).parameters)
    common = ("frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs", "prompt_logprobs")
    return (*common, *(name for name in EXTRA_FIELDS["vllm"] if name in known))


def sampling_parameters(
    vllm: SimpleNamespace,
    wanted: SamplingParams,
    *,
    room: int,
    end_token_ids: Sequence[int],
    banned_ids: Sequence[int] = (),
) -> Any:
    """A request's `SamplingParams` of vLLM; a regular expression overrides `structured_outputs`.

    Args:
        vllm: the package.
        wanted: what the request asks for.
        room: maximum number of tokens.
        end_token_ids: tokens that end a completion.
        banned_ids: tokens that are never sampled; see `swift.models.vision.placeholder_ids`.

    Raises TypeError or ValueError for values that vLLM refuses.
    """
    extra = dict(wanted.extra)
    # the keys of a JSON object are strings
    biases = {int(token): float(bias) for token, bias in extra.pop("logit_bias", {}).items()}
    if biases := biases | dict.fromkeys(banned_ids, IMPOSSIBLE):
        extra["logit_bias"] = biases
    if "structured_outputs" in extra:
        extra["structured_outputs"] = vllm.StructuredOutputsParams(**extra["structured_outputs"])
    if wanted.regex is not None:
        extra["structured_outputs"] = vllm.StructuredOutputsParams(regex=wanted.regex)
    return vllm.SamplingParams(
        max_tokens=room,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=max(wanted.top_k, 0),
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty,
        frequency_penalty=wanted.frequency_penalty,
        presence_penalty=wanted.presence_penalty,
        min_tokens=wanted.min_tokens,
        seed=wanted.seed if wanted.temperature > 0 and wanted.exact else None,
        stop=list(wanted.stop) or None,
        stop_token_ids=sorted({*end_token_ids, *wanted.stop_token_ids}),
        ignore_eos=True,  # the model's end tokens; those of the spec are in `stop_token_ids`
        detokenize=bool(wanted.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=wanted.top_logprobs,
        prompt_logprobs=wanted.prompt_logprobs or None,
        flat_logprobs=True,  # lists of numbers; by default vLLM makes objects for each token
        output_kind=vllm.FINAL_ONLY,  # outputs of each token would take longer than a small model's step on a GPU
        **extra,
    )


def sampled(token_ids: Sequence[int], logprobs: Any, *, first: int, most: int) -> SoFar:
    """The tokens of a completion from number `first`, their log-probs, and the `most` likeliest at their positions.

    logprobs: vLLM's FlatLogprobs of all its tokens; the sampled token is the first of its position.
    """
    places = range(first, min(len(token_ids), len(logprobs)))
    tops = [likeliest(logprobs[place], most) for place in places] if most else []
    return [token_ids[i] for i in places], [logprobs.logprobs[logprobs.start_indices[i]] for i in places], tops


def likeliest(entry: Mapping[int, Any], most: int) -> Alternatives:
    """The `most` likeliest tokens at one position and their log-probs.

    entry: vLLM's log-probs at this position; they include the sampled token, also if it is not among the likeliest.
    """
    ranked = sorted((found.rank, token, found.logprob) for token, found in entry.items() if found.rank <= most)
    return [(token, logprob) for _, token, logprob in ranked if logprob > -math.inf]
