"""Configurations of Axolotl: one YAML, whose blocks `trl` and `vllm` are flattened to `trl.<key>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swift.arguments.imports import trl
from swift.arguments.imports.axolotl_data import chat_template, datasets, end_of_turn
from swift.arguments.imports.draft import (
    Draft,
    Renamed,
    Rule,
    known_mode,
    lost,
    refused,
    same,
    text_of,
    variable,
    where_true,
)
from swift.arguments.plugins import settings_class
from swift.arguments.values import Raw, show
from swift.flags import spellings_of

BLOCKS = ("trl", "vllm")


def mode_of(config: Mapping[str, Raw]) -> str:
    """The method that a configuration asks for."""
    for key, method in (("reward_model", "rm"), ("process_reward_model", "prm"), ("gkd_trainer", "gkd")):
        if _is_true(config.get(key)):
            return known_mode(method, key)
    if not config.get("rl"):
        return "pt" if config.get("pretraining_dataset") else "sft"
    method = show(config["rl"])
    if method == "ebft" and config.get("ebft_mode") == "strided":
        return "ebft_strided"
    return "rlhf" if method == "gdpo" else known_mode(method, "rl")


def flattened(config: Mapping[str, Raw]) -> Iterator[tuple[str, Raw]]:
    """The keys, those of a block with the block's name in front."""
    for key, raw in config.items():
        if key in BLOCKS and isinstance(raw, dict):
            yield from ((f"{key}.{name}", value) for name, value in raw.items())
        else:
            yield key, raw


def _is_true(raw: Any) -> bool:
    return show(text_of(raw)).lower() == "true"


def _number(raw: Any) -> float:
    """A number of a configuration, 0 where there is none."""
    text = show(text_of(raw))
    return float(text) if re.fullmatch(r"\d+\.?\d*(e-?\d+)?", text) else 0.0


def _share_of_rows(draft: Draft, key: str, raw: Any) -> None:
    """`val_set_size`: a share, or a number of rows."""
    if re.fullmatch(r"[1-9]\d*(\.0*)?", str(raw)):
        draft.lose(key, f"{raw} rows: --split_dataset_ratio is a share; or give --val_dataset")
    else:
        draft.take(key, "split_dataset_ratio", raw)


def _evaluates(config: Mapping[str, Any]) -> bool:
    return bool(_number(config.get("val_set_size")) or config.get("test_datasets"))


