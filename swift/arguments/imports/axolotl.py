"""Configurations of Axolotl: one YAML, whose blocks `trl` and `vllm` are flattened to `trl.<key>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swift.arguments.imports import trl
from swift.arguments.imports.draft import (
    Draft,
    Renamed,
    Rule,
    known_mode,
    lost,
    same,
    shown,
    text_of,
    variable,
    where_true,
)
from swift.arguments.plugins import settings_class
from swift.arguments.values import Raw, show
from swift.flags import spellings_of

BLOCKS = ("trl", "vllm")

ROW_TYPES = (
    "alpaca", "chat_template", "sharegpt", "completion", "chatml", "llama3", "zephyr", "bradley_terry",
    "stepwise_supervised", "input_output", "oasst", "gpteacher", "reflection", "context_qa", "summarizetldr",
)  # fmt: skip
"""Prompt strategies whose rows are recognised here by their columns."""

COLUMNS = {
    "field_messages": "messages", "field_instruction": "instruction", "field_input": "input", "field_output": "output",
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected", "field_completion": "completion",
    "field_label": "label", "field_tools": "tools", "field_system": "system", "field": "text",
}  # fmt: skip
_CONVERSATIONS = ("conversations", "messages")


def mode_of(config: Mapping[str, Raw]) -> str:
    """The method that a configuration asks for."""
    for key, method in (("reward_model", "rm"), ("process_reward_model", "prm"), ("gkd_trainer", "gkd")):
        if show(config.get(key)).lower() == "true":
            return known_mode(method, key)
    return known_mode(show(config["rl"]), "rl") if config.get("rl") else "sft"


def flattened(config: Mapping[str, Raw]) -> Iterator[tuple[str, Raw]]:
    """The keys, those of a block with the block's name in front."""
    for key, raw in config.items():
        if key in BLOCKS and isinstance(raw, dict):
            yield from ((f"{key}.{name}", value) for name, value in raw.items())
        else:
            yield key, raw


def _datasets(name: str) -> Rule:
    """A list of datasets: paths with their subsets, the type of their rows, and the names of columns."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        entries = raw if isinstance(raw, list) else [raw]
        if not all(isinstance(one, dict) and one.get("path") for one in entries):
            draft.lose(key, "not a list of maps with `path`")
            return
        paths = [f"{one['path']}{':' + one['name'] if one.get('name') else ''}" for one in entries]
        columns: dict[str, str] = {}
        for index, one in enumerate(entries):
            for part, value in one.items():
                _take_part(draft, f"{key}[{index}].{part}", part, value, columns)
        draft.take(key, name, paths)
        if columns:
            draft.take(f"{key}: field_*", "columns", columns)

    return rule


def _take_part(draft: Draft, place: str, part: str, value: Any, columns: dict[str, str]) -> None:
    if value in (None, "", {}, []) or part in ("path", "name", "ds_type"):
        return
    if part in COLUMNS:
        if value != COLUMNS[part] and value not in _CONVERSATIONS:
            columns[value] = COLUMNS[part]
    elif part == "split":
        trl.take_split(draft, place, value)
    elif part == "type" and isinstance(value, str) and value.split(".")[0].split(":")[0] in ROW_TYPES:
        draft.same(place, "rows are recognised by their columns")
    elif part == "type":
        draft.lose(place, "rows made by a function or a format; save the rows that it makes to a file")
    elif part in ("message_property_mappings", "roles", "roles_to_train"):
        draft.same(place, "role and content, from and value, and the usual names of roles are recognised")
    else:
        draft.lose(place, f"{shown(part, value)}: datasets have no such setting here")


def _share_of_rows(draft: Draft, key: str, raw: Any) -> None:
    """`val_set_size`: a share, or a number of rows."""
    if re.fullmatch(r"[1-9]\d*(\.0*)?", str(raw)):
        draft.lose(key, f"{raw} rows: --split_dataset_ratio is a share; or give --val_dataset")
    else:
        draft.take(key, "split_dataset_ratio", raw)


def _times_per_epoch(name: str) -> Rule:
    """`saves_per_epoch`, `evals_per_epoch`: once per epoch is a strategy of ours."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        if str(raw) == "1":
            draft.take(key, f"{name}_strategy", "epoch")
        else:
            draft.lose(key, f"{raw}: give --{name}_steps, in optimizer steps")

    return rule


def _deepspeed(draft: Draft, key: str, raw: Any) -> None:
    """A file of Axolotl's, by its name; another file as it is."""
    stage = re.match(r"zero([123])", Path(str(raw)).name)
    offload = "_offload" if "offload" in str(raw) else ""
    draft.take(key, "deepspeed", f"zero{stage[1]}{offload}" if stage and not Path(str(raw)).exists() else raw)


def _fsdp(draft: Draft, key: str, raw: Any) -> None:
    words = raw if isinstance(raw, list) else str(raw).split()
    draft.take(key, "fsdp", next((one for one in words if one in ("full_shard", "shard_grad_op")), words[0]))


def _fsdp_config(draft: Draft, key: str, raw: Any) -> None:
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if name.endswith("offload_params") and show(text_of(value)) == "true":
            draft.lose(f"{key}.{name}", "parameters stay on their device; see --offload_model, --offload_optimizer")
    draft.same(key, "layers are wrapped, and states saved, without settings")
    if "fsdp" not in draft.settings:
        draft.take(key, "fsdp", "full_shard")


def _chat_template(draft: Draft, key: str, raw: Any) -> None:
    from swift.models.templates import names

    if str(raw).startswith("tokenizer_default"):
        draft.same(key, "the tokenizer's own template is used")
    elif raw in names():
        draft.take(key, "template", raw)
    else:
        draft.lose(key, f"{raw}: the tokenizer's own is used; --template: one of TRL's names, or a Jinja file")


