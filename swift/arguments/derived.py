"""Defaults that follow from other settings or from the machine: one row per rule.

A rule applies if its setting is None after all layers. The first rule whose condition holds decides; its text
is recorded in the provenance and shown by the help.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.arguments.bridges import apply_bridge
from swift.arguments.plugins import CHOICES, entry_of
from swift.arguments.values import convert, show
from swift.data.system import shipped_example
from swift.devices import allowed_cores, count_accelerators, is_worker, launch_variables
from swift.elastic import batch_processes
from swift.flags import registered, typed
from swift.models.arguments import OTHER_FLASH
from swift.rollout.arguments import ENVIRONMENT_REWARDS, request_limit_s
from swift.rollout.placement import has_own_engine

if TYPE_CHECKING:
    from swift.arguments.parse import Reader


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of the machine that defaults depend on; of another machine, all that it may have."""

    has_accelerator: bool
    cores: int
    processes: int = 1
    has_flash_attn: bool = True

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Machine:
        """The machine this process runs on; imports torch if its build may support an accelerator."""
        sizes = ("WORLD_SIZE",) if is_worker(environ) else ("NPROC_PER_NODE", "NNODES")
        given = launch_variables(environ)
        counts = [int(given[name]) for name in sizes if given.get(name, "").isdigit()]
        flash = importlib.util.find_spec("flash_attn") is not None
        processes = batch_processes(environ, max(1, math.prod(counts)))
        return cls(count_accelerators()[0] > 0, len(allowed_cores()), processes, flash)


USUAL_BATCH = 16
"""Rows per optimizer step that ms-swift aims at where no accumulation is given, outside of grpo."""

