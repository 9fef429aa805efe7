"""Configurations of Axolotl: one YAML, whose blocks `trl` and `vllm` are flattened to `trl.<key>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from swift.arguments.imports import axolotl_keys as keys
from swift.arguments.imports import trl
from swift.arguments.imports.axolotl_data import chat_template, datasets, end_of_turn
from swift.arguments.imports.axolotl_prompts import has_texts
from swift.arguments.imports.draft import (
    Renamed,
    Rule,
    known_mode,
    lost,
    refused,
    same,
    variable,
    where_true,
)
from swift.arguments.values import Raw, show

BLOCKS = ("trl", "vllm")
MASKED_SEEING = (
    "qwen2_vl", "qwen3_5", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama3_2_vision", "llama4", "pixtral",
    "mistral_v7_tekken",
)  # fmt: skip
"""Chat templates of models with images with which Axolotl trains on the assistant's turns alone."""


_OF_TOWERS = re.compile("vis|projector|merger|connector|adapter")
"""In a regular expression of modules: beside the language model it has others."""


def mode_of(config: Mapping[str, Raw]) -> str:
    """The method that a configuration asks for."""
    for key, method in (("reward_model", "rm"), ("process_reward_model", "prm"), ("gkd_trainer", "gkd")):
        if keys.is_true(config.get(key)):
            return known_mode(method, key)
    if not config.get("rl"):
        return "pt" if config.get("pretraining_dataset") or has_texts(config) else "sft"
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