def _times_per_epoch(name: str) -> Rule:
    """`saves_per_epoch`, `evals_per_epoch`: a share of all steps, as Axolotl computes it."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        times = _number(raw) * (_number(draft.config.get("num_epochs")) or 1.0)
        if name == "eval" and not _evaluates(draft.config):
            draft.same(key, "there are no rows to evaluate on")
        elif not times:
            draft.same(key, f"{raw} changes nothing")
        elif times <= 1:
            draft.take(key, f"{name}_strategy", "epoch" if name == "save" else "no")
        else:
            draft.take(key, f"{name}_strategy", "steps")
            draft.take(key, f"{name}_steps", f"{1 / times:.6g}")

    return rule


def _batch_size(draft: Draft, key: str, raw: Any) -> None:
    """`batch_size`: of a process and an optimizer step, where there is no `gradient_accumulation_steps`."""
    if draft.config.get("gradient_accumulation_steps"):
        draft.same(key, "gradient_accumulation_steps has precedence")
    else:
        steps = int(_number(raw) // (_number(draft.config.get("micro_batch_size")) or 1))
        draft.take(key, "gradient_accumulation_steps", max(steps, 1))


def _max_length(draft: Draft, key: str, raw: Any) -> None:
    """`sequence_len`: prompts have no limit in their GRPO."""
    if draft.mode == "rlhf":
        draft.same(key, "limits no prompt in GRPO")
    else:
        draft.take(key, "max_length", raw)


def _too_long(draft: Draft, key: str, raw: Any) -> None:
    if raw == "drop" and draft.mode != "rlhf":
        draft.same(key, "rows over the limit are left out")
    else:
        draft.lose(key, f"{raw}: rows over the limit are left out")


def _train_on_inputs(draft: Draft, key: str, raw: Any) -> None:
    if not _is_true(raw):
        draft.same(key, "the loss counts answers")
    else:
        draft.take(key, "loss_scale", "all")


def _warmup(draft: Draft, key: str, raw: Any) -> None:
    """`warmup_steps`: below 1 a share of all steps."""
    draft.take(key, "warmup_ratio" if 0 < _number(raw) < 1 else "warmup_steps", raw)


def _schedule(draft: Draft, key: str, raw: Any) -> None:
    if raw == "cosine" and _number(draft.config.get("cosine_min_lr_ratio")):
        draft.same(key, "see cosine_min_lr_ratio")
    else:
        draft.take(key, "lr_scheduler_type", raw)


def _least_rate(draft: Draft, key: str, raw: Any) -> None:
    """`cosine_min_lr_ratio`: of the peak rate, to which a cosine falls."""
    if _number(draft.config.get("cosine_constant_lr_ratio")):
        draft.lose(key, f"{raw}: with cosine_constant_lr_ratio no schedule here")
    elif draft.config.get("lr_scheduler", "cosine") == "cosine" and _number(raw):
        draft.take(key, "lr_scheduler_type", "cosine_with_min_lr")
        draft.take(key, "lr_scheduler_kwargs", {"min_lr_rate": _number(raw)})
    else:
        draft.same(key, "is of the cosine schedule")


def _precision(dtype: str) -> Rule:
    """`bf16`, `fp16` and others: where one is true; without any, float32."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        others = [one for one in ("bf16", "fp16", "bfloat16", "float16") if one != key]
        if _is_true(raw) or raw == "full":
            draft.take(key, "torch_dtype", dtype)
        elif raw == "auto":
            draft.same(key, "the machine decides")
        elif key != "bf16" or any(draft.config.get(one) and _is_true(draft.config[one]) for one in others):
            draft.same(key, "false changes nothing here")
        else:
            draft.take(key, "torch_dtype", "float32")

    return rule


def _attention(draft: Draft, key: str, raw: Any) -> None:
    """A kernel, by its name; others compute the same attention."""
    if raw in ("flash_attention_2", "sdpa", "flex_attention", "eager"):
        draft.take(key, "attn_impl", raw)
    elif raw in ("sage", "fp8"):
        draft.lose(key, f"{raw}: 8-bit attention; --attn_impl sdpa computes it in the model's precision")
    else:
        draft.same(key, f"{raw}: another kernel of the same attention; --attn_impl chooses one")


def _targets(draft: Draft, key: str, raw: Any) -> None:
    if _is_true(draft.config.get("lora_target_linear")):
        draft.same(key, "lora_target_linear has them all")
    else:
        trl.take_targets(draft, key, raw)


def _adapter(draft: Draft, key: str, raw: Any) -> None:
    if raw not in ("lora", "qlora"):
        refused("lora and qlora are the adapters that can be imported")(draft, key, raw)
    draft.take(key, "tuner_type", "lora")


def _unfrozen(draft: Draft, key: str, raw: Any) -> None:
    """Expressions of the parameters to train, whose points are no wildcards."""
    words = [raw] if isinstance(raw, str) else list(raw)
    if any(re.search(r"\[\d*:\d*\]$", one) for one in words):
        draft.lose(key, f"{' '.join(words)}: rows of a parameter cannot be frozen")
        return
    draft.take(key, "freeze_parameters_ratio", "1.0")
    draft.take(key, "trainable_parameters_regex", "|".join(one.replace(".", r"\.") for one in words))


def _special_tokens(draft: Draft, key: str, raw: Any) -> None:
    """Padding carries no loss; other tokens decide what a row contains."""
    for name, token in raw.items() if isinstance(raw, dict) else [("added", raw)]:
        if name == "pad_token":
            draft.same(key, "pad_token: padding carries no loss")
        else:
            draft.lose(key, f"{name}: {show(text_of(token))}: the tokenizer's own special tokens are used")