def _served(draft: Draft, key: str, raw: Any) -> None:
    """The block `vllm` sets up the server, which is a command of its own."""
    name = key.rpartition(".")[2]
    flags = spellings_of(settings_class("rollout"))
    flag = next((one for one in (f"vllm_{name}", name) if one in flags), None)
    draft.lose(key, f"{raw}: of the server, swift rollout{f' --{flag}' if flag else ', which has no such flag'}")


RULES: dict[str, Rule] = {
    **trl.QUANTISATION,
    **{f"trl.{key}": rule for key, rule in trl.RULES.items()},
    **{f"vllm.{key}": _served for key in (
        "host", "port", "gpu_memory_utilization", "dtype", "max_model_len", "tensor_parallel_size",
        "data_parallel_size", "enable_prefix_caching", "device", "enable_reasoning", "reasoning_parser", "serve_module",
    )},
    "base_model": Renamed("model"),
    "revision_of_model": Renamed("model_revision"),
    "base_model_config": same("read from the model's folder"),
    "tokenizer_config": same("read from the model's folder"),
    "model_type": same("read from config.json"),
    "tokenizer_type": same("read from the model's folder"),
    "num_labels": same("follows from the method"),
    "special_tokens": lost("the tokenizer's own special tokens are used"),
    "strict": same("weights must fit"),
    "rl": same("the method"),
    "reward_model": same("the method"),
    "process_reward_model": same("the method"),
    "gkd_trainer": same("the method"),
    "plugins": lost("integrations are flags, or --external_plugins"),
    "datasets": _datasets("dataset"),
    "test_datasets": _datasets("val_dataset"),
    "val_set_size": _share_of_rows,
    "dataset_prepared_path": same("rows are prepared at the start"),
    "dataset_processes": Renamed("dataset_num_proc"),
    "shuffle_merged_datasets": Renamed("dataset_shuffle"),
    "skip_prepare_dataset": same("rows are read as they are"),
    "chat_template": _chat_template,
    "default_system_message": Renamed("system"),
    "train_on_inputs": same("the loss counts answers", "false"),
    "sequence_len": Renamed("max_length"),
    "sample_packing": Renamed("packing"),
    "eval_sample_packing": same("as --packing"),
    "pad_to_sequence_len": same("changes speed alone"),
    "excess_length_strategy": Renamed("truncation_strategy", {"drop": "delete", "truncate": "right"}),
    "adapter": Renamed("tuner_type", {"qlora": "lora"}),
    "lora_r": Renamed("lora_rank"),
    "lora_target_modules": trl.take_targets,
    "lora_target_linear": where_true(target_modules="all-linear"),
    "lora_modules_to_save": Renamed("modules_to_save"),
    "lora_model_dir": Renamed("adapters"),
    "peft_use_dora": Renamed("use_dora"),
    "peft_use_rslora": Renamed("use_rslora"),
    "micro_batch_size": Renamed("per_device_train_batch_size"),
    "eval_batch_size": Renamed("per_device_eval_batch_size"),
    "num_epochs": Renamed("num_train_epochs"),
    "optimizer": Renamed("optim"),
    "lr_scheduler": Renamed("lr_scheduler_type"),
    "bf16": trl.take_precision("bfloat16"),
    "fp16": trl.take_precision("float16"),
    "bfloat16": trl.take_precision("bfloat16"),
    "flash_attention": where_true(attn_impl="flash_attn"),
    "sdp_attention": where_true(attn_impl="sdpa"),
    "flex_attention": where_true(attn_impl="flex_attention"),
    "eager_attention": where_true(attn_impl="eager"),
    "gradient_checkpointing": Renamed("gradient_checkpointing", {"unsloth": "true", "offload": "true"}),
    "deepspeed": _deepspeed,
    "fsdp": _fsdp,
    "fsdp_config": _fsdp_config,
    "evals_per_epoch": _times_per_epoch("eval"),
    "saves_per_epoch": _times_per_epoch("save"),
    "loss_watchdog_threshold": same("a loss that is not finite ends the run"),
    "loss_watchdog_patience": same("a loss that is not finite ends the run"),
    "use_wandb": where_true(report_to="wandb"),
    "wandb_project": variable("WANDB_PROJECT"),
    "wandb_entity": variable("WANDB_ENTITY"),
    "wandb_name": Renamed("run_name"),
    "early_stopping_patience": Renamed("early_stop_interval"),
    "rl_beta": Renamed("beta"),
    "dpo_label_smoothing": Renamed("label_smoothing"),
    "kto_desirable_weight": Renamed("desirable_weight"),
    "kto_undesirable_weight": Renamed("undesirable_weight"),
    "gkd_teacher": Renamed("teacher_model"),
    "gkd_lmbda": Renamed("lmbda"),
    "gkd_beta": Renamed("beta"),
    "gkd_temperature": Renamed("temperature"),
    "gkd_max_new_tokens": Renamed("max_completion_length"),
    "gkd_seq_kd": Renamed("seq_kd"),
}  # fmt: skip


def defaults(mode: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What Axolotl uses where a configuration is silent; see `trl.defaults`."""
    sampling = {"temperature": 1.0, "beta": 0.0, "loss_type": "dapo"} if mode == "rlhf" else {}
    for name, more in trl.SAMPLING.items():
        sampling |= more if given.get(name) else {}
    return {**trl.TRAINER, **trl.data_order(given), "tuner_type": "full", "lora_dropout": 0.0, **sampling}