RULES: dict[str, Rule] = {
    **trl.QUANTISATION,
    **{f"trl.{key}": rule for key, rule in trl.RULES.items()},
    "trl.scale_rewards": keys.scaled_rewards,
    **{f"trl.{key}": keys.of_the_ratio for key in ("epsilon", "epsilon_high", "delta", "importance_sampling_level")},
    **{f"vllm.{key}": keys.served for key in (
        "host", "port", "gpu_memory_utilization", "dtype", "max_model_len", "tensor_parallel_size", "enforce_eager",
        "data_parallel_size", "enable_prefix_caching", "device", "enable_reasoning", "reasoning_parser", "serve_module",
        "worker_extension_cls",
    )},
    **keys.speed(
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
        "tokenizer_use_fast flash_attention_version qlora_sharded_model_loading use_ray "
        "ray_num_workers expert_parallel_num_nvl_bytes expert_parallel_backend bnb_config_compute "
        "llama_flash_attention fp8_enable_fsdp_float8_all_gather relora_cpu_offload merge_method"
    ),
    "base_model": Renamed("model"),
    "revision_of_model": Renamed("model_revision"),
    **dict.fromkeys(("base_model_config", "tokenizer_config", "tokenizer_type", "base_model_ignore_patterns",
                     "cls_model_config", "tokenizer_legacy"), same("read from the model's folder")),
    **keys.logs(
        "swanlab_description swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer "
        "swanlab_log_model use_otel_metrics otel_metrics_host otel_metrics_port wandb_watch wandb_log_model "
        "eval_table_size trl.num_completions_to_print"
    ),
    **keys.unknown_there("eta_min adam_eps test_value context_parapllel_size sample_packing_seq_len_multiplier"),
    "model_type": keys.auto_class,
    "num_labels": keys.labels,
    "special_tokens": keys.special_tokens,
    "tokens": keys.special_tokens,
    "eot_tokens": end_of_turn,
    "strict": same("weights must fit"),
    "rl": same("the method"),
    "reward_model": same("the method"),
    "process_reward_model": same("the method"),
    "gkd_trainer": same("the method"),
    "ebft_mode": same("the method"),
    "plugins": keys.plugins,
    "processor_type": keys.processor,
    "image_size": lost("images have the size of the model's processor, and at most --max_pixels"),
    "freeze_mm_modules": where_true(freeze_vit="true", freeze_aligner="true"),
    "tokenizer_use_mistral_common": keys.mistral_common,
    "resize_token_embeddings_to_32x": same("the embedding has a row for each token, and gets none that no token has"),
    "model_quantization_config": keys.packed_files,
    "model_quantization_config_kwargs": same("see model_quantization_config"),
    "auto_resume_from_checkpoints": same("a run starts anew; --resume_from_checkpoint last goes on with the newest"),
    "device_map": same("each process has a device; --fsdp or --deepspeed shards a model over several"),
    "pretrain_multipack_attn": same("packed rows do not attend to each other", "true"),
    "expert_parallel_token_capacity": lost("all experts that a router chooses are computed"),
    "expert_parallel_size": same("each process has rows of its own, and all experts; --fsdp shards them"),
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
    "quantize_moe_experts": keys.packed_experts,
    "datasets": datasets("dataset"),
    "pretraining_dataset": datasets("dataset"),
    "test_datasets": datasets("val_dataset"),
    "val_set_size": keys.share_of_rows,
    "dataset_prepared_path": same("rows are prepared at the start"),
    "dataset_processes": Renamed("dataset_num_proc"),
    "shuffle_merged_datasets": same("each epoch has a new order, as in their trainer"),
    "curriculum_sampling": Renamed("dataset_shuffle", {"true": "false", "false": "true"}),
    "dataset_exact_deduplication": Renamed("drop_duplicates"),
    "min_sample_len": Renamed("min_length"),
    "skip_prepare_dataset": same("rows are read as they are"),
    "push_dataset_to_hub": lost("prepared rows stay here"),
    "hf_use_auth_token": same("HF_TOKEN is used"),
    "chat_template": chat_template,
    "chat_template_jinja": Renamed("template"),
    "default_system_message": Renamed("system"),
    "train_on_inputs": keys.train_on_inputs,
    "sequence_len": keys.max_length,
    "sample_packing": Renamed("packing"),
    "excess_length_strategy": keys.too_long,
    "adapter": keys.adapter,
    "lora_r": Renamed("lora_rank"),
    "lora_target_modules": keys.targets,
    "lora_target_linear": where_true(target_modules="all-linear"),
    "lora_modules_to_save": Renamed("modules_to_save"),
    "lora_model_dir": Renamed("adapters"),
    "lora_fan_in_fan_out": same("told by the layer"),
    "lora_rank_pattern": Renamed("rank_pattern"),
    "lora_alpha_pattern": Renamed("alpha_pattern"),
    "peft_use_dora": Renamed("use_dora"),
    "peft_use_rslora": Renamed("use_rslora"),
    "peft_init_lora_weights": Renamed("init_weights"),
    "loraplus_lr_embedding": lost("adapters on embeddings have the learning rate of matrices A"),
    "bnb_config_kwargs": keys.bits,
    "micro_batch_size": Renamed("per_device_train_batch_size"),
    "eval_batch_size": Renamed("per_device_eval_batch_size"),
    "batch_size": keys.batch_size,
    "num_epochs": Renamed("num_train_epochs"),
    "optimizer": Renamed("optim"),
    "optim_args": lambda draft, key, raw: draft.take(
        key, "optim_args", ",".join(f"{a}={b}" for a, b in raw.items()) if isinstance(raw, dict) else raw
    ),
    "lr_scheduler": keys.schedule,
    "cosine_min_lr_ratio": keys.least_rate,
    "cosine_constant_lr_ratio": same("0 changes nothing", "0", "0.0"),
    "warmup_steps": keys.warmup,
    "bf16": keys.precision("bfloat16"),
    "fp16": keys.precision("float16"),
    "bfloat16": keys.precision("bfloat16"),
    "float16": keys.precision("float16"),
    "tf32": Renamed("tf32", {"auto": "false"}),
    "attn_implementation": keys.attention,
    "flash_attention": where_true(attn_impl="flash_attn"),
    "sdp_attention": where_true(attn_impl="sdpa"),
    "flex_attention": where_true(attn_impl="flex_attention"),
    "eager_attention": where_true(attn_impl="eager"),
    "gradient_checkpointing": keys.recomputation,
    "gradient_checkpointing_kwargs": keys.recomputed_how,
    "layer_offloading": keys.layers_on_the_host,
    "activation_offloading": Renamed("activation_offloading", dict.fromkeys(("legacy", "disk"), "true")),
    "unfrozen_parameters": keys.unfrozen,
    "model_config": keys.router_loss,
    **dict.fromkeys(keys.SHARING, keys.shared_rows),
    **dict.fromkeys(("ring_attn_func", "heads_k_stride"), same("heads are exchanged instead, with the same gradients")),
    "dp_shard_size": same("the processes are counted"),
    "dp_replicate_size": keys.replicas,
    "deepspeed": keys.deepspeed,
    "fsdp": keys.fsdp,
    "fsdp_config": keys.fsdp_config,
    "fsdp_version": same("FSDP2 it is; the gradients are those of version 1"),
    "evals_per_epoch": keys.times_per_epoch("eval"),
    "saves_per_epoch": keys.times_per_epoch("save"),
    "loss_watchdog_threshold": same("a loss that is not finite ends the run"),
    "loss_watchdog_patience": same("a loss that is not finite ends the run"),
    "use_wandb": where_true(report_to="wandb"),
    "use_swanlab": where_true(report_to="swanlab"),
    "use_tensorboard": where_true(report_to="tensorboard"),
    "use_mlflow": where_true(report_to="mlflow"),
    "use_trackio": where_true(report_to="trackio"),
    "mlflow_run_name": Renamed("run_name"),
    "mlflow_experiment_name": variable("MLFLOW_EXPERIMENT_NAME"),
    "mlflow_tracking_uri": variable("MLFLOW_TRACKING_URI"),
    "trackio_run_name": Renamed("run_name"),
    "wandb_project": keys.tracker,
    "wandb_entity": variable("WANDB_ENTITY"),
    "wandb_name": Renamed("run_name"),
    "swanlab_experiment_name": Renamed("run_name"),
    **{f"swanlab_{name}": variable(f"SWANLAB_{name.upper()}") for name in ("project", "mode", "workspace")},
    "torch_compile": keys.compiled,
    "hub_model_id": keys.uploaded,
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

CAVEATS = {
    "warmup_ratio": ", but for at most 100 steps: give --warmup_steps 100 to a run of more than 3,333 steps",
    "loss_scale": " for models with images without a chat_template that it knows: all tokens are trained on",
}
"""Settings whose default is another in some runs."""


def defaults(mode: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What Axolotl uses where a configuration is silent; `config`: its keys, `given`: our settings, made of them."""
    values = {**DEFAULTS, **trl.of_method(mode)}
    values["per_device_eval_batch_size"] = given.get("per_device_train_batch_size", 1)
    values |= {"multi_objective_aggregation": "normalize_then_sum"} if config.get("rl") == "gdpo" else {}
    values = trl.beside(values, given)
    for name in ("learning_rate", "lora_rank", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_server_timeout"):
        values.pop(name, None)  # must be given there, or is that of the server
    values["max_length"] = DEFAULTS["max_length"]
    if mode == "rlhf":
        del values["max_length"]
    if mode == "ebft":
        values["ebft_advantage_estimator"] = "group_norm"
    if config.get("processor_type"):
        del values["max_length"]
        if _OF_TOWERS.search(given.get("target_regex") or "vision"):
            values |= {"freeze_vit": False, "freeze_aligner": False}
        values |= {} if config.get("chat_template") in MASKED_SEEING else {"loss_scale": "all"}
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
