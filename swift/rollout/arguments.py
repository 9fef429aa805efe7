"""Settings of rollouts: sampling, environments, and engines."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.flags import flag
from swift.types import SamplingParams

LEAST_TEMPERATURE = 0.01
"""Minimum temperature: lower ones overflow the logits, and vLLM uses this one instead."""


def request_limit_s(tokens: int) -> float:
    """Default of `--rollout_timeout` in seconds, for samples of at most so many tokens: five tokens per second.

    It can be long, because `--stall_timeout` detects an engine without progress.
    """
    return max(600.0, 0.2 * tokens)


@dataclass(kw_only=True)
class GenerationArguments:
    """The sampling distribution of one completion."""

    GROUP: ClassVar[str] = "Sampling"

    max_completion_length: int = flag(512, at_least=1, aliases=("max_new_tokens", "response_length"))
    """Maximum number of new tokens per completion."""

    max_length: int | None = flag(at_least=1, unset="the model's context minus max_completion_length", resume="fixed")
    """Maximum prompt length in tokens."""

    truncation_strategy: Literal["left", "right", "delete"] = flag("left", everyday=False, resume="fixed")
    """Treatment of prompts over `--max_length`: cut on the left or right, or leave the row out."""

    temperature: float = flag(0.9, at_least=LEAST_TEMPERATURE)
    """Sampling temperature, also of the log-probs in the loss."""

    top_p: float = flag(1.0, above=0, at_most=1)
    """Share of the probability to sample from. Below 1 it biases the gradient; ms-swift 3.x used 0.9."""

    top_k: int = flag(-1, at_least=-1)
    """Number of likeliest tokens to sample from; -1 or 0 is off. Biases the gradient; ms-swift 3.x used 50."""

    min_p: float = flag(0.0, at_least=0, at_most=1, everyday=False)
    """Minimum probability of a token relative to the likeliest. Biases the gradient."""

    repetition_penalty: float = flag(1.0, at_least=0.001, everyday=False)
    """Divisor of the logits of tokens already seen. Biases the gradient."""

    stop_words: list[str] = flag([], everyday=False)
    """Texts that end a completion, besides the end token."""

    generation_kwargs: dict[str, Any] = flag({}, everyday=False)
    """Further sampling settings, such as `{"min_tokens": 8}`. They override flags; most bias the gradient."""

    vllm_guided_decoding_regex: str | None = flag(
        aliases=("structured_outputs_regex",), everyday=False, unset="completions are free"
    )
    """Regular expression of whole completions. Biases the gradient; the transformers engine needs xgrammar."""

    def sampling_params(self) -> SamplingParams:
        """These settings as parameters of a request; the seed is set per sample."""
        given = {name: value for name, value in self.generation_kwargs.items() if name not in FLAGS_IN_KWARGS}
        extra = {SAMPLING_NAMES.get(name, name): value for name, value in given.items()}
        common = {name: extra.pop(name) for name in COMMON_FIELDS if name in extra}
        if "stop_token_ids" in common:
            common["stop_token_ids"] = tuple(common["stop_token_ids"])
        return SamplingParams(
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=tuple(self.stop_words),
            regex=self.vllm_guided_decoding_regex,
            extra=extra,
            **common,
        )

    def flags_in_kwargs(self) -> dict[str, Any]:
        """Entries of `--generation_kwargs` that have a flag, by the flag's name."""
        given = self.generation_kwargs
        return {FLAGS_IN_KWARGS[name]: value for name, value in given.items() if name in FLAGS_IN_KWARGS}

    def problems(self) -> Iterator[str]:
        names: dict[str, list[str]] = {}  # setting -> its names in use
        for name in self.generation_kwargs:
            names.setdefault(FLAGS_IN_KWARGS.get(name) or SAMPLING_NAMES.get(name, name), []).append(name)
        for aliases in names.values():
            values = [self.generation_kwargs[name] for name in aliases]
            if any(value != values[0] for value in values):
                shown = ", ".join(f"{name} {json.dumps(self.generation_kwargs[name])}" for name in aliases)
                yield f"--generation_kwargs: {shown}: the same setting with different values; give one of them"
        for name, value in self.generation_kwargs.items():
            if name not in FLAGS_IN_KWARGS and (problem := self._kwarg_problem(SAMPLING_NAMES.get(name, name), value)):
                yield f"--generation_kwargs: {name}: {problem}"
        regex = self.vllm_guided_decoding_regex
        if regex is not None and (problem := regex_problem(regex)):
            yield f"--vllm_guided_decoding_regex: {regex}: {problem}"

    def _kwarg_problem(self, name: str, value: Any) -> str:
        """Problem of an entry that has no flag; "" if there is none."""
        if name in OWN_FIELDS:
            return f"is set by swift itself{OWN_FIELDS[name]}"
        if name in COMMON_FIELDS:
            return COMMON_FIELDS[name](value)
        backend = getattr(self, "infer_backend", None) or "transformers"
        if getattr(self, "vllm_mode", None) == "server":  # the server checks the settings of its engine
            known = sorted({field for fields in EXTRA_FIELDS.values() for field in fields})
        elif backend in EXTRA_FIELDS:
            known = list(EXTRA_FIELDS[backend])
        else:  # the engine of a plugin checks requests itself
            return ""
        if name in known:
            return ""
        choices = sorted({*known, *COMMON_FIELDS, *FLAGS_IN_KWARGS})
        near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
        fix = f"nearest: {', '.join(near)}" if near else f"valid: {', '.join(choices)}"
        return f"the engine {backend} has no such setting; {fix}"

    def biased_kwargs(self) -> bool:
        """Whether `--generation_kwargs` has an entry without a flag that changes the sampled distribution."""
        return any(
            name not in FLAGS_IN_KWARGS and name != "stop_token_ids" and value not in (0, None)
            for name, value in self.generation_kwargs.items()
        )


