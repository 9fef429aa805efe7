"""The names of LMDeploy that swift uses, and its arguments, computed from an `EngineSpec`.

Only 0.18 is supported, as the API changes with every minor version, and only its PyTorch engine: `update_params` of
TurboMind in 0.18.0 has no effect. Prefix caching is off, because LMDeploy cannot empty the cache after a weight update.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from swift.errors import ConfigError, ResourceError
from swift.rollout.arguments import EXTRA_FIELDS
from swift.rollout.engines.spec import USUAL_NUM_SEQS, EngineSpec
from swift.types import SamplingParams

SUPPORTED = "0.18"
INSTEAD = "use --use_vllm true, or the transformers engine (neither flag)"
SYMBOLS = {
    "Pipeline": "lmdeploy:Pipeline",
    "PytorchEngineConfig": "lmdeploy:PytorchEngineConfig",
    "GenerationConfig": "lmdeploy:GenerationConfig",
    "ResponseType": "lmdeploy.messages:ResponseType",
    "UpdateParamsRequest": "lmdeploy.serve.openai.protocol:UpdateParamsRequest",
    "serialize_state_dict": "lmdeploy.utils:serialize_state_dict",
}
"""Name here -> module and name in LMDeploy."""
DTYPES = ("bfloat16", "float16")
HIGHEST_TEMPERATURE = 2.0
"""Maximum temperature, which LMDeploy asserts."""
SAMPLING_FIELDS = ("min_tokens", *EXTRA_FIELDS["lmdeploy"])
"""The fields of `SamplingParams.unusual` that LMDeploy supports; it has no frequency or presence penalty."""


def require() -> None:
    """Raises ResourceError if LMDeploy cannot run here; called before weights are loaded."""
    install = f"pip install 'lmdeploy=={SUPPORTED}.*'"
    if importlib.util.find_spec("lmdeploy") is None:
        raise ResourceError(
            f"--use_lmdeploy: true: the package lmdeploy is not installed; {install} on a machine with an NVIDIA GPU, "
            f"or {INSTEAD}"
        )
    if _version().split(".")[:2] != SUPPORTED.split("."):
        raise ResourceError(f"lmdeploy: {_version()}: only {SUPPORTED} is supported; {install}, or {INSTEAD}")
    import torch

    if not torch.cuda.is_available():
        raise ResourceError(
            f"--use_lmdeploy: true: LMDeploy runs on NVIDIA GPUs only, and none is visible here; {INSTEAD}"
        )


def load_api() -> SimpleNamespace:
    """Import all of `SYMBOLS`; also has `version`. Raises ResourceError: a name is missing or cannot be imported."""
    require()
    found = SimpleNamespace(version=_version())
    for name, place in SYMBOLS.items():
        module, _, attribute = place.partition(":")
        try:
            setattr(found, name, getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError, OSError) as error:
            raise ResourceError(
                f"lmdeploy: {_version()}: {place} cannot be used ({type(error).__name__}: {error}); "
                f"install a working lmdeploy {SUPPORTED}, or {INSTEAD}"
            ) from error
    return found


def _version() -> str:
    return str(importlib.import_module("lmdeploy.version").__version__)


def check_spec(spec: EngineSpec) -> None:
    """Raises ConfigError or ResourceError for settings that LMDeploy does not support."""
    if "engine" in spec.engine_kwargs:
        raise ConfigError("engine_kwargs: engine: only LMDeploy's PyTorch engine takes new weights; leave it out")
    if spec.lora:
        raise ConfigError(
            "--vllm_enable_lora: true: LMDeploy reads adapters at its start only; set it to false, which syncs merged "
            "weights"
        )
    if spec.in_ranks:
        raise ConfigError(
            f"--vllm_tensor_parallel_size: {spec.tensor_parallel_size}: LMDeploy cannot run over the training "
            "processes; use 1 in colocate, or --vllm_mode dedicated"
        )
    if spec.dtype not in DTYPES:
        raise ResourceError(
            f"--torch_dtype: {spec.dtype}: LMDeploy computes in {' or '.join(DTYPES)} only; use --torch_dtype "
            f"bfloat16, or {INSTEAD}"
        )
    if len(device_indexes(spec)) != spec.tensor_parallel_size:
        raise ConfigError(
            f"--lmdeploy_device: {' '.join(spec.devices)}: {len(spec.devices)} devices for "
            f"{spec.tensor_parallel_size} tensor-parallel ranks; give one each"
        )


def device_indexes(spec: EngineSpec) -> list[int]:
    """`("cuda:2", "cuda:3")` -> [2, 3]; raises ResourceError for other devices than NVIDIA GPUs."""
    for device in spec.devices:
        if device.partition(":")[0] != "cuda":
            raise ResourceError(f"--lmdeploy_device: {device}: LMDeploy runs on NVIDIA GPUs only; {INSTEAD}")
    return [int(device.partition(":")[2] or 0) for device in spec.devices]


def engine_config(api: SimpleNamespace, spec: EngineSpec) -> Any:
    """LMDeploy's configuration; the spec's `engine_kwargs` override it. Raises ConfigError: LMDeploy refuses it."""
    arguments = {
        "dtype": spec.dtype,
        "tp": spec.tensor_parallel_size,
        "session_len": spec.max_model_len,
        "max_batch_size": spec.max_num_seqs or USUAL_NUM_SEQS,
        "cache_max_entry_count": spec.memory_share,  # of the memory that is free after loading
        "enable_prefix_caching": False,
        "enable_metrics": False,
        "logprobs_mode": "raw_logprobs",
        "eager_mode": spec.enforce_eager,
        "distributed_executor_backend": "ray",  # only Ray workers have update_params, also on one GPU
    }
    try:
        return api.PytorchEngineConfig(**(arguments | spec.engine_kwargs))
    except TypeError as error:
        raise ConfigError(f"engine_kwargs: {', '.join(spec.engine_kwargs)}: LMDeploy refuses them ({error})") from error
    except (AssertionError, ValueError) as error:
        share = f"--lmdeploy_cache_max_entry_count: {spec.memory_share}: must be below 1; use 0.8"
        other = f"--use_lmdeploy: true: LMDeploy refuses its configuration ({error or type(error).__name__})"
        raise ConfigError(share if spec.memory_share >= 1 else other) from error


def generation_config(
    api: SimpleNamespace, sampling: SamplingParams, room: int, ends: tuple[int, ...], banned: Sequence[int] = ()
) -> Any:
    """A request's `GenerationConfig`; it sets every field whose default would change the distribution.

    Without `do_sample` the temperature is ignored; the default of `top_k` is 50; without `include_stop_str_in_output`
    the end token is dropped. Stop texts are not passed on, because LMDeploy converts each to a single token.

    Args:
        api: see `load_api`.
        sampling: of the request.
        room: maximum number of new tokens.
        ends: end tokens of the spec.
        banned: tokens that are never sampled; see `swift.models.vision.placeholder_ids`.
    """
    extra = dict(sampling.extra)
    if bad := sorted({*extra.get("bad_token_ids", ()), *banned}):
        extra["bad_token_ids"] = bad
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
        stop_token_ids=sorted({*ends, *sampling.stop_token_ids}) or None,
        ignore_eos=False,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=1,
        min_new_tokens=sampling.min_tokens or None,
        response_format=None if sampling.regex is None else {"type": "regex_schema", "regex_schema": sampling.regex},
        **extra,
    )
