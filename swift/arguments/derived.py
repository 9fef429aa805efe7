"""Defaults that follow from other settings or from the machine: one row per rule.

A rule acts where its setting is None after all layers. The first rule whose condition holds decides; its text
is recorded in the provenance and shown by the help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.arguments.bridges import lay_bridge
from swift.arguments.plugins import CHOICES, entry_of
from swift.arguments.values import convert
from swift.data.system import shipped_example
from swift.devices import allowed_cores, count_accelerators, is_worker, launch_variables
from swift.flags import registered, typed
from swift.rollout.arguments import ENVIRONMENT_REWARDS, request_limit_s
from swift.rollout.placement import has_own_engine

if TYPE_CHECKING:
    from swift.arguments.parse import Reader


@dataclass(frozen=True, slots=True)
class Machine:
    """What defaults depend on."""

    has_accelerator: bool
    cores: int
    processes: int = 1

    @classmethod
    def look(cls, environ: Mapping[str, str]) -> Machine:
        """The machine this process runs on; imports torch where its build may see an accelerator."""
        sizes = ("WORLD_SIZE",) if is_worker(environ) else ("NPROC_PER_NODE", "NNODES")
        given = launch_variables(environ)
        counts = [int(given[name]) for name in sizes if given.get(name, "").isdigit()]
        return cls(count_accelerators()[0] > 0, len(allowed_cores()), max(1, math.prod(counts)))


USUAL_BATCH = 16
"""Rows per optimizer step that ms-swift aims at where no accumulation is given, outside of grpo."""

Condition = Callable[[Any, Machine], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """`name` is `value(args, machine)` when `when(args, machine)`; `text` says why, in the help with `args` None."""

    name: str
    text: Callable[[Any], str]
    value: Callable[[Any, Machine], Any]
    when: Condition = lambda args, machine: True


def _rule(name: str, text: str, value: Callable[[Any, Machine], Any]) -> Rule:
    return Rule(name, lambda args: text, value)


def _fixed(name: str, value: Any, text: str, when: Condition = lambda args, machine: True) -> Rule:
    return Rule(name, lambda args: text, lambda args, machine: value, when)


def _same_as(name: str, other: str, when: Condition = lambda args, machine: True) -> Rule:
    return Rule(name, lambda args: f"= {other}", lambda args, machine: getattr(args, other), when)


def _given(name: str, value: Any, choice: str, *chosen: Any) -> Rule:
    """A value that goes with values of another setting."""
    text = f"{typed(value)} with {choice} {' or '.join(map(typed, chosen))}"
    return _fixed(name, value, text, lambda args, machine: getattr(args, choice) in chosen)


def _declared(name: str, choice: str, attribute: str) -> Rule:
    """What the chosen loss or estimator declares."""

    def text(args: Any) -> str:
        if args is not None:
            return f"{typed(getattr(entry_of(args, choice), attribute))} with {choice} {getattr(args, choice)}"
        owners: dict[Any, list[str]] = {}
        for entry, declares in registered(CHOICES[choice]).items():
            owners.setdefault(getattr(declares, attribute), []).append(entry)
        usual = type(declares).__dataclass_fields__[attribute].default
        special = [f"{typed(v)} with {choice} {' or '.join(names)}" for v, names in owners.items() if v != usual]
        return "; ".join([*special, f"else {typed(usual)}"])

    return Rule(name, text, lambda args, machine: getattr(entry_of(args, choice), attribute))


def _has(setting: str) -> Condition:
    """Whether the mode has a setting."""
    return lambda args, machine: hasattr(args, setting)


def _names_a_model(args: Any, _: Machine) -> bool:
    return bool(args.model or args.adapters) and not hasattr(args, "merge_lora")


def _names_another_backend(args: Any, _: Machine) -> bool:
    return bool(args.use_lmdeploy or args.infer_backend not in (None, "vllm"))


def _is_off_policy(args: Any, _: Machine) -> bool:
    seldom = has_own_engine(args) and args.vllm_sync_interval > 1
    seldom = seldom or args.rollout_source == "atropos"  # others sample while this trains
    return bool(args.async_generate or args.dynamic_sample or args.replay_buffer_size or seldom)


def _samples(args: Any, _: Machine) -> bool:
    return hasattr(args, "num_generations") or hasattr(args, "ebft_mode")


_merges = _has("merge_lora")
_CORRECTION = "rollout_importance_sampling_mode"
RULES: tuple[Rule, ...] = (
    _same_as("ref_model", "model"),
    _fixed("torch_dtype", None, "that of each tensor in the base's files for merging", _merges),
    _fixed(
        "torch_dtype",
        "bfloat16",
        "bfloat16 with an accelerator",
        lambda args, machine: machine.has_accelerator and not _merges(args, machine),
    ),
    _fixed("torch_dtype", "float32", "float32 on a CPU", lambda args, machine: not _merges(args, machine)),
    _fixed("learning_rate", 1e-4, "1e-4 with an adapter", lambda args, machine: args.tuner_type != "full"),
    _fixed("learning_rate", 1e-5, "1e-5 with tuner_type full"),
    _fixed("lora_dropout", 0.0, "0.0 in rlhf", _has("rlhf_type")),
    _rule("lora_dropout", "0.05 in supervised tuning", lambda args, machine: args.USUAL_DROPOUT),
    _fixed("gradient_accumulation_steps", 1, "1 in online reinforcement learning", _samples),
    _rule(
        "gradient_accumulation_steps",
        f"else max(1, ceil({USUAL_BATCH} / per_device_train_batch_size / processes))",
        lambda args, machine: -(-USUAL_BATCH // (args.per_device_train_batch_size * machine.processes)),
    ),
    _fixed("dataloader_drop_last", True, "true in online reinforcement learning", _has("num_generations")),
    _fixed("dataloader_drop_last", False, "else false"),
    _same_as("steps_per_generation", "gradient_accumulation_steps", lambda args, _: args.generation_batch_size is None),
    _same_as("num_generations_eval", "num_generations"),
    _same_as("epsilon_high", "epsilon", lambda args, machine: "epsilon" in entry_of(args, "loss_type").settings),
    _given("scale_rewards", "gdpo", "multi_objective_aggregation", "normalize_then_sum"),
    _declared("scale_rewards", "advantage_estimator", "default_scale"),
    _given("multi_objective_aggregation", "normalize_then_sum", "scale_rewards", "gdpo"),
    _fixed("multi_objective_aggregation", "sum_then_normalize", "else sum_then_normalize"),
    _declared("kl_in_reward", "advantage_estimator", "kl_in_reward"),
    _declared("importance_sampling_level", "loss_type", "default_level"),
    _given(_CORRECTION, "none", "old_logprobs", "sampler"),
    _given(_CORRECTION, "none", "vllm_importance_sampling_correction", False),
    _given(_CORRECTION, "token_truncate", "vllm_importance_sampling_correction", True),
    _fixed(_CORRECTION, "token_truncate", "token_truncate if tokens may be older than the policy", _is_off_policy),
    _fixed(_CORRECTION, "none", "else none"),
    _fixed("use_vllm", False, "false with another infer_backend or use_lmdeploy", _names_another_backend),
    _fixed("use_vllm", True, "else true on a server"),
    _given("infer_backend", "vllm", "use_vllm", True),
    _given("infer_backend", "lmdeploy", "use_lmdeploy", True),
    _fixed("infer_backend", "transformers", "else transformers"),
    _same_as("eval_strategy", "save_strategy"),
    _same_as("eval_steps", "save_steps"),
    _fixed(
        "metric_for_best_model",
        "ebft/cfm_loss",
        "ebft/cfm_loss with ebft_mode strided",
        lambda args, machine: getattr(args, "ebft_mode", None) == "strided",
    ),
    _fixed("metric_for_best_model", "reward", "reward in reinforcement learning", _has("num_generations")),
    _fixed("metric_for_best_model", "loss", "else loss"),
    _rule(
        "greater_is_better",
        "false for a loss, true for any other metric",
        lambda args, machine: not args.metric_for_best_model.endswith("loss"),
    ),
    _same_as("soft_max_length", "max_completion_length"),
    _same_as("cosine_max_len", "max_completion_length"),
    Rule(
        "rollout_timeout",
        lambda args: "600, or 0.2 per token of max_completion_length if that is more",
        lambda args, machine: request_limit_s(args.max_completion_length),
        _has("max_completion_length"),
    ),
    _rule("reward_workers", "min(8, CPU cores)", lambda args, machine: min(8, machine.cores)),
    Rule(
        "vllm_max_lora_rank",
        lambda args: "the rank of the adapter that is sent",
        lambda args, machine: args.sent_rank,
        lambda args, machine: hasattr(args, "lora_rank") and args.sent_rank != args.lora_rank,
    ),
    _same_as("vllm_max_lora_rank", "lora_rank", _has("lora_rank")),
    Rule(
        "output_dir",
        lambda args: "output/<model name>",
        lambda args, machine: str(Path("output", Path(str(args.model or args.adapters[0])).name or "model")),
        _names_a_model,
    ),
)


def complete(reader: Reader, machine: Machine) -> None:
    """Fills values that follow from others. Adds notes and problems to those of the reader."""
    _evaluation(reader)
    _batch_size(reader, machine)
    _plugins(reader)
    _gym_reward(reader)
    _reward_models(reader)
    lay_bridge(reader)
    _rollout_source(reader)
    _implied_engine(reader)
    _from_kwargs(reader)
    args = reader.args
    for rule in RULES:
        if getattr(args, rule.name, rule) is None and rule.when(args, machine):
            value = rule.value(args, machine)
            if value is not None:
                reader.derive(rule.name, value, rule.text(args))
    _unlike_ms_swift(reader)


def _unlike_ms_swift(reader: Reader) -> None:
    """Remarks where the default of ms-swift would spoil the gradient, and is another here."""
    args = reader.args
    if reader.mode != "rlhf":
        return
    if args.tuner_type == "lora" and "lora_dropout" in reader.rules:
        reader.notes.append(
            "--lora_dropout: 0.0: in ms-swift 0.05; with dropout the policy that is trained is not the one that samples"
        )
    if _CORRECTION in reader.rules and getattr(args, _CORRECTION) == "token_truncate":
        reader.notes.append(
            f"--{_CORRECTION}: token_truncate: in ms-swift none; {reader.rules[_CORRECTION].partition(' if ')[2]}"
        )


def _batch_size(reader: Reader, machine: Machine) -> None:
    """The smallest `per_device_train_batch_size` that makes the global batch a multiple of the group size."""
    args = reader.args
    if not hasattr(args, "num_generations") or "per_device_train_batch_size" in reader.origins:
        return
    others = (args.gradient_accumulation_steps or 1) * machine.processes
    size = args.num_generations // math.gcd(args.num_generations, others)
    reader.derive(
        "per_device_train_batch_size", size, "smallest that makes the global batch a multiple of num_generations"
    )


def _plugins(reader: Reader) -> None:
    """Plugins of the shipped examples are found from every folder."""
    given = getattr(reader.args, "external_plugins", [])
    found = [find_plugin(path) for path in given]
    if found != given:
        reader.notes += [
            f"--external_plugins: {path}: not in this folder; the shipped {file} is used"
            for path, file in zip(given, found, strict=True)
            if path != file
        ]
        reader.derive("external_plugins", found, "found among the shipped examples")


def _reward_models(reader: Reader) -> None:
    """Folders and hub ids among `reward_funcs`, as TRL takes them, are reward models; their weights go along."""
    args = reader.args
    given: list[str] = getattr(args, "reward_funcs", [])
    models = [name for name in given if _is_model(name)]
    if not models:
        return
    functions, names = [name for name in given if name not in models], [*given, *args.reward_model]
    weights = args.reward_weights
    if len(weights) == len(names):
        weights = [
            weights[index] for index in sorted(range(len(names)), key=lambda index: names[index] not in functions)
        ]
    rule = "folders and hub ids among reward_funcs are reward models"
    reader.derive("reward_funcs", functions, rule)
    reader.derive("reward_model", [*models, *args.reward_model], rule)
    reader.derive("reward_weights", weights, rule)


def _is_model(name: str) -> bool:
    """Whether the name of a reward is no registered one, but looks like a folder or an id of the hub."""
    if name in registered("orms") or name.endswith(".py"):
        return False
    return "/" in name or (Path(name).expanduser() / "config.json").is_file()


def find_plugin(path: str) -> str:
    """A plugin's path, or that of the shipped example of this name where there is no such file."""
    shipped = None if Path(path).expanduser().exists() else shipped_example(Path(path))
    return path if shipped is None else str(shipped)