def regex_problem(regex: str) -> str:
    r"""Reason why no engine supports an expression; "" if one may.

    Engines compile expressions to automata, which have no lookaround and no references. Classes such as `\p{L}` are not
    checked, because some engines support them and Python does not.
    """
    try:
        re.compile(re.sub(r"\\[pP](\{\^?\w+\}|\w)", "x", regex))
    except re.error as error:
        return f"not a regular expression ({error}); correct it"
    parts = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|P=|\()|.", regex, re.DOTALL)
    for part in parts:
        if part.startswith("(?"):
            kind = "refers to an earlier group" if part in ("(?P=", "(?(") else "looks at text around it"
            return f"{part} {kind}, which guided decoding cannot; write the expression without it"
        if re.fullmatch(r"\\[1-9]", part):
            return f"{part} refers to an earlier group, which guided decoding cannot; write the expression without it"
        if part in ("\\b", "\\B"):
            return f"{part} looks at text around it, which guided decoding cannot; write the expression without it"
    return ""


def _penalty(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{json.dumps(value)}: not a number; valid: -2 to 2"
    return "" if -2 <= value <= 2 else f"{value:g}: out of range; valid: -2 to 2"


def _count(value: Any) -> str:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return "" if good else f"{json.dumps(value)}: not a count; give a whole number from 0"


def _token_ids(value: Any) -> str:
    good = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    return "" if good else f"{json.dumps(value)}: no list of token ids; give one such as [2, 7]"


COMMON_FIELDS: dict[str, Callable[[Any], str]] = {
    "frequency_penalty": _penalty,
    "presence_penalty": _penalty,
    "min_tokens": _count,
    "stop_token_ids": _token_ids,
}
"""Fields of `SamplingParams` without a flag, and functions that return the problem of a value, or ""."""

SAMPLING_NAMES = {"min_new_tokens": "min_tokens"}
"""Aliases in `--generation_kwargs`."""

FLAGS_IN_KWARGS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_words")},
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_completion_length"), "max_completion_length"),
    "stop": "stop_words",
}
"""Names in `--generation_kwargs` that have a flag -> the flag."""

OWN_FIELDS = {
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs", "detokenize", "output_kind", "ignore_eos", "include_stop_str_in_output",
         "skip_special_tokens", "do_sample", "num_return_sequences"), ""),
    "n": "; use --num_generations",
    "seed": "; use --seed",
    "regex": "; use --vllm_guided_decoding_regex",
    "guided_regex": "; use --vllm_guided_decoding_regex",
    "structured_outputs_regex": "; use --vllm_guided_decoding_regex",
}  # fmt: skip
"""Names in `--generation_kwargs` that are refused, and their alternatives."""

EXTRA_FIELDS: dict[str, tuple[str, ...]] = {
    "transformers": (),
    "vllm": (
        "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs", "thinking_token_budget",
        "repetition_detection",
    ),
    "lmdeploy": ("bad_token_ids", "repetition_ngram_size", "repetition_ngram_threshold"),
}  # fmt: skip
"""Further names in `--generation_kwargs` by backend."""


