"""Configurations of TRL: the YAML of `trl <method>`, and the keys of GRPOConfig, SFTConfig, DPOConfig and others."""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from swift.arguments.imports.draft import Draft, Renamed, Rule, lost, refused, same, text_of, variable, where_true
from swift.arguments.modes import command_of
from swift.arguments.plugins import settings_class
from swift.arguments.values import show
from swift.flags import spellings_of
from swift.plugin.registry import methods

DATASET = {"path", "id", "name", "config", "split", "columns", "weight", "data_files", "data_dir"}
"""Keys of an entry of `datasets` and `dataset_mixture`."""


def _subset(draft: Draft, key: str, raw: Any) -> None:
    """`dataset_config`: a subset, which we write behind the dataset's name."""
    subset = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
    if len(draft.settings.get("dataset", [])) != 1 or not isinstance(subset, str):
        draft.lose(key, "subsets are written behind a dataset: --dataset <id>:<subset>")
        return
    name, mark, part = draft.settings["dataset"][0].partition("#")
    draft.settings["dataset"] = [f"{name}:{subset}{mark}{part}"]
    draft.lines.append((key, "taken", f"dataset: {draft.settings['dataset'][0]}"))


def take_split(draft: Draft, key: str, split: Any, name: str = "dataset") -> str:
    """The part of a split such as `train[:10%]`, as `#:10%`; its name is one for all of `--dataset` here."""
    found = re.fullmatch(r"(\w+)(\[((-?\d+%?)?:(-?\d+%?)?)\])?", str(split))
    if not found:
        draft.lose(key, f"{split}: several splits or another rounding; --dataset <id>#:10% takes a part of one")
        return ""
    part = f"#{found[3]}" if found[3] else ""
    if part:
        draft.lines.append((key, "taken", f"{name}: {part} behind its entry"))
    if name != "dataset":
        draft.lose(key, f"{found[1]}: evaluation rows are of the first split of validation, dev, test and the like")
    elif found[1] != "train":
        draft.take(key, "split", found[1])
    elif draft.settings.get("split", "train") != "train":
        draft.lose(key, f"train: contradicts --split {draft.settings['split']}, which is one for all")
    elif not part:
        draft.same(key, "train is the split that is read")
    return part


def _train_split(draft: Draft, key: str, raw: Any) -> None:
    """`dataset_train_split`: of the one dataset that was named before."""
    part = take_split(draft, key, raw)
    if part and len(draft.settings.get("dataset", [])) == 1:
        draft.settings["dataset"] = [draft.settings["dataset"][0] + part]
    elif part:
        draft.lose(key, f"{raw}: parts are written behind a dataset: --dataset <id>{part}")


def _scale(draft: Draft, key: str, raw: Any) -> None:
    """`scale_rewards`, which nothing reads where each reward is normalised by itself."""
    block = draft.config.get("trl")
    ways = {**draft.config, **(block if isinstance(block, dict) else {})}
    if ways.get("multi_objective_aggregation", ways.get("rl")) in ("normalize_then_sum", "gdpo"):
        draft.same(key, "each reward is normalised by itself")
    else:
        draft.take(key, "scale_rewards", raw)


def needed(draft: Draft, key: str, name: str, raw: Any) -> None:
    """A setting without which the run would be another one."""
    if name not in spellings_of(draft.cls):
        refused(f"swift {command_of(draft.mode)} has no counterpart, and would train something else")(draft, key, raw)
    draft.take(key, name, raw)


def _mixture(draft: Draft, key: str, raw: Any) -> None:
    """`datasets` of a mixture, of TRL and of recipes built on it."""
    entries = raw.get("datasets", []) if isinstance(raw, dict) else raw
    if not all(isinstance(entry, dict) for entry in entries):
        draft.lose(key, "not a list of maps with `path`")
        return
    names = []
    for index, entry in enumerate(entries):
        place = f"{key}[{index}]"
        subset = entry.get("config") or (entry.get("name") if "path" in entry else None)
        part = take_split(draft, f"{place}.split", entry["split"]) if entry.get("split") else ""
        of = f":{subset}" if subset and subset != "default" else ""
        names.append(f"{entry.get('path') or entry.get('id')}{of}{part}")
        for name in {"weight", "data_files", "data_dir"} & set(entry):
            if entry[name] not in (None, 1.0):
                draft.lose(
                    f"{place}.{name}", f"{entry[name]}: weights are --interleave_prob, files are named in --dataset"
                )
        for name in set(entry) - DATASET:
            draft.lose(f"{place}.{name}", "unknown to swift")
    draft.take(key, "dataset", list(dict.fromkeys(names)))
    for name in set(raw) - {"datasets"} if isinstance(raw, dict) else ():
        draft.lose(f"{key}.{name}", "see --split_dataset_ratio, --data_seed")