def _plugins(draft: Draft, key: str, raw: Any) -> None:
    for path in raw if isinstance(raw, list) else [raw]:
        integration = "".join(str(path).split(".")[2:3])
        if integration in ("cut_cross_entropy", "kernels", "liger"):
            draft.same(key, f"{integration}: changes speed and memory alone")
        elif integration == "swanlab":
            draft.take(key, "report_to", "swanlab")
        elif integration in ("diffusion", "llm_compressor", "kd", "grokfast", "hatchery", "spectrum", "densemixer"):
            refused("trains in another way, which swift does not")(draft, key, path)
        else:
            draft.lose(key, f"{path}: integrations are flags, or --external_plugins")


def _deepspeed(draft: Draft, key: str, raw: Any) -> None:
    """A file of Axolotl's, by its name; another file as it is."""
    stage = re.match(r"zero([123])", Path(str(raw)).name)
    offload = "_offload" if "offload" in str(raw) else ""
    draft.take(key, "deepspeed", f"zero{stage[1]}{offload}" if stage and not Path(str(raw)).exists() else raw)


def _fsdp(draft: Draft, key: str, raw: Any) -> None:
    words = raw if isinstance(raw, list) else str(raw).split()
    draft.take(key, "fsdp", next((one for one in words if one in ("full_shard", "shard_grad_op")), words[0]))


def _fsdp_config(draft: Draft, key: str, raw: Any) -> None:
    """A line for each key; whatever is sharded, the gradients are the same."""
    for given, value in raw.items() if isinstance(raw, dict) else ():
        name, on, place = given.removeprefix("fsdp_"), _is_true(value), f"{key}.{given}"
        if name == "offload_params" and on:
            draft.lose(place, "true: parameters stay on their device; see --offload_model, --offload_optimizer")
        elif name == "activation_checkpointing" and on:
            draft.take(place, "gradient_checkpointing", "true")
        elif name == "reshard_after_forward":
            draft.take(place, "fsdp", "full_shard" if on else "shard_grad_op")
        elif name == "sharding_strategy" and str(value) in ("NO_SHARD", "HYBRID_SHARD"):
            draft.lose(place, f"{value}: --fsdp shards over all processes")
        else:
            draft.same(place, "layers are wrapped, and states saved, without settings")
    if "fsdp" not in draft.settings and "fsdp" not in draft.config:
        draft.take(key, "fsdp", "full_shard")


def _served(draft: Draft, key: str, raw: Any) -> None:
    """The block `vllm` sets up the server, which is a command of its own, or an engine beside the trainer."""
    name = key.rpartition(".")[2]
    block = draft.config.get("trl")
    if isinstance(block, dict) and block.get("vllm_mode") == "colocate" and f"vllm_{name}" in spellings_of(draft.cls):
        draft.take(key, f"vllm_{name}", raw)
        return
    flags = spellings_of(settings_class("rollout"))
    flag = next((one for one in (f"vllm_{name}", name) if one in flags), None)
    draft.lose(key, f"{raw}: of the server, swift rollout{f' --{flag}' if flag else ', which has no such flag'}")


def _tracker(draft: Draft, key: str, raw: Any) -> None:
    """`wandb_project`: a project switches the tracker on."""
    draft.export(key, "WANDB_PROJECT", raw)
    if str(draft.config.get("use_wandb")).lower() != "false":
        draft.take(key, "report_to", "wandb")


def _uploaded(draft: Draft, key: str, raw: Any) -> None:
    """`hub_model_id`: the model is uploaded there, to a private repository."""
    draft.take(key, "hub_model_id", raw)
    if "hub_model_id" in draft.settings:
        draft.take(key, "push_to_hub", "true")
        draft.take(key, "hub_private_repo", "true")


def _labels(draft: Draft, key: str, raw: Any) -> None:
    if str(raw) == "1" or draft.mode in ("rm", "prm"):
        draft.same(key, "follows from the method")
    elif "task_type" in spellings_of(draft.cls):
        draft.take(key, "task_type", "seq_cls")
        draft.take(key, "num_labels", raw)
    else:
        refused("classifiers cannot be trained")(draft, key, raw)