COMPLETION_SETTINGS = ("rollout_source", "rollout_func", "multi_turn_scheduler", "gym_env", "rollout_tools")
"""Settings with which other code than the engine makes completions."""

REWARD_SETTINGS = ("rollout_source", "gym_env", "use_gym_env")
"""Settings with which environments compute rewards, returned by the reward functions in `ENVIRONMENT_REWARDS`."""

ENVIRONMENT_REWARDS = ("environment", "reward_env", "reward_nemo_gym_verify")
"""Names of one reward function; the last two are Axolotl's."""


def in_use(args: Any, names: Sequence[str]) -> list[str]:
    """The settings of `COMPLETION_SETTINGS` or `REWARD_SETTINGS` that are in use, as on the command line."""
    given = {name: value for name in names if (value := getattr(args, name)) and value != "engine"}
    return [f"--{name}: {' '.join(value) if isinstance(value, list) else value}" for name, value in given.items()]


def most_tokens(args: Any) -> float:
    """Maximum tokens of a completion over all turns; infinite if the limit applies to each turn."""
    per_turn = args.completion_length_limit_scope == "per_round" and in_use(args, COMPLETION_SETTINGS)
    return math.inf if per_turn else args.max_completion_length


@dataclass(kw_only=True)
class EnvironmentArguments:
    """Environments, rollout functions and turns."""

    GROUP: ClassVar[str] = "Environments"

    rollout_source: Literal["engine", "atropos", "nemo_gym"] = flag(
        "engine", aliases=("nemo_gym_enabled",), values={"true": "nemo_gym", "false": "engine"}, everyday=False
    )
    """Origin of completions or their rewards: the engine alone, or environments of Atropos or NeMo Gym."""

    max_excluded_frac: float = flag(0.5, at_least=0, at_most=1, everyday=False, resume="free")
    """Maximum share of excluded samples over 20 rollout batches. More stop the run, and so do 32 at the start without
    any other; 1 stops none."""

    rollout_func: str | None = flag(everyday=False, unset="the engine samples each completion once")
    """Function that makes the completions: a name in `rollout_functions`, or `path.py:function`."""

    multi_turn_scheduler: str | None = flag(
        aliases=("multi_turn_func",), registry="multi_turns", everyday=False, unset="one answer per completion"
    )
    """What follows an answer: a scheduler or function of `multi_turns`, from `--external_plugins`."""

    gym_env: str | None = flag(registry="envs", everyday=False, unset="none")
    """Environment in which completions are made: an entry of `envs`. The row's `env_config` may name another."""

    use_gym_env: bool | None = flag(everyday=False, unset="true with gym_env")
    """Whether an environment rewards completions: that of `--gym_env`, or a scheduler that returns `total_reward`."""

    loss_scale: Literal["default", "last_round"] = flag("default", everyday=False, resume="fixed")
    """Sampled tokens that are trained on with several turns: all, or those of the last answer alone (last_round). An
    answer of the data (gkd) is always the last turn alone."""

    rollout_tools: list[str] = flag([], everyday=False)
    """Functions that the policy may call: names in `tools`, from `--external_plugins`, or all."""

    tool_parser: str | None = flag(
        registry="tool_parsers", needs="rollout_tools", everyday=False, unset="the one that the chat template writes"
    )
    """Format of tool calls in answers: an entry of `tool_parsers`."""

    max_turns: int | None = flag(at_least=1, everyday=False, unset="32")
    """Maximum number of answers of a completion."""

    completion_length_limit_scope: Literal["per_round", "total"] = flag("per_round", everyday=False)
    """What max_completion_length bounds with several turns: each answer, or all tokens after the prompt."""

    on_prefix_break: Literal["exclude", "truncate"] = flag("exclude", everyday=False)
    """What becomes of a completion whose chat template rewrites earlier turns: left out, or ended before."""