def take_precision(dtype: str) -> Rule:
    """`bf16` and `fp16`: where one is true, or left to the machine; `bf16` with float32 weights is autocast."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        weights = {show(draft.config.get(name, "")).lower() for name in ("torch_dtype", "dtype")}
        if show(raw).lower() == "true" and dtype == "bfloat16" and weights & {"float32", "fp32"}:
            draft.take(key, "autocast", dtype)
        elif show(raw).lower() in ("true", "full"):
            draft.take(key, "torch_dtype", dtype)
        else:
            draft.same(key, "--torch_dtype is the precision, by default that of the machine")

    return rule


def take_targets(draft: Draft, key: str, raw: Any) -> None:
    """`lora_target_modules`: for PEFT a list has names, and a text with other characters is a regular expression."""
    is_regex = isinstance(raw, str) and re.search(r"[^\w.\s-]", raw)
    draft.take(key, "target_regex" if is_regex else "target_modules", raw)


def _targets(draft: Draft, key: str, raw: Any) -> None:
    """`lora_target_modules`, which reach towers, too; `defaults` unfreezes these for all linear layers."""
    take_targets(draft, key, raw)
    if draft.sees and draft.settings.get("target_modules") != ["all-linear"]:
        _, fate, why = draft.lines.pop()
        draft.lines.append((key, fate, why + IN_TOWERS))


def take_parameters(draft: Draft, key: str, raw: Any) -> None:
    """`lora_target_parameters`; without targets of the other kind PEFT would adapt no module."""
    if not any(draft.config.get(name) for name in ("lora_target_modules", "lora_target_linear")):
        refused("swift would adapt all linear layers besides; name the modules in lora_target_modules")(draft, key, raw)
    draft.take(key, "target_parameters", raw)


def _model_settings(draft: Draft, key: str, raw: Any) -> None:
    """`model_init_kwargs`: a map, or its JSON on a command line."""
    try:
        settings = dict(json.loads(raw) if isinstance(raw, str) else raw)
    except (ValueError, TypeError):
        draft.lose(key, f"{raw}: not a map; write JSON")
        return
    draft.translate(settings.items(), RULES)


def _prompt_limit(draft: Draft, key: str, raw: Any) -> None:
    """`max_prompt_length`: the limit of prompts where completions are sampled."""
    if draft.mode == "rlhf":
        draft.take(key, "max_length", raw)
    else:
        draft.lose(key, "--max_length limits prompt and answer together")


QUANTISATION: dict[str, Rule] = {
    "load_in_4bit": where_true(quant_method="bnb", quant_bits="4"),
    "load_in_8bit": where_true(quant_method="bnb", quant_bits="8"),
}
"""How QLoRA is switched on, by TRL and Axolotl alike."""


def _variables(draft: Draft, key: str, raw: Any) -> None:
    if not isinstance(raw, dict):
        draft.lose(key, f"{show(text_of(raw))}: not a map of variables; set them in the shell")
        return
    for name, value in raw.items():
        draft.export(key, name, value)


RULES: dict[str, Rule] = {
    **QUANTISATION,
    "model_name_or_path": Renamed("model"),
    "teacher_model_name_or_path": Renamed("teacher_model"),
    "reward_model_name_or_path": Renamed("reward_model"),
    "dataset_name": Renamed("dataset"),
    "dataset_config": _subset,
    "dataset_configs": _subset,
    "dataset_train_split": _train_split,
    "dataset_test_split": lost("evaluation rows are --val_dataset or --split_dataset_ratio"),
    "dataset_streaming": Renamed("streaming"),
    "datasets": _mixture,
    "dataset_mixture": _mixture,
    "use_peft": Renamed("tuner_type", {"true": "lora", "false": "full"}),
    "lora_r": Renamed("lora_rank"),
    "lora_target_modules": _targets,
    "lora_modules_to_save": Renamed("modules_to_save"),
    "lora_task_type": same("the task follows from the method"),
    "lora_target_parameters": take_parameters,
    "use_bnb_nested_quant": Renamed("bnb_4bit_use_double_quant"),
    "torch_dtype": Renamed("torch_dtype", {"auto": "none"}),
    "dtype": Renamed("torch_dtype", {"auto": "none"}),
    "bf16": take_precision("bfloat16"),
    "fp16": take_precision("float16"),
    "max_prompt_length": _prompt_limit,
    "top_k": Renamed("top_k", {"0": "-1"}),
    "scale_rewards": _scale,
    "vllm_max_model_length": Renamed("vllm_max_model_len"),
    "model_init_kwargs": _model_settings,
    "do_train": same("a run trains", "true"),
    "do_eval": same("evaluation follows from --val_dataset and --split_dataset_ratio"),
    "logging_strategy": same("a line every --logging_steps", "steps"),
    "overwrite_output_dir": same("each run has a folder of its own"),
    "num_processes": variable("NPROC_PER_NODE"),
    "log_level": same("`swift` has one level"),
    "num_completions_to_print": lost("completions.jsonl in the run's folder has all"),
    "env": _variables,
}

TRAINER: dict[str, Any] = {
    "use_hf": True, "optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "num_train_epochs": 3.0, "max_steps": -1,
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1, "seed": 42,
    "save_strategy": "steps", "save_steps": 500, "eval_strategy": "no", "split_dataset_ratio": 0.0, "lora_alpha": 32.0,
    "use_rslora": False, "use_dora": False, "freeze_parameters_ratio": 0.0, "truncation_strategy": "delete",
}  # fmt: skip
"""What transformers' trainer, PEFT and the hub are to TRL and Axolotl."""

