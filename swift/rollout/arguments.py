"""Settings of rollouts: how completions are sampled, how many, and by which engine."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.flags import flag
from swift.types import SamplingParams


@dataclass(kw_only=True)
class GenerationArguments:
    """The sampling distribution of one completion."""

    GROUP: ClassVar[str] = "Sampling"

    max_completion_length: int = flag(512, at_least=1, aliases=("max_new_tokens", "response_length"))
    """Most new tokens of a completion."""

    max_length: int | None = flag(at_least=1, unset="the model's context minus max_completion_length")
    """Longest prompt in tokens. Longer ones are treated by `--truncation_strategy`."""

    truncation_strategy: Literal["left", "right", "delete"] = flag("left", everyday=False)
    """What happens to prompts over `--max_length`: cut on the left, cut on the right, or leave the row out.
    Either is counted and reported."""

    temperature: float = flag(0.9, above=0)
    """Sampling temperature. The loss uses log-probs of logits / temperature too."""

    top_p: float = flag(1.0, above=0, at_most=1)
    """Sample from the smallest set of tokens with this share of the probability; 1.0 is off. Truncated sampling
    biases the gradient, because the trainer uses the whole vocabulary; 3.x used 0.9."""

    top_k: int = flag(-1, at_least=-1)
    """Sample from the k likeliest tokens; -1 or 0 is off. Biases the gradient like `--top_p`; 3.x used 50."""

    min_p: float = flag(0.0, at_least=0, at_most=1, everyday=False)
    """Leave out tokens less likely than this share of the likeliest one's probability; 0.0 is off. Biases the
    gradient like `--top_p`."""

    repetition_penalty: float = flag(1.0, above=0, everyday=False)
    """Divides the logits of tokens already seen; 1.0 is off. Biases the gradient like `--top_p`."""

    stop_words: list[str] = flag([], everyday=False)
    """Texts that end a completion, besides the end token."""

    generation_kwargs: dict[str, Any] = flag({}, everyday=False)
    """More sampling settings, as JSON such as `{"presence_penalty": 0.5, "min_tokens": 8}`. Those that have a flag of
    their own beat it; other names must be ones that the engine takes. Most of them bias the gradient like `--top_p`."""

    vllm_guided_decoding_regex: str | None = flag(
        aliases=("structured_outputs_regex",), everyday=False, unset="completions are free"
    )
    """Regular expression that completions must match, from their first token to their end token. Biases the gradient
    like `--top_p`. The transformers engine needs the package xgrammar for it."""

    def sampling_params(self) -> SamplingParams:
        """These settings as a request carries them; the seed is filled in per sample."""
        given = {name: value for name, value in self.generation_kwargs.items() if name not in FLAGS_IN_KWARGS}
        more = {SAMPLING_NAMES.get(name, name): value for name, value in given.items()}
        own = {name: more.pop(name) for name in COMMON_FIELDS if name in more}
        if "stop_token_ids" in own:
            own["stop_token_ids"] = tuple(own["stop_token_ids"])
        return SamplingParams(
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=tuple(self.stop_words),
            regex=self.vllm_guided_decoding_regex,
            extra=more,
            **own,
        )

    def flags_in_kwargs(self) -> dict[str, Any]:
        """Entries of `--generation_kwargs` that have a flag of their own, by the flag's name."""
        given = self.generation_kwargs
        return {FLAGS_IN_KWARGS[name]: value for name, value in given.items() if name in FLAGS_IN_KWARGS}

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        yield from self._spelling_problems()
        for name, value in self.generation_kwargs.items():
            if name not in FLAGS_IN_KWARGS and (problem := self._kwarg_problem(SAMPLING_NAMES.get(name, name), value)):
                yield f"--generation_kwargs: {name}: {problem}"
        regex = self.vllm_guided_decoding_regex
        if regex is not None and (problem := regex_problem(regex)):
            yield f"--vllm_guided_decoding_regex: {regex}: {problem}"

    def _spelling_problems(self) -> Iterator[str]:
        """Entries of `--generation_kwargs` that are one setting under several names, with different values."""
        names: dict[str, list[str]] = {}
        for name in self.generation_kwargs:
            names.setdefault(FLAGS_IN_KWARGS.get(name) or SAMPLING_NAMES.get(name, name), []).append(name)
        for said in names.values():
            values = [self.generation_kwargs[name] for name in said]
            if any(value != values[0] for value in values):
                shown = ", ".join(f"{name} {json.dumps(self.generation_kwargs[name])}" for name in said)
                yield f"--generation_kwargs: {shown}: the same setting with different values; give one of them"

    def _kwarg_problem(self, name: str, value: Any) -> str:
        """What is wrong with an entry that has no flag; "" when nothing is."""
        if name in OWN_FIELDS:
            return f"is set by swift itself{OWN_FIELDS[name]}"
        if name in COMMON_FIELDS:
            return COMMON_FIELDS[name](value)
        backend = getattr(self, "infer_backend", None) or "transformers"
        if getattr(self, "vllm_mode", None) == "server":  # the server says what its engine takes
            known = sorted({field for fields in EXTRA_FIELDS.values() for field in fields})
        elif backend in EXTRA_FIELDS:
            known = list(EXTRA_FIELDS[backend])
        else:  # of a plugin, whose engine checks requests itself
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
    r"""Why no engine can hold completions to an expression; "" when one may.

    Engines walk an automaton: what depends on other text than the token's own place has none. Classes such as `\p{L}`
    are passed over, because some engines have them and Python does not.
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


def _number(low: float, high: float) -> Callable[[Any], str]:
    def problem(value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{json.dumps(value)}: not a number; valid: {low:g} to {high:g}"
        return "" if low <= value <= high else f"{value:g}: out of range; valid: {low:g} to {high:g}"

    return problem


def _count(value: Any) -> str:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return "" if good else f"{json.dumps(value)}: not a count; give a whole number from 0"


def _token_ids(value: Any) -> str:
    good = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    return "" if good else f"{json.dumps(value)}: no list of token ids; give one such as [2, 7]"


COMMON_FIELDS: dict[str, Callable[[Any], str]] = {
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "min_tokens": _count,
    "stop_token_ids": _token_ids,
}
"""Fields of `SamplingParams` without a flag, and what is wrong with a value ("" for nothing)."""

SAMPLING_NAMES = {"min_new_tokens": "min_tokens"}
"""Other spellings in `--generation_kwargs`."""

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
"""Names in `--generation_kwargs` that are refused, and what to use instead."""

EXTRA_FIELDS: dict[str, tuple[str, ...]] = {
    "transformers": (),
    "vllm": (
        "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs", "thinking_token_budget",
        "repetition_detection",
    ),
    "lmdeploy": ("bad_token_ids", "repetition_ngram_size", "repetition_ngram_threshold"),
}  # fmt: skip
"""Further names in `--generation_kwargs` by backend."""


@dataclass(kw_only=True)
class SamplingArguments(GenerationArguments):
    """Groups of completions, and how they fill generation batches."""

    rollout_func: str | None = flag(everyday=False, unset="the engine samples each completion once")
    """Function that makes the completions, with the engine as its tool: a name that a plugin registers in
    `rollout_funcs`, or `path.py:function`."""

    num_generations: int = flag(8, at_least=2)
    """Completions per prompt, the G of GRPO (arXiv:2402.03300). Must divide the completions of an optimizer
    step: per_device_train_batch_size x processes x gradient_accumulation_steps."""

    num_generations_eval: int | None = flag(at_least=1, everyday=False)
    """Completions per prompt in evaluation."""

    steps_per_generation: int | None = flag(at_least=1, group="Optimization", everyday=False)
    """Micro-steps fed by one generation batch; a multiple or a divisor of gradient_accumulation_steps. More
    than gradient_accumulation_steps makes several optimizer steps of one batch."""

    generation_batch_size: int | None = flag(
        at_least=1, group="Optimization", everyday=False, unset="follows from steps_per_generation"
    )
    """Completions of a generation batch over all processes, the other way to give steps_per_generation."""

    mini_batch_size: int | None = flag(
        at_least=1, group="Optimization", everyday=False, unset="per_device_train_batch_size"
    )
    """Completions of one forward and backward pass; divides per_device_train_batch_size. Less memory, same loss
    and gradients."""

    max_tokens_per_micro_batch: int | None = flag(
        at_least=1,
        group="Optimization",
        everyday=False,
        unset="the batch sizes, and less where memory is too small; on a CPU what is fastest",
    )
    """Most tokens of one forward and backward pass: its completions and, once each, their prompts. Then tokens decide
    how many completions share a pass, not per_device_train_batch_size; with mini_batch_size both limits hold. Same loss
    and gradients. A completion that is longer has a pass of its own."""


@dataclass(kw_only=True)
class EngineArguments:
    """The inference engine and where it runs."""

    GROUP: ClassVar[str] = "Engine"

    use_vllm: bool = flag(False)
    """Generate with vLLM instead of in the trainer."""

    infer_backend: str | None = flag(values={"pt": "transformers"}, everyday=False)
    """The inference library: transformers, vllm, lmdeploy, or one that a plugin registers in `inference_backends`.
    transformers with `--vllm_mode dedicated` or a server samples in a process of its own, without vLLM."""

    vllm_mode: Literal["colocate", "server", "dedicated"] | None = flag(
        values={"async": "dedicated"}, unset="inferred from devices, NPROC_PER_NODE and num_infer_workers"
    )
    """Where vLLM runs: on the trainer's devices, on devices of its own, or behind a server address. Giving it
    implies `--use_vllm true`."""

    num_infer_workers: int | None = flag(at_least=1, unset="NPROC_PER_NODE if that is the number of devices, else 1")
    """Devices for inference on each node."""

    vllm_device: list[str] = flag(["auto"], everyday=False)
    """Devices of the engines, such as `cuda:7`; auto takes the last ones, or each process's own in colocate."""

    vllm_gpu_memory_utilization: float = flag(0.9, above=0, at_most=1, needs="use_vllm")
    """Share of a device's memory that vLLM may use."""

    vllm_max_model_len: int | None = flag(
        at_least=1, needs="use_vllm", everyday=False, unset="max_length + max_completion_length"
    )
    """Longest prompt and completion together, in tokens."""

    vllm_max_num_seqs: int = flag(256, at_least=1, needs="use_vllm", everyday=False)
    """Sequences that vLLM decodes at the same time."""

    vllm_enforce_eager: bool = flag(False, needs="use_vllm", everyday=False)
    """Do without CUDA graphs."""

    vllm_limit_mm_per_prompt: dict[str, Any] | None = flag(needs="use_vllm", everyday=False)
    """Images and the like per prompt, as JSON; passed on to vLLM."""

    vllm_enable_prefix_caching: bool = flag(True, needs="use_vllm", everyday=False)
    """Keep the computation of shared prompt starts; dropped at each weight change."""

    vllm_tensor_parallel_size: int = flag(
        1, at_least=1, aliases=("tensor_parallel_size",), needs="use_vllm", everyday=False
    )
    """Devices that share one engine."""

    vllm_data_parallel_size: int = flag(1, at_least=1, needs="use_vllm", everyday=False)
    """Engines of a `swift rollout` server."""

    vllm_server_host: list[str] = flag([], everyday=False)
    """Addresses of `swift rollout` servers. Giving one implies `--use_vllm true --vllm_mode server`."""

    vllm_server_port: list[int] = flag([8000], at_least=1, at_most=65535, everyday=False)
    """Ports of the servers, one for all or one each."""

    vllm_server_base_url: list[str] = flag([], everyday=False)
    """URLs of the servers, instead of hosts and ports."""

    vllm_server_timeout: float = flag(120.0, above=0, everyday=False)
    """Seconds to wait until a server is healthy."""

    vllm_server_api_key: str | None = flag(everyday=False, unset="the environment variable SWIFT_API_KEY, if set")
    """The servers' `--api_key`."""

    vllm_enable_lora: bool = flag(False, aliases=("vllm_lora_sync",), everyday=False)
    """Send the adapter alone to the engine instead of the merged weights."""

    vllm_max_lora_rank: int | None = flag(at_least=1, needs="vllm_enable_lora", everyday=False)
    """Largest adapter rank that the engine accepts."""

    vllm_engine_kwargs: dict[str, Any] = flag({}, needs="use_vllm", everyday=False)
    """More arguments of vLLM's engine, as JSON; passed on unchecked."""

    async_generate: bool = flag(False, aliases=("async_prefetch",), everyday=False)
    """Generate the next batch while this one trains, with weights one update old. Needs dedicated or server
    mode."""

    sleep_level: Literal[0, 1, 2] = flag(0, everyday=False)
    """Engine memory released while training, in colocate: 1 moves the weights to the CPU, 2 drops them."""

    offload_model: bool = flag(False, everyday=False)
    """Move the trainer's model to the CPU while an engine on the same device generates."""

    offload_optimizer: bool = flag(False, everyday=False)
    """Move the optimizer's state to the CPU while an engine on the same device generates."""

    gc_collect_after_offload: bool = flag(False, everyday=False)
    """Collect garbage and empty the device's cache after offloading."""

    move_model_batches: int | None = flag(at_least=1, everyday=False, unset="all weights in one pass")
    """Send the weights to the engine in this many groups of layers, and one of the rest."""

    ds3_gather_for_generation: bool = flag(True, everyday=False)
    """With ZeRO-3, gather the whole weights once per rollout. false is not possible with vLLM."""

    parity_check: str = flag("start")
    """When the sampler's log-probs are compared with the trainer's: start, every:N steps, warn (at the start,
    without stopping the run), or off."""

    cpu_devices: int | None = flag(at_least=1, everyday=False, unset="as many as are needed")
    """Groups of CPU cores that stand for devices on a machine without accelerator."""

    weight_transport: Literal["auto", "object_store", "broadcast", "ipc", "disk", "http"] = flag("auto", everyday=False)
    """How new weights travel to engines elsewhere: object_store, broadcast or ipc with `--vllm_mode dedicated`; disk,
    http or broadcast to servers. auto takes the shortest way between the devices."""

    ray_address: str | None = flag(everyday=False, unset="a local cluster that ends with the run")
    """Ray cluster for dedicated engines: host:port, or auto for the one on this machine."""

    ray_token_file: str | None = flag(everyday=False, unset="made for a local cluster")
    """File with the token of the Ray cluster at `--ray_address`."""

    engine_restarts: int = flag(3, at_least=0, everyday=False)
    """Restarts of dead engine processes per hour before the run ends."""

    rollout_timeout: float = flag(600.0, above=0, everyday=False)
    """Seconds for one request to an engine."""

    stall_timeout: float = flag(300.0, above=0, everyday=False)
    """Seconds without any progress after which the run ends and names the culprit."""

    use_lmdeploy: bool = flag(False, everyday=False)
    """Generate with LMDeploy. Excludes `--use_vllm`."""

    lmdeploy_device: list[str] = flag(["auto"], needs="use_lmdeploy", everyday=False)
    """Devices of the LMDeploy engines."""

    lmdeploy_session_len: int | None = flag(
        at_least=1, needs="use_lmdeploy", everyday=False, unset="max_length + max_completion_length"
    )
    """Longest prompt and completion together, in tokens."""

    lmdeploy_cache_max_entry_count: float = flag(0.8, above=0, at_most=1, needs="use_lmdeploy", everyday=False)
    """Share of the free memory that LMDeploy's KV cache takes."""