@dataclass(kw_only=True)
class SamplingArguments(GenerationArguments):
    """Groups of completions, and how they fill generation batches."""

    weight_bridge: Literal["none", "shared_vllm", "lora_only", "lora_restart"] | None = flag(
        group="Engine", everyday=False, unset="the other settings of weight syncs decide"
    )
    """Short for other settings: shared_vllm (one copy of the weights, in colocate), lora_only and lora_restart (the
    adapter alone), none (merged weights). Syncs are 3 steps apart unless the weights are shared."""

    force_restart: bool = flag(False, group="Engine", everyday=False)
    """Whether the servers start anew before each adapter. Adapters are swapped without that."""

    num_generations: int = flag(8, at_least=1, resume="fixed")
    """Number of completions per prompt, G in GRPO (arXiv:2402.03300). Divides the global batch. 1 goes with a teacher
    without rewards."""

    num_generations_eval: int | None = flag(at_least=1, everyday=False, resume="free")
    """Number of completions per prompt in evaluation."""

    steps_per_generation: int | None = flag(at_least=1, group="Optimization", everyday=False, resume="fixed")
    """Number of accumulation steps per generation batch, a multiple or divisor of gradient_accumulation_steps."""

    generation_batch_size: int | None = flag(
        at_least=1, group="Optimization", everyday=False, unset="follows from steps_per_generation", resume="fixed"
    )
    """Number of completions of a generation batch over all processes, instead of steps_per_generation."""

    mini_batch_size: int | None = flag(at_least=1, group="Optimization", everyday=False, unset="no limit")
    """Maximum number of completions per micro-batch; divides per_device_train_batch_size. Same gradient."""

    max_tokens_per_micro_batch: int | None = flag(
        at_least=1, group="Optimization", everyday=False, unset="what fits into memory"
    )
    """Maximum number of tokens per forward and backward pass, shared prompts counted once. Same gradient."""