METHODS: dict[str, dict[str, Any]] = {
    "rlhf": {
        "learning_rate": 1e-6, "beta": 0.0, "loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2,
        "importance_sampling_level": "token", "num_iterations": 1, "num_generations": 8, "max_completion_length": 512,
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "top_entropy_quantile": 1.0,
        "multi_objective_aggregation": "sum_then_normalize",
    },
    "sft": {"learning_rate": 2e-5, "max_length": 1024, "packing": False, "loss_type": "nll"},
    "gkd": {"learning_rate": 2e-5, "max_length": 1024, "lmbda": 0.5, "beta": 0.5, "temperature": 0.9, "seq_kd": False,
            "max_completion_length": 128},
}  # fmt: skip
"""What the configuration classes of TRL have for a mode; those of `swift.methods` say it themselves."""


IN_TOWERS = "; TRL adapts layers of these names in a vision tower, too: --freeze_vit false"

CAVEATS = {"target_modules": IN_TOWERS, "freeze_vit": ", if the model sees", "freeze_aligner": ", if the model sees"}
"""What to say beside its defaults."""


def of_method(mode: str) -> Mapping[str, Any]:
    """What the configuration class of TRL has for a method."""
    own: Mapping[str, Any] = methods[mode].in_trl if mode in methods else METHODS.get(mode, {})
    return own


SAMPLING: dict[str, dict[str, Any]] = {
    "use_vllm": {
        "rollout_importance_sampling_mode": "sequence_mask", "rollout_importance_sampling_threshold": 3.0,
        "vllm_server_timeout": 240.0, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
    },
    "beta": {"kl_bias_correction": True},
}  # fmt: skip
"""Settings -> what TRL's GRPO does beside them."""
_BESIDE = {**SAMPLING, "quant_method": {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "nf4"}}


def beside(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults with what goes with settings that are given, and without what contradicts them."""
    more = [wanted for name, wanted in _BESIDE.items() if given.get(name)]
    values = {**values, **dict(ChainMap(*more)), "data_seed": given.get("seed", 42)}
    if {**values, **given}.get("multi_objective_aggregation") == "normalize_then_sum":
        values.pop("scale_rewards", None)  # each reward has its own
    return values


def defaults(mode: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL uses where a configuration is silent; `given`: our settings, made of what it says."""
    tuner: dict[str, Any] = {"tuner_type": "full", "lora_rank": 16, "lora_dropout": 0.05}
    if given.get("tuner_type") == "lora":
        tuner["target_modules"] = ["q_proj", "v_proj"]  # PEFT's choice for nearly all architectures
    reaches_all = given.get("tuner_type") != "lora" or given.get("target_modules") == ["all-linear"]
    if reaches_all and getattr(settings_class(mode), "SEES", False):
        tuner |= {"freeze_vit": False, "freeze_aligner": False}
    more = {"logging_steps": 10, "gradient_checkpointing": True, "warmup_ratio": 0.0}
    return beside({**TRAINER, **tuner, **more, **of_method(mode)}, given)