def load_plugins(paths: Sequence[str]) -> None:
    """Loads plugins, so that their settings are known."""
    if paths:
        from swift.plugin import load_external_plugins

        load_external_plugins([find_plugin(path) for path in paths])


def _evaluation(reader: Reader) -> None:
    """Without evaluation rows there is no evaluation, nor with `--save_strategy no` alone, as in ms-swift."""
    args = reader.args
    if getattr(args, "eval_strategy", "no") is None and args.save_strategy == "no" and args.val_dataset:
        reader.notes.append("evaluation: off, as --save_strategy is no; --eval_strategy steps turns it on")
    if getattr(args, "eval_strategy", "no") == "no" or args.val_dataset or args.split_dataset_ratio:
        return
    reader.derive("eval_strategy", "no", "no: there is no evaluation data")
    if reader.origins.keys() & {"eval_strategy", "eval_steps"}:
        reader.notes.append("evaluation: off: neither --val_dataset nor --split_dataset_ratio is given")


def _implied_engine(reader: Reader) -> None:
    """A vLLM mode or a server address asks for vLLM, unless another backend is named."""
    args = reader.args
    if not hasattr(args, "num_generations"):
        return
    asked = [name for name in ("vllm_mode", "vllm_server_host", "vllm_server_base_url") if getattr(args, name)]
    if args.infer_backend == "vllm":
        asked = ["infer_backend"]
    elif args.infer_backend or args.use_lmdeploy:
        asked = []
    if asked and "use_vllm" in reader.origins and not args.use_vllm:
        reader.problems.append(f"--use_vllm: false: contradicts --{asked[0]}; drop --{asked[0]}, or --use_vllm true")
    elif asked and not args.use_vllm:
        reader.derive("use_vllm", True, f"true because --{asked[0]} is given")
    if args.infer_backend == "lmdeploy" and not args.use_lmdeploy:
        reader.derive("use_lmdeploy", True, "true because --infer_backend lmdeploy is given")
    if args.vllm_mode is None and (args.vllm_server_host or args.vllm_server_base_url):
        reader.derive("vllm_mode", "server", "server because its address is given")