@dataclass(kw_only=True)
class EngineArguments:
    """The inference engine and where it runs."""

    GROUP: ClassVar[str] = "Engine"

    use_vllm: bool = flag(False)
    """Whether vLLM generates. If false, transformers does, in the trainer's process."""

    infer_backend: str | None = flag(values={"pt": "transformers"}, everyday=False, registry="backends")
    """Inference library: transformers, vllm, lmdeploy, or one of a plugin."""

    vllm_mode: Literal["colocate", "server", "dedicated"] | None = flag(
        values={"async": "dedicated"}, unset="inferred from devices, NPROC_PER_NODE and num_infer_workers"
    )
    """Place of the engine: the trainer's devices, devices of its own, or a server. Implies `--use_vllm true`."""

    num_infer_workers: int | None = flag(at_least=1, unset="NPROC_PER_NODE if that is the number of devices, else 1")
    """Number of inference devices per node."""

    vllm_device: list[str] = flag(["auto"], everyday=False, resume="free")
    """Devices of the engines, such as `cuda:7`. auto takes the last ones, or each process's own in colocate."""

    vllm_gpu_memory_utilization: float | None = flag(
        above=0, at_most=1, needs="use_vllm", unset="0.45 in colocate, else 0.9", resume="free"
    )
    """Share of a device's memory for vLLM. In colocate it must be free beside the trainer's weights at the start."""

    vllm_max_model_len: int | None = flag(
        at_least=1,
        needs="use_vllm",
        everyday=False,
        unset="max_length + max_completion_length; in several turns the model's context",
    )
    """Maximum length of prompt and completion, in tokens."""

    vllm_max_num_seqs: int | None = flag(
        at_least=1, needs="use_vllm", everyday=False, unset="that of vLLM; 256 on a CPU"
    )
    """Maximum number of sequences decoded at a time."""

    vllm_enforce_eager: bool = flag(False, needs="use_vllm", everyday=False)
    """Whether CUDA graphs are off."""

    vllm_limit_mm_per_prompt: dict[str, Any] | None = flag(needs="use_vllm", everyday=False)
    """Number of images and the like per prompt."""

    vllm_enable_prefix_caching: bool = flag(True, needs="use_vllm", everyday=False)
    """Whether shared prompt prefixes are cached until the next weight sync."""

    vllm_tensor_parallel_size: int = flag(
        1, at_least=1, aliases=("tensor_parallel_size",), needs="use_vllm", everyday=False
    )
    """Number of devices per engine."""

    vllm_data_parallel_size: int = flag(1, at_least=1, needs="use_vllm", everyday=False)
    """Number of engines of a `swift rollout` server."""

    vllm_server_host: list[str] = flag([], everyday=False, resume="free")
    """Addresses of `swift rollout` servers. Implies `--use_vllm true --vllm_mode server`."""

    vllm_server_port: list[int] = flag([8000], at_least=1, at_most=65535, everyday=False, resume="free")
    """Ports of the servers, one for all or one each."""

    vllm_server_base_url: list[str] = flag([], everyday=False, resume="free")
    """URLs of the servers, instead of hosts and ports."""

    vllm_server_timeout: float = flag(120.0, above=0, everyday=False, resume="free")
    """Time to wait until a server is healthy, in seconds."""

    vllm_server_api_key: str | None = flag(secret=True, everyday=False, unset="SWIFT_API_KEY of the environment")
    """Key of the servers."""

    vllm_enable_lora: bool = flag(False, aliases=("vllm_lora_sync",), everyday=False)
    """Whether weight syncs send the adapter alone instead of merged weights."""

    vllm_max_lora_rank: int | None = flag(at_least=1, needs="vllm_enable_lora", everyday=False)
    """Maximum adapter rank of the engine."""

    vllm_engine_kwargs: dict[str, Any] = flag({}, needs="use_vllm", everyday=False)
    """Further arguments of vLLM's engine; not checked."""

    async_generate: bool = flag(False, aliases=("async_prefetch",), everyday=False)
    """Whether the next batch is sampled while this one trains, in dedicated or server mode."""

    sleep_level: Literal[0, 1, 2] = flag(
        0, aliases=("vllm_enable_sleep_mode",), values={"true": "1", "false": "0"}, everyday=False, resume="free"
    )
    """Level of engine sleep while training, in colocate: 1 moves weights to the CPU, 2 drops them."""

    offload_model: bool = flag(False, everyday=False, resume="free")
    """Whether the trainer's model moves to the CPU during generation, in colocate."""

    offload_optimizer: bool = flag(False, everyday=False, resume="free")
    """Whether the optimizer state moves to the CPU during generation, in colocate."""

    gc_collect_after_offload: bool = flag(False, everyday=False, resume="free")
    """Whether garbage is collected and the device cache emptied after offloading."""

    move_model_batches: int | None = flag(at_least=1, everyday=False, unset="all weights in one pass", resume="free")
    """Number of layer groups of a weight sync; the rest is one more."""

    ds3_gather_for_generation: bool = flag(True, everyday=False)
    """Whether ZeRO-3 gathers the weights once per rollout batch. Required with vLLM."""

    parity_check: str = flag("start", resume="free")
    """Schedule of the comparison of engine and trainer log-probs: start, every:N steps, warn (at the start, without
    error), or off."""

    cpu_devices: int | None = flag(at_least=1, everyday=False, unset="as many as are needed", resume="free")
    """Number of groups of CPU cores that stand for devices without an accelerator."""

    weight_transport: Literal["auto", "object_store", "broadcast", "disk", "http"] = flag("auto", everyday=False)
    """Transport of weight syncs: object_store or broadcast with `--vllm_mode dedicated`; disk, http or broadcast to
    servers."""

    ray_address: str | None = flag(everyday=False, unset="a cluster that ends with the run")
    """Address of an existing Ray cluster for dedicated engines: host:port, or auto for this machine's."""

    ray_token_file: str | None = flag(everyday=False, needs="ray_address", unset="made for a cluster of this run")
    """File with the token of the cluster."""

    engine_restarts: int = flag(3, at_least=0, everyday=False, resume="free")
    """Maximum number of engine restarts per hour."""

    rollout_timeout: float | None = flag(
        above=0, everyday=False, unset="600, or 0.2 per token of the longest sample", resume="free"
    )
    """Time limit of a request to an engine, in seconds, without its time in the queue of the engine."""

    stall_timeout: float = flag(300.0, above=0, everyday=False, resume="free")
    """Time without progress after which the run ends, in seconds."""

    deterministic_rollout: bool | None = flag(everyday=False, unset="true, except for vLLM on GPUs of its own")
    """Whether each sample has a seed of its own, so that a run can be repeated; vLLM on GPUs samples faster without."""

    engine_timeout: float | None = flag(
        above=0, everyday=False, unset="300 + 1 for each 50 MB of the checkpoint, at most 1500", resume="free"
    )
    """Time limit of a weight sync, of sleep and wake, and of any other call to an engine, in seconds."""

    use_lmdeploy: bool = flag(False, everyday=False)
    """Whether LMDeploy generates. Excludes `--use_vllm`."""

    lmdeploy_device: list[str] = flag(["auto"], needs="use_lmdeploy", everyday=False)
    """Devices of the LMDeploy engines."""

    lmdeploy_session_len: int | None = flag(
        at_least=1, needs="use_lmdeploy", everyday=False, unset="max_length + max_completion_length"
    )
    """Maximum length of prompt and completion, in tokens."""

    lmdeploy_cache_max_entry_count: float = flag(0.8, above=0, at_most=1, needs="use_lmdeploy", everyday=False)
    """Share of the free memory for LMDeploy's KV cache."""