Condition = Callable[[Any, Machine], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table: the value of a setting that no layer gave.

    value: a constant, or a function of the settings and the machine. text: its reason, for the provenance and the help.
    when: the condition; None means always. choice, declared: instead of value and text, the setting whose registered
    entry declares the value, and the attribute of that entry.
    """

    name: str
    value: Any = None
    text: str = ""
    when: Condition | None = None
    choice: str = ""
    declared: str = ""


def _with(name: str, value: Any, choice: str, chosen: Any) -> Rule:
    """A value that goes with one value of another setting."""
    text = f"{typed(value)} with {choice} {typed(chosen)}"
    return Rule(name, value, text, lambda args, machine: getattr(args, choice) == chosen)


def _names_a_model(args: Any, _: Machine) -> bool:
    return bool(args.model or args.adapters) and not hasattr(args, "merge_lora")


def _names_another_backend(args: Any, _: Machine) -> bool:
    return bool(args.use_lmdeploy or args.infer_backend not in (None, "vllm"))


def _is_off_policy(args: Any, _: Machine) -> bool:
    seldom = has_own_engine(args) and args.vllm_sync_interval > 1
    seldom = seldom or args.rollout_source == "atropos"  # others sample while this trains
    return bool(args.async_generate or args.dynamic_sample or args.replay_buffer_size or seldom)


_CORRECTION = "rollout_importance_sampling_mode"
RULES: tuple[Rule, ...] = (
    Rule("ref_model", lambda args, _: args.model, "= model"),
    Rule(
        "torch_dtype",
        None,
        "that of each tensor in the base's files for merging",
        lambda args, _: hasattr(args, "merge_lora"),
    ),
    Rule("torch_dtype", "float32", "float32 with autocast", lambda args, _: bool(getattr(args, "autocast", None))),
    Rule(
        "torch_dtype",
        "bfloat16",
        "bfloat16 with an accelerator",
        lambda args, machine: machine.has_accelerator and not hasattr(args, "merge_lora"),
    ),
    Rule("torch_dtype", "float32", "float32 on a CPU", lambda args, _: not hasattr(args, "merge_lora")),
    Rule("learning_rate", 1e-4, "1e-4 with an adapter", lambda args, _: args.tuner_type != "full"),
    Rule("learning_rate", 1e-5, "1e-5 with tuner_type full"),
    Rule("lora_dropout", 0.0, "0.0 in rlhf", lambda args, _: hasattr(args, "rlhf_type")),
    Rule("lora_dropout", lambda args, _: args.USUAL_DROPOUT, "0.05 in supervised tuning"),
    Rule(
        "gradient_accumulation_steps",
        1,
        "1 in online reinforcement learning",
        lambda args, _: not hasattr(args, "lmbda") and (hasattr(args, "num_generations") or hasattr(args, "ebft_mode")),
    ),
    Rule(
        "gradient_accumulation_steps",
        lambda args, machine: -(-USUAL_BATCH // (args.per_device_train_batch_size * machine.processes)),
        f"else max(1, ceil({USUAL_BATCH} / per_device_train_batch_size / processes))",
    ),
    Rule(
        "dataloader_drop_last",
        True,
        "true in online reinforcement learning",
        lambda args, _: hasattr(args, "num_generations"),
    ),
    Rule("dataloader_drop_last", False, "else false"),
    Rule(
        "steps_per_generation",
        lambda args, _: args.gradient_accumulation_steps,
        "= gradient_accumulation_steps",
        lambda args, _: args.generation_batch_size is None,
    ),
    Rule("num_generations_eval", lambda args, _: args.num_generations, "= num_generations"),
    Rule(
        "epsilon_high",
        lambda args, _: args.epsilon,
        "= epsilon",
        lambda args, _: "epsilon" in entry_of(args, "loss_type").settings,
    ),
    _with("scale_rewards", "gdpo", "multi_objective_aggregation", "normalize_then_sum"),
    Rule("scale_rewards", choice="advantage_estimator", declared="default_scale"),
    _with("multi_objective_aggregation", "normalize_then_sum", "scale_rewards", "gdpo"),
    Rule("multi_objective_aggregation", "sum_then_normalize", "else sum_then_normalize"),
    Rule("kl_in_reward", choice="advantage_estimator", declared="kl_in_reward"),
    Rule("importance_sampling_level", choice="loss_type", declared="default_level"),
    _with(_CORRECTION, "none", "old_logprobs", "sampler"),
    _with(_CORRECTION, "none", "vllm_importance_sampling_correction", False),
    _with(_CORRECTION, "token_truncate", "vllm_importance_sampling_correction", True),
    Rule(_CORRECTION, "token_truncate", "token_truncate if tokens may be older than the policy", _is_off_policy),
    Rule(_CORRECTION, "none", "else none"),
    Rule("use_vllm", False, "false with another infer_backend or use_lmdeploy", _names_another_backend),
    Rule("use_vllm", True, "else true on a server"),
    _with("infer_backend", "vllm", "use_vllm", True),
    _with("infer_backend", "lmdeploy", "use_lmdeploy", True),
    Rule("infer_backend", "transformers", "else transformers"),
    Rule("eval_strategy", lambda args, _: args.save_strategy, "= save_strategy"),
    Rule("eval_steps", lambda args, _: args.save_steps, "= save_steps"),
    Rule(
        "metric_for_best_model",
        "ebft/cfm_loss",
        "ebft/cfm_loss with ebft_mode strided",
        lambda args, _: getattr(args, "ebft_mode", None) == "strided",
    ),
    Rule("metric_for_best_model", "loss", "loss in distillation", lambda args, _: hasattr(args, "lmbda")),
    Rule(
        "metric_for_best_model",
        "reward",
        "reward in reinforcement learning",
        lambda args, _: hasattr(args, "num_generations"),
    ),
    Rule(
        "metric_for_best_model",
        "rouge-l",
        "rouge-l with predict_with_generate",
        lambda args, _: getattr(args, "predict_with_generate", False),
    ),
    Rule("metric_for_best_model", "loss", "else loss"),
    Rule(
        "greater_is_better",
        lambda args, _: not args.metric_for_best_model.endswith("loss"),
        "false for a loss, true for any other metric",
    ),
    Rule("soft_max_length", lambda args, _: args.max_completion_length, "= max_completion_length"),
    Rule("cosine_max_len", lambda args, _: args.max_completion_length, "= max_completion_length"),
    Rule(
        "rollout_timeout",
        lambda args, _: request_limit_s(args.max_completion_length),
        "600, or 0.2 per token of max_completion_length if that is more",
        lambda args, _: hasattr(args, "max_completion_length"),
    ),
    Rule("reward_workers", lambda args, machine: min(8, machine.cores), "min(8, CPU cores)"),
    Rule(
        "vllm_max_lora_rank",
        lambda args, _: args.sent_rank,
        "the rank of the adapter that is sent",
        lambda args, _: hasattr(args, "lora_rank") and args.sent_rank != args.lora_rank,
    ),
    Rule(
        "vllm_max_lora_rank", lambda args, _: args.lora_rank, "= lora_rank", lambda args, _: hasattr(args, "lora_rank")
    ),
    Rule(
        "output_dir",
        lambda args, _: str(Path("output", Path(str(args.model or args.adapters[0])).name or "model")),
        "output/<model name>",
        _names_a_model,
    ),
)


def complete(reader: Reader, machine: Machine) -> None:
    """Derives the settings that no layer gave. Adds notes and problems to those of the reader."""
    args = reader.args
    for names, rewrite in REWRITES:
        if any(getattr(args, name, None) not in (None, [], {}, False) for name in names.split()):
            rewrite(reader, machine)
    for rule in RULES:
        if getattr(args, rule.name, rule) is None and (rule.when is None or rule.when(args, machine)):
            value, text = rule.value(args, machine) if callable(rule.value) else rule.value, rule.text
            if rule.choice:
                value = getattr(entry_of(args, rule.choice), rule.declared)
                text = f"{typed(value)} with {rule.choice} {getattr(args, rule.choice)}"
            if value is not None:
                reader.derive(rule.name, value, text)
    _replace_attention(reader, machine)
    _note_other_defaults(reader)


def _replace_attention(reader: Reader, machine: Machine) -> None:
    """Another kernel of the same attention, with a note, in place of one that machine or precision rules out."""
    chosen, kernel, gap = getattr(reader.args, "attn_impl", None), "sdpa", ""
    if chosen == "flex_attention":
        gap = "" if machine.has_accelerator else "has no backward pass on a CPU"
    elif chosen in ("flash_attn", *OTHER_FLASH):
        if not machine.has_accelerator:
            gap = "needs a GPU"
        elif not machine.has_flash_attn:
            gap = "needs the package flash_attn, which is not installed"
        elif reader.args.torch_dtype == "float32":
            gap = "has no kernels for --torch_dtype float32"
        elif chosen in OTHER_FLASH:
            kernel, gap = "flash_attn", "not used here"
    if gap:
        reader.derive("attn_impl", kernel, f"in place of {chosen}")
        reader.notes.append(f"--attn_impl: {chosen}: {gap}; {kernel} computes the same attention")


def _note_other_defaults(reader: Reader) -> None:
    """Notes on derived values that differ from the defaults of ms-swift, which bias the gradient."""
    if reader.mode != "rlhf":
        return
    if reader.args.tuner_type == "lora" and "lora_dropout" in reader.rules:
        reader.notes.append(
            "--lora_dropout: 0.0: in ms-swift 0.05; with dropout the policy that is trained is not the one that samples"
        )
    if _CORRECTION in reader.rules and getattr(reader.args, _CORRECTION) == "token_truncate":
        reader.notes.append(
            f"--{_CORRECTION}: token_truncate: in ms-swift none; {reader.rules[_CORRECTION].partition(' if ')[2]}"
        )


def _derive_batch_size(reader: Reader, machine: Machine) -> None:
    """The smallest `per_device_train_batch_size` that makes the global batch a multiple of the group size."""
    args = reader.args
    if "per_device_train_batch_size" in reader.origins:
        return
    others = (args.gradient_accumulation_steps or 1) * machine.processes
    size = args.num_generations // math.gcd(args.num_generations, others)
    reader.derive(
        "per_device_train_batch_size", size, "smallest that makes the global batch a multiple of num_generations"
    )


def _find_shipped_plugins(reader: Reader, _: Machine) -> None:
    """Replaces plugin paths that do not exist by shipped examples of the same name."""
    given = reader.args.external_plugins
    found = [find_plugin(path) for path in given]
    if found != given:
        reader.notes += [
            f"--external_plugins: {path}: not in this folder; the shipped {file} is used"
            for path, file in zip(given, found, strict=True)
            if path != file
        ]
        reader.derive("external_plugins", found, "found among the shipped examples")


def _move_reward_models(reader: Reader, _: Machine) -> None:
    """Moves folders and hub ids from `reward_funcs`, as TRL takes them, to `reward_model`, with their weights."""
    args = reader.args
    given: list[str] = args.reward_funcs
    others = [name for name in given if name not in registered("orms") and not name.endswith(".py")]
    models = [name for name in others if "/" in name or (Path(name).expanduser() / "config.json").is_file()]
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


def find_plugin(path: str) -> str:
    """A plugin's path, or that of the shipped example of this name if there is no such file."""
    shipped = None if Path(path).expanduser().exists() else shipped_example(Path(path))
    return path if shipped is None else str(shipped)


def load_plugins(paths: Sequence[str]) -> None:
    """Loads plugins, which may register settings."""
    if paths:
        from swift.plugin import load_external_plugins

        load_external_plugins([find_plugin(path) for path in paths])


def _derive_full_towers(reader: Reader, _: Machine) -> None:
    """What `--tuner_type lora_llm` of ms-swift says beside lora."""
    if (given := reader.origins.get("tuner_type")) and show(given.raw) == "lora_llm":
        for name, value in {"full_towers": True, "freeze_vit": False, "freeze_aligner": False}.items():
            if name not in reader.origins:
                reader.derive(name, value, "with tuner_type lora_llm")


def _derive_eval_strategy(reader: Reader, _: Machine) -> None:
    """Turns evaluation off without evaluation rows; `--save_strategy no` alone turns it off too, as in ms-swift."""
    args = reader.args
    if getattr(args, "eval_strategy", "no") is None and args.save_strategy == "no" and args.val_dataset:
        reader.notes.append("evaluation: off, as --save_strategy is no; --eval_strategy steps turns it on")
    if getattr(args, "eval_strategy", "no") == "no" or args.val_dataset or args.split_dataset_ratio:
        return
    reader.derive("eval_strategy", "no", "no: there is no evaluation data")
    if reader.origins.keys() & {"eval_strategy", "eval_steps"}:
        reader.notes.append("evaluation: off: neither --val_dataset nor --split_dataset_ratio is given")


def _derive_engine(reader: Reader, _: Machine) -> None:
    """A vLLM mode or a server address selects vLLM, unless another backend is given."""
    args = reader.args
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


def _derive_replay(reader: Reader, _: Machine) -> None:
    """Nothing is sampled: there is no engine to start or to check."""
    for name, value in (("use_vllm", False), ("infer_backend", "transformers"), ("parity_check", "off")):
        if name not in reader.origins or name == "parity_check":
            reader.derive(name, value, "with replay_from")
    if "record_rollouts" not in reader.origins:
        reader.derive("record_rollouts", "off", "off with replay_from")


def _add_gym_reward(reader: Reader, _: Machine) -> None:
    """Adds the reward of an environment as the last function if `reward_funcs` has none of its names."""
    args = reader.args
    if set(ENVIRONMENT_REWARDS) & set(args.reward_funcs):
        return
    others, weights = [*args.reward_funcs, *args.reward_model], args.reward_weights
    if others and len(weights) == len(others):
        reader.notes.append("--gym_env: its reward is not used: --reward_weights has no weight for it, the last one")
        return
    if len(weights) == len(others) + 1:  # reward models come after all functions
        args.reward_weights = [*weights[: len(args.reward_funcs)], weights[-1], *weights[len(args.reward_funcs) : -1]]
    reader.derive("reward_funcs", [*args.reward_funcs, "environment"], "environment is added with gym_env")


def _derive_from_rollout_source(reader: Reader, _: Machine) -> None:
    """Environments score their samples; those of Atropos sample with a server, by default at temperature 1."""
    args = reader.args
    source = args.rollout_source
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


def _move_generation_kwargs(reader: Reader, _: Machine) -> None:
    """Entries of `--generation_kwargs` that have a flag become its value."""
    args = reader.args
    for name, value in args.flags_in_kwargs().items():
        raw = [str(item) for item in value] if isinstance(value, list) else str(value)
        try:
            converted = convert(reader.flags[name], raw)
        except ValueError as error:
            reader.problems.append(f"--generation_kwargs: {name}: {value}: {error}")
            continue
        if name in reader.origins and getattr(args, name) != converted:
            reader.notes.append(f"--generation_kwargs: {name}: {value}: beats {reader.origins[name].subject}")
        reader.derive(name, converted, "from --generation_kwargs")


def _leave_stage_0(reader: Reader, _: Machine) -> None:
    """Stage 0 shards nothing, and rounds small updates of 16-bit weights away; a run without DeepSpeed does not."""
    if reader.args.deepspeed == "zero0":
        reader.derive("deepspeed", None, "none: stage 0 shards nothing")
        reader.notes.append("--deepspeed: zero0: stage 0 shards nothing: the run is without DeepSpeed")


REWRITES: tuple[tuple[str, Callable[[Reader, Machine], None]], ...] = (
    ("save_strategy", _derive_eval_strategy),
    ("tuner_type", _derive_full_towers),
    ("external_plugins", _find_shipped_plugins),
    ("gym_env use_gym_env", _add_gym_reward),
    ("reward_funcs", _move_reward_models),
    ("weight_bridge", apply_bridge),
    ("rollout_source", _derive_from_rollout_source),
    ("replay_from", _derive_replay),
    ("num_generations", _derive_batch_size),
    ("num_generations", _derive_engine),
    ("generation_kwargs", _move_generation_kwargs),
    ("deepspeed", _leave_stage_0),
)
"""Settings -> what changes others when one of them is set, in this order, before `RULES`."""


def rule_texts(name: str, *, exporting: bool = False) -> list[str]:
    """The texts of the rules of a setting, for the help."""
    texts = [_declared_text(rule) if rule.choice else rule.text for rule in RULES if rule.name == name]
    if name == "torch_dtype":
        return [text for text in texts if text.endswith("merging") == exporting]
    return [] if exporting else texts


def _declared_text(rule: Rule) -> str:
    """The values that the registered entries of a choice declare; the default of their class last."""
    owners: dict[Any, list[str]] = {}
    for entry, declares in registered(CHOICES[rule.choice]).items():
        owners.setdefault(getattr(declares, rule.declared), []).append(entry)
    default = type(declares).__dataclass_fields__[rule.declared].default
    others = [f"{typed(v)} with {rule.choice} {' or '.join(names)}" for v, names in owners.items() if v != default]
    return "; ".join([*others, f"else {typed(default)}"])