def _auto_class(draft: Draft, key: str, raw: Any) -> None:
    if "ImageTextToText" in str(raw):
        refused(_MULTIMODAL)(draft, key, raw)
    draft.same(key, "read from config.json")


def _sizes(draft: Draft, key: str, raw: Any) -> None:
    if str(raw) == "1":
        draft.same(key, "1 changes nothing")
    else:
        draft.lose(key, f"{raw}: processes share rows, --deepspeed and --fsdp the model; so a batch has more rows")


def _router_loss(draft: Draft, key: str, raw: Any) -> None:
    """`model_config`: changes of config.json, of which the load-balancing loss is a setting here."""
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if name == "output_router_logits" and _is_true(value) and "router_aux_loss_coef" in spellings_of(draft.cls):
            draft.take(f"{key}.{name}", "router_aux_loss_coef", None)
        else:
            draft.lose(f"{key}.{name}", f"{show(text_of(value))}: config.json stays as it is; change it there")


def _bits(draft: Draft, key: str, raw: Any) -> None:
    draft.translate([(name, value) for name, value in raw.items()] if isinstance(raw, dict) else [], {})
    draft.same(key, "see its keys")


def _speed(names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), same("changes speed and memory alone"))


_MULTIMODAL = "images and sound are not supported; a text run would be another one"