def _gym_reward(reader: Reader) -> None:
    """The reward of `--gym_env` is the last column where `reward_funcs` has none of its names."""
    args = reader.args
    if getattr(args, "gym_env", None) is None or set(ENVIRONMENT_REWARDS) & set(args.reward_funcs):
        return
    others, weights = [*args.reward_funcs, *args.reward_model], args.reward_weights
    if others and len(weights) == len(others):
        reader.notes.append("--gym_env: its reward is not used: --reward_weights has no weight for it, the last one")
        return
    if len(weights) == len(others) + 1:  # reward models come after all functions
        args.reward_weights = [*weights[: len(args.reward_funcs)], weights[-1], *weights[len(args.reward_funcs) : -1]]
    reader.derive("reward_funcs", [*args.reward_funcs, "environment"], "environment is added with gym_env")


def _rollout_source(reader: Reader) -> None:
    """Environments score their samples; those of Atropos sample with a server, at temperature 1 if they say nothing."""
    args = reader.args
    source = getattr(args, "rollout_source", "engine")
    if source == "engine":
        return
    wanted: dict[str, Any] = {}
    if not args.reward_model:
        wanted["reward_funcs"] = ["environment"]
    if source == "atropos":
        wanted["temperature"] = 1.0
    if args.atropos_env and not (args.vllm_server_host or args.vllm_server_base_url):
        wanted["vllm_mode"] = "server"
    for name in wanted.keys() - reader.origins.keys():
        reader.derive(name, wanted[name], f"with rollout_source {source}")


def _from_kwargs(reader: Reader) -> None:
    """Entries of `--generation_kwargs` that have a flag become its value."""
    args = reader.args
    for name, value in args.flags_in_kwargs().items() if hasattr(args, "flags_in_kwargs") else ():
        raw = [str(item) for item in value] if isinstance(value, list) else str(value)
        try:
            converted = convert(reader.flags[name], raw)
        except ValueError as error:
            reader.problems.append(f"--generation_kwargs: {name}: {value}: {error}")
            continue
        if name in reader.origins and getattr(args, name) != converted:
            reader.notes.append(f"--generation_kwargs: {name}: {value}: beats {reader.origins[name].subject}")
        reader.derive(name, converted, "from --generation_kwargs")


def rule_texts(name: str, *, exporting: bool = False) -> list[str]:
    """The texts of the rules of a setting, for the help."""
    texts = [rule.text(None) for rule in RULES if rule.name == name]
    if name == "torch_dtype":
        return [text for text in texts if text.endswith("merging") == exporting]
    return [] if exporting else texts
