"""From an `EngineSpec` to LMDeploy's own arguments; pure, apart from the environment that names GPUs.

Two engines are in the package. The PyTorch one is the default: it takes new weights and LoRA adapters. TurboMind is
chosen with `engine_kwargs={"engine": "turbomind"}`; everything else in `engine_kwargs` goes to the engine's own
configuration. Prefix caching is off in both, because LMDeploy has no call that empties the cache after new weights.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Literal

from swift.errors import ConfigError, ResourceError, suggest
from swift.rollout.engines.lmdeploy_api import INSTEAD, LMDeploy
from swift.rollout.engines.spec import EngineSpec
from swift.types import SamplingParams

Kind = Literal["pytorch", "turbomind"]
KINDS: tuple[Kind, ...] = ("pytorch", "turbomind")
DTYPES = ("bfloat16", "float16")
HIGHEST_TEMPERATURE = 2.0
"""LMDeploy asserts that a temperature is at most this."""


def kind_of(spec: EngineSpec) -> Kind:
    """Which of the two engines.

    Raises:
        ConfigError: neither, or one that cannot do what the spec asks for.
        ResourceError: a type or device that LMDeploy does not have.
    """
    kind = spec.engine_kwargs.get("engine", "pytorch")
    if kind not in KINDS:
        raise ConfigError(f"engine_kwargs: engine {kind!r}: not an engine of LMDeploy; {suggest(str(kind), KINDS)}")
    if kind == "turbomind" and (spec.lora or spec.adapters):
        raise ConfigError(
            "engine_kwargs: engine 'turbomind': takes no LoRA adapters; leave it out for the PyTorch engine, or use "
            "--vllm_enable_lora false to send merged weights"
        )
    if len(spec.adapters) > 1:
        raise ConfigError(f"--adapters: {len(spec.adapters)} adapters: LMDeploy samples with one; merge them first")
    if spec.in_ranks:
        raise ConfigError(
            f"--vllm_tensor_parallel_size: {spec.tensor_parallel_size}: LMDeploy cannot spread over the training "
            "processes; use 1 in colocate, or --vllm_mode dedicated"
        )
    if spec.dtype not in DTYPES:
        raise ResourceError(
            f"--torch_dtype: {spec.dtype}: LMDeploy computes in {' or '.join(DTYPES)} only; use --torch_dtype "
            f"bfloat16, or {INSTEAD}"
        )
    if kind == "pytorch" and spec.engine_kwargs.get("empty_init"):
        raise ConfigError(
            "engine_kwargs: empty_init true: the PyTorch engine starts with the folder's weights; drop it"
        )
    device_indexes(spec)
    return kind


def device_indexes(spec: EngineSpec) -> list[int]:
    """`("cuda:2", "cuda:3")` -> [2, 3].

    Raises:
        ResourceError: a device that is no NVIDIA GPU.
        ConfigError: another number of devices than tensor-parallel ranks.
    """
    indexes = []
    for device in spec.devices:
        name, _, index = device.partition(":")
        if name != "cuda":
            raise ResourceError(f"--lmdeploy_device: {device}: LMDeploy runs on NVIDIA GPUs only; {INSTEAD}")
        indexes.append(int(index or 0))
    if len(indexes) != spec.tensor_parallel_size:
        raise ConfigError(
            f"--lmdeploy_device: {' '.join(spec.devices)}: {len(indexes)} devices for "
            f"{spec.tensor_parallel_size} tensor-parallel ranks; give one each"
        )
    return indexes


def engine_config(api: LMDeploy, spec: EngineSpec, kind: Kind, *, adapters: dict[str, str]) -> Any:
    """LMDeploy's configuration of the engine.

    Args:
        api: its symbols.
        spec: what is wanted; `max_model_len` is LMDeploy's session_len, `memory_share` its cache_max_entry_count, the
            share of the memory that is free after loading.
        kind: of the engine.
        adapters: LoRA folders by name, PyTorch engine only.

    Raises:
        ConfigError: arguments that LMDeploy refuses.
    """
    common = {
        "dtype": spec.dtype,
        "tp": spec.tensor_parallel_size,
        "session_len": spec.max_model_len,
        "max_batch_size": spec.max_num_seqs,
        "cache_max_entry_count": spec.memory_share,
        "enable_prefix_caching": False,
        "enable_metrics": False,
    }
    if kind == "pytorch":
        make = api.PytorchEngineConfig
        own = {
            "logprobs_mode": "raw_logprobs",
            "eager_mode": spec.enforce_eager,
            # update_params exists for workers of Ray only, also on one GPU
            "distributed_executor_backend": "ray",
            **({"adapters": adapters} if adapters else {}),
        }
    else:
        make = api.TurbomindEngineConfig
        own = {"devices": device_indexes(spec), "empty_init": True}
    given = {name: value for name, value in spec.engine_kwargs.items() if name != "engine"}
    try:
        return make(**{**common, **own, **given})
    except TypeError as error:
        raise ConfigError(f"engine_kwargs: {', '.join(given)}: LMDeploy refuses them ({error})") from error
    except (AssertionError, ValueError) as error:
        raise ConfigError(_refusal(spec, kind, error)) from error


def _refusal(spec: EngineSpec, kind: Kind, error: Exception) -> str:
    if kind == "pytorch" and spec.memory_share >= 1:
        return f"--lmdeploy_cache_max_entry_count: {spec.memory_share}: the PyTorch engine needs less than 1; use 0.8"
    return f"--use_lmdeploy: true: LMDeploy refuses its configuration ({error or type(error).__name__})"


SAMPLING_FIELDS = ("min_tokens", "bad_token_ids", "repetition_ngram_size", "repetition_ngram_threshold")
"""What of `SamplingParams.unusual` LMDeploy takes; it has no frequency or presence penalty."""


def generation_config(api: LMDeploy, sampling: SamplingParams, *, room: int, end_token_ids: tuple[int, ...]) -> Any:
    """A request's sampling in LMDeploy's words, with each of its defaults that would change it set.

    Without `do_sample` the temperature is ignored, `top_k` would be 50, and without `include_stop_str_in_output` the
    end token is dropped. Textual stop words are not passed on: LMDeploy makes single tokens of them.
    """
    greedy = sampling.temperature == 0
    return api.GenerationConfig(
        n=1,
        do_sample=not greedy,
        temperature=1.0 if greedy else sampling.temperature,
        top_k=1 if greedy else max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        random_seed=sampling.seed,
        max_new_tokens=room,
        stop_token_ids=sorted({*end_token_ids, *sampling.stop_token_ids}) or None,
        ignore_eos=False,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=1,
        min_new_tokens=sampling.min_tokens or None,
        response_format=None if sampling.regex is None else {"type": "regex_schema", "regex_schema": sampling.regex},
        **sampling.extra,
    )


@contextlib.contextmanager
def visible_devices(indexes: list[int]) -> Iterator[None]:
    """Processes that start inside the block see these GPUs alone, counted as this process counts its own."""
    name = "CUDA_VISIBLE_DEVICES"
    former = os.environ.get(name)
    own = [part.strip() for part in former.split(",")] if former else None
    os.environ[name] = ",".join(own[index] if own else str(index) for index in indexes)
    try:
        yield
    finally:
        if former is None:
            del os.environ[name]
        else:
            os.environ[name] = former
