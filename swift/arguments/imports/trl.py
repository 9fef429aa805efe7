"""Configurations of TRL: the YAML of `trl <method>`, and the keys of GRPOConfig, SFTConfig, DPOConfig and others."""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from swift.arguments.imports.draft import Draft, Renamed, Rule, lost, same, variable, where_true
from swift.arguments.values import show

DATASET = {"path", "id", "name", "config", "split", "columns", "weight", "data_files", "data_dir"}
"""Keys of an entry of `datasets` and `dataset_mixture`."""


def _subset(draft: Draft, key: str, raw: Any) -> None:
    """`dataset_config`: a subset, which we write behind the dataset's name."""
    subset = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
    if len(draft.settings.get("dataset", [])) != 1 or not isinstance(subset, str):
        draft.lose(key, "subsets are written behind a dataset: --dataset <id>:<subset>")
        return
    draft.settings["dataset"] = [f"{draft.settings['dataset'][0]}:{subset}"]
    draft.lines.append((key, "taken", f"dataset: {draft.settings['dataset'][0]}"))


def take_split(draft: Draft, key: str, split: Any) -> None:
    """A split of a hub dataset, which is one for all of `--dataset` here."""
    if split == "train":
        draft.same(key, "train is the split that is read")
    elif "[" in split:
        draft.lose(key, f"{split}: a part of a split; --dataset <id>#n takes n random rows")
    else:
        draft.take(key, "split", split)


def _mixture(draft: Draft, key: str, raw: Any) -> None:
    """`datasets` of a mixture, of TRL and of recipes built on it."""
    entries = raw.get("datasets", []) if isinstance(raw, dict) else raw
    if not all(isinstance(one, dict) for one in entries):
        draft.lose(key, "not a list of maps with `path`")
        return
    names = []
    for index, one in enumerate(entries):
        place = f"{key}[{index}]"
        subset = one.get("config") or (one.get("name") if "path" in one else None)
        if one.get("split"):
            take_split(draft, f"{place}.split", one["split"])
        names.append(f"{one.get('path') or one.get('id')}{f':{subset}' if subset and subset != 'default' else ''}")
        for name in {"weight", "data_files", "data_dir"} & set(one):
            if one[name] not in (None, 1.0):
                draft.lose(
                    f"{place}.{name}", f"{one[name]}: weights are --interleave_prob, files are named in --dataset"
                )
        for name in set(one) - DATASET:
            draft.lose(f"{place}.{name}", "unknown to swift")
    draft.take(key, "dataset", list(dict.fromkeys(names)))
    for name in set(raw) - {"datasets"} if isinstance(raw, dict) else ():
        draft.lose(f"{key}.{name}", "see --split_dataset_ratio, --data_seed")


def take_precision(dtype: str) -> Rule:
    """`bf16` and `fp16`: where one is true, or left to the machine."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        if show(raw).lower() in ("true", "full"):
            draft.take(key, "torch_dtype", dtype)
        else:
            draft.same(key, "--torch_dtype is the precision, by default that of the machine")

    return rule


def take_targets(draft: Draft, key: str, raw: Any) -> None:
    """`lora_target_modules`: for PEFT a list has names, and a text with other characters is a regular expression."""
    is_regex = isinstance(raw, str) and re.search(r"[^\w.\s-]", raw)
    draft.take(key, "target_regex" if is_regex else "target_modules", raw)


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

RULES: dict[str, Rule] = {
    **QUANTISATION,
    "model_name_or_path": Renamed("model"),
    "teacher_model_name_or_path": Renamed("teacher_model"),
    "reward_model_name_or_path": Renamed("reward_model"),
    "dataset_name": Renamed("dataset"),
    "dataset_config": _subset,
    "dataset_configs": _subset,
    "dataset_train_split": take_split,
    "dataset_test_split": lost("evaluation rows are --val_dataset or --split_dataset_ratio"),
    "dataset_streaming": Renamed("streaming"),
    "datasets": _mixture,
    "dataset_mixture": _mixture,
    "use_peft": Renamed("tuner_type", {"true": "lora", "false": "full"}),
    "lora_r": Renamed("lora_rank"),
    "lora_target_modules": take_targets,
    "lora_modules_to_save": Renamed("modules_to_save"),
    "lora_task_type": same("the task follows from the method"),
    "use_bnb_nested_quant": Renamed("bnb_4bit_use_double_quant"),
    "torch_dtype": Renamed("torch_dtype", {"auto": "none"}),
    "dtype": Renamed("torch_dtype", {"auto": "none"}),
    "bf16": take_precision("bfloat16"),
    "fp16": take_precision("float16"),
    "max_prompt_length": _prompt_limit,
    "top_k": Renamed("top_k", {"0": "-1"}),
    "vllm_max_model_length": Renamed("vllm_max_model_len"),
    "model_init_kwargs": _model_settings,
    "do_train": same("a run trains", "true"),
    "do_eval": same("evaluation follows from --val_dataset and --split_dataset_ratio"),
    "logging_strategy": same("a line every --logging_steps", "steps"),
    "overwrite_output_dir": same("each run has a folder of its own"),
    "num_processes": variable("NPROC_PER_NODE"),
    "log_level": same("`swift` has one level"),
    "num_completions_to_print": lost("completions.jsonl in the run's folder has all"),
    "env": lambda draft, key, raw: [draft.export(key, name, value) for name, value in raw.items()],  # type: ignore
}

TRAINER: dict[str, Any] = {
    "weight_decay": 0.0, "adam_beta2": 0.999, "use_hf": True, "gradient_accumulation_steps": 1,
}  # fmt: skip
"""What transformers' trainer, and the hub, are to TRL and Axolotl."""

_METHODS: dict[str, dict[str, Any]] = {
    "rlhf": {"learning_rate": 1e-6, "temperature": 1.0, "beta": 0.0, "loss_type": "dapo"},
    "sft": {"learning_rate": 2e-5, "max_length": 1024, "router_aux_loss_coef": None},
    "gkd": {"learning_rate": 2e-5, "max_length": 1024},
    "rm": {"learning_rate": 1e-4, "max_length": 1024},
    **{name: {"learning_rate": 1e-6, "max_length": 1024} for name in ("dpo", "kto", "orpo", "cpo")},
}


SAMPLING: dict[str, dict[str, Any]] = {
    "use_vllm": {"rollout_importance_sampling_mode": "sequence_mask", "rollout_importance_sampling_threshold": 3.0},
    "beta": {"kl_bias_correction": True},
}
"""Settings -> what TRL's GRPO does beside them."""
_BESIDE = {**SAMPLING, "quant_method": {"bnb_4bit_use_double_quant": False}}


def data_order(given: Mapping[str, Any]) -> dict[str, Any]:
    """`seed` decides the order of rows too."""
    return {"data_seed": given["seed"]} if "seed" in given else {}


def defaults(mode: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL uses where a configuration is silent; `given`: our settings, made of what it says."""
    tuner = {"tuner_type": "full", "lora_rank": 16, "lora_dropout": 0.05}
    common = {"lr_scheduler_type": "linear", "per_device_train_batch_size": 8, "logging_steps": 10}
    beside = [more for name, more in _BESIDE.items() if given.get(name)]
    method = {**_METHODS.get(mode, {}), **data_order(given)}
    return {**TRAINER, **tuner, **common, "eval_strategy": "no", **method, **dict(ChainMap(*beside))}