RULES: dict[str, Rule] = {
    **trl.QUANTISATION,
    **{f"trl.{key}": rule for key, rule in trl.RULES.items()},
    **{f"vllm.{key}": _served for key in (
        "host", "port", "gpu_memory_utilization", "dtype", "max_model_len", "tensor_parallel_size", "enforce_eager",
        "data_parallel_size", "enable_prefix_caching", "device", "enable_reasoning", "reasoning_parser", "serve_module",
        "worker_extension_cls",
    )},
    **_speed(
        "pad_to_sequence_len pad_to_multiple_of remove_unused_columns ddp ddp_bucket_cap_mb ddp_broadcast_buffers "
        "low_cpu_mem_usage device gc_steps gc_collect_steps torch_empty_cache_steps tiled_mlp use_kernels "
        "experimental_skip_move_to_device lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
        "flex_attn_compile_kwargs flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum "
        "fused_attn_kernel gemma4_hybrid_attn_impl cut_cross_entropy chunked_cross_entropy experts_implementation "
        "use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels dsv4_fp4_grouped_mode "
        "llama4_linearized_experts liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm "
        "liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy dataloader_num_workers "
        "dataloader_pin_memory dataloader_prefetch_factor streaming_multipack_buffer_size eval_sample_packing "
        "sample_packing_bin_size sample_packing_group_size sample_packing_eff_est total_num_tokens lora_on_cpu "
        "dataset_keep_in_memory accelerator_config torchdistx_path ddp_find_unused_parameters dpo_use_liger_kernel "
        "tokenizer_use_fast flash_attention_version layer_offloading qlora_sharded_model_loading use_ray "
        "ray_num_workers expert_parallel_num_nvl_bytes expert_parallel_token_capacity bnb_config_compute "
        "llama_flash_attention fp8_enable_fsdp_float8_all_gather relora_cpu_offload merge_method"
    ),
    "base_model": Renamed("model"),
    "revision_of_model": Renamed("model_revision"),
    **dict.fromkeys(("base_model_config", "tokenizer_config", "tokenizer_type", "base_model_ignore_patterns",
                     "cls_model_config", "tokenizer_legacy"), same("read from the model's folder")),
    "model_type": _auto_class,
    "num_labels": _labels,
    "special_tokens": _special_tokens,
    "tokens": _special_tokens,
    "eot_tokens": end_of_turn,
    "strict": same("weights must fit"),
    "rl": same("the method"),
    "reward_model": same("the method"),
    "process_reward_model": same("the method"),
    "gkd_trainer": same("the method"),
    "ebft_mode": same("the method"),
    "plugins": _plugins,
    "processor_type": refused(_MULTIMODAL),
    "image_size": refused(_MULTIMODAL),
    "qat": refused("quantisation-aware training is not supported"),
    "gptq": refused("bases in GPTQ are not supported; load_in_4bit quantises one while it is loaded", "false"),
    **dict.fromkeys(("gptq_groupsize", "gptq_model_v1", "gptq_disable_exllama"), same("of gptq")),
    "diffusion": refused("diffusion language models are not supported"),
    "llmcompressor": refused("training with a compression recipe is not supported"),
    "relora": refused("ReLoRA is not supported", "false"),
    **dict.fromkeys(("relora_prune_ratio", "relora_prune_method", "jagged_restart_steps", "jagged_restart_warmup_steps",
                     "jagged_restart_anneal_steps"), refused("restarts of the schedule are not supported")),
    "lisa_n_layers": lambda draft, key, raw: trl.needed(draft, key, "lisa_activated_layers", raw),
    "lisa_step_interval": lambda draft, key, raw: trl.needed(draft, key, "lisa_step_interval", raw),
    "lisa_layers_attribute": same("the layers are found"),
    "use_eaft": refused("entropy-weighted cross-entropy (EAFT) is not supported", "false"),
    "reinit_weights": refused("weights are read from the model, never drawn; save such a model first", "false"),
    "trainer_cls": refused("trainers of one's own cannot be imported"),
    "lora_target_parameters": trl.take_parameters,
    "quantize_moe_experts": lost("experts stay as they are in the files"),
    "datasets": datasets("dataset"),
    "pretraining_dataset": datasets("dataset"),
    "test_datasets": datasets("val_dataset"),
    "val_set_size": _share_of_rows,
    "dataset_prepared_path": same("rows are prepared at the start"),
    "dataset_processes": Renamed("dataset_num_proc"),
    "shuffle_merged_datasets": same("each epoch has a new order, as in their trainer"),
    "curriculum_sampling": Renamed("dataset_shuffle", {"true": "false", "false": "true"}),
    "skip_prepare_dataset": same("rows are read as they are"),
    "push_dataset_to_hub": lost("prepared rows stay here"),
    "hf_use_auth_token": same("HF_TOKEN is used"),
    "chat_template": chat_template,
    "chat_template_jinja": Renamed("template"),
    "default_system_message": Renamed("system"),
    "train_on_inputs": _train_on_inputs,
    "sequence_len": _max_length,
    "sample_packing": Renamed("packing"),
    "excess_length_strategy": _too_long,
    "adapter": _adapter,
    "lora_r": Renamed("lora_rank"),
    "lora_target_modules": _targets,
    "lora_target_linear": where_true(target_modules="all-linear"),
    "lora_modules_to_save": Renamed("modules_to_save"),
    "lora_model_dir": Renamed("adapters"),
    "lora_fan_in_fan_out": same("told by the layer"),
    "lora_rank_pattern": Renamed("rank_pattern"),
    "lora_alpha_pattern": Renamed("alpha_pattern"),
    "peft_use_dora": Renamed("use_dora"),
    "peft_use_rslora": Renamed("use_rslora"),
    "peft_init_lora_weights": Renamed("init_weights"),
    "bnb_config_kwargs": _bits,
    "micro_batch_size": Renamed("per_device_train_batch_size"),
    "eval_batch_size": Renamed("per_device_eval_batch_size"),
    "batch_size": _batch_size,
    "num_epochs": Renamed("num_train_epochs"),
    "optimizer": Renamed("optim"),
    "optim_args": lambda draft, key, raw: draft.take(
        key, "optim_args", ",".join(f"{a}={b}" for a, b in raw.items()) if isinstance(raw, dict) else raw
    ),
    "lr_scheduler": _schedule,
    "cosine_min_lr_ratio": _least_rate,
    "cosine_constant_lr_ratio": same("0 changes nothing", "0", "0.0"),
    "warmup_steps": _warmup,
    "bf16": _precision("bfloat16"),
    "fp16": _precision("float16"),
    "bfloat16": _precision("bfloat16"),
    "float16": _precision("float16"),
    "tf32": same("products of float32 keep their precision; those of 16 bits are the same", "false", "auto"),
    "attn_implementation": _attention,
    "flash_attention": where_true(attn_impl="flash_attn"),
    "sdp_attention": where_true(attn_impl="sdpa"),
    "flex_attention": where_true(attn_impl="flex_attention"),
    "eager_attention": where_true(attn_impl="eager"),
    "gradient_checkpointing": Renamed("gradient_checkpointing", {"unsloth": "true", "offload": "true"}),
    "activation_offloading": Renamed("activation_offloading", dict.fromkeys(("legacy", "disk"), "true")),
    "unfrozen_parameters": _unfrozen,
    "model_config": _router_loss,
    **dict.fromkeys(("context_parallel_size", "tensor_parallel_size", "expert_parallel_size"), _sizes),
    **dict.fromkeys(("dp_shard_size", "dp_replicate_size"), same("the processes are counted")),
    "deepspeed": _deepspeed,
    "fsdp": _fsdp,
    "fsdp_config": _fsdp_config,
    "fsdp_version": same("FSDP2 it is; the gradients are those of version 1"),
    "evals_per_epoch": _times_per_epoch("eval"),
    "saves_per_epoch": _times_per_epoch("save"),
    "loss_watchdog_threshold": same("a loss that is not finite ends the run"),
    "loss_watchdog_patience": same("a loss that is not finite ends the run"),
    "use_wandb": where_true(report_to="wandb"),
    "use_swanlab": where_true(report_to="swanlab"),
    "use_tensorboard": where_true(report_to="tensorboard"),
    "wandb_project": _tracker,
    "wandb_entity": variable("WANDB_ENTITY"),
    "wandb_name": Renamed("run_name"),
    "swanlab_experiment_name": Renamed("run_name"),
    "hub_model_id": _uploaded,
    "early_stopping_patience": Renamed("early_stop_interval"),
    "rl_beta": Renamed("beta"),
    "orpo_alpha": Renamed("beta"),
    "dpo_loss_type": Renamed("loss_type"),
    "dpo_loss_weights": Renamed("loss_weights"),
    "dpo_use_weighting": Renamed("use_weighting"),
    "dpo_padding_free": Renamed("padding_free"),
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

DEFAULTS: dict[str, Any] = {
    **trl.TRAINER,
    "num_train_epochs": 1.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03, "per_device_train_batch_size": 1,
    "max_length": 512, "gradient_checkpointing": False, "tuner_type": "full", "lora_dropout": 0.0, "packing": False,
    "split_dataset_ratio": 0.0, "eval_strategy": "no", "save_strategy": "epoch", "save_total_limit": 4,
    "router_aux_loss_coef": 0.0,
}  # fmt: skip
"""What its schemas, and the transformers below them, use."""

CAVEATS = {"warmup_ratio": ", but for at most 100 steps: give --warmup_steps 100 to a run of more than 3,333 steps"}
"""Settings whose default is another in some runs."""


def defaults(mode: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What Axolotl uses where a configuration is silent; `config`: its keys, `given`: our settings, made of them."""
    values = {**DEFAULTS, **trl.METHODS.get(mode, {})}
    values["per_device_eval_batch_size"] = given.get("per_device_train_batch_size", 1)
    values |= {"multi_objective_aggregation": "normalize_then_sum"} if config.get("rl") == "gdpo" else {}
    values = trl.beside(values, given)
    for name in ("learning_rate", "lora_rank", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_server_timeout"):
        values.pop(name, None)  # must be given there, or is that of the server
    values["max_length"] = DEFAULTS["max_length"]
    if mode == "rlhf":
        del values["max_length"]
    if "warmup_steps" in given:
        values.pop("warmup_ratio")
    if config.get("pretraining_dataset"):
        values |= {"packing": True, "packing_strategy": "wrapped"}
    if "eval_strategy" in given or config.get("eval_steps"):
        values["eval_on_start"] = given.get("eval_strategy") != "no"
    if config.get("eval_steps"):
        values["eval_strategy"] = "steps"
    if config.get("save_steps"):
        values["save_strategy"] = "steps"
    if given.get("quant_method"):
        values["bnb_4bit_use_double_quant"] = True
    return values
