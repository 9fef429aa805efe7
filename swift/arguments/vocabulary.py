"""Flags and values of the 3.x and 4.x vocabularies that this version knows but does not have.

A flag listed here is accepted, with a note, at a value that changes nothing ("" is no value), and refused
otherwise with the part it comes with. When a part lands, its names leave this table and become fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift.arguments.values import BOOLEANS


@dataclass(frozen=True, slots=True)
class Known:
    """A flag of another version: the part of swift it comes with, and the texts that change nothing."""

    part: str
    off: tuple[str, ...]

    def changes_nothing(self, text: str) -> bool:
        """Whether the value `text` asks for nothing that is not there."""
        return text.lower() in self.off or _boolean(text) in self.off


_OFF, _ON, _NONE = ("false",), ("true",), ("", "none", "null", "[]", "{}")

_TABLE: Mapping[str, Mapping[str, Sequence[str]]] = {
    "multimodal models": {
        "freeze_llm": _OFF, "freeze_vit": _ON, "freeze_aligner": _ON, "vit_lr": _NONE, "aligner_lr": _NONE,
        "max_pixels": _NONE, "vit_gradient_checkpointing": _NONE, "norm_bbox": _NONE, "vit_attn_impl": _NONE,
        "bbox_format": _NONE,
    },
    "quantisation": {
        "quant_method": _NONE, "quant_bits": (*_NONE, "0"), "hqq_axis": _NONE, "bnb_4bit_compute_dtype": _NONE,
        "bnb_4bit_quant_type": ("nf4",), "bnb_4bit_use_double_quant": _ON, "bnb_4bit_quant_storage": _NONE,
        "quant_n_samples": (), "quant_batch_size": (), "group_size": (),
    },
    "Speed": {
        "packing": _OFF, "packing_length": _NONE, "padding_free": _OFF, "use_liger_kernel": _OFF,
        "use_liger_loss": _OFF, "sequence_parallel_size": ("1",), "torch_compile": _OFF, "use_logits_to_keep": _NONE,
        "group_by_length": _OFF, "tf32": _NONE,
    },
    "Engines": {
        "vllm_pipeline_parallel_size": ("1",),
        "fsdp_config": _NONE, "zero_hpz_partition_size": _NONE, "deepspeed_autotp_size": _NONE,
        "vllm_disable_custom_all_reduce": _OFF, "vllm_use_async_engine": _NONE, "vllm_quantization": _NONE,
        "vllm_reasoning_parser": _NONE, "vllm_disable_cascade_attn": _OFF, "vllm_speculative_config": _NONE,
        "vllm_mm_processor_cache_gb": _NONE, "vllm_server_pass_dataset": _OFF, "vllm_server_group_port": _NONE,
        "vllm_restart_interval": _NONE, "max_batch_size": ("1",), "max_concurrency": _NONE,
        "enable_flattened_weight_sync": _ON,
    },
    "multi-turn rollouts": {
        "multi_turn_scheduler": _NONE, "multi_turn_func": _NONE, "max_turns": _NONE, "use_gym_env": _OFF,
        "gym_env": _NONE, "context_manager": _NONE, "completion_length_limit_scope": ("per_round", "total"),
        "on_prefix_break": ("exclude",), "loss_scale": ("", "default", "last_round"),
    },
    "Algorithms": {
        "real_tau": (), "top_entropy": _NONE, "advantage_norm": ("sample",), "dynamic_sampling": _OFF,
        "liger_loss": _OFF,
    },
    "teachers": {
        "teacher_model": _NONE, "teacher_adapters": _NONE, "teacher_model_type": _NONE,
        "teacher_model_revision": _NONE, "teacher_deepspeed": _NONE, "offload_teacher_model": _OFF,
        "gkd_logits_topk": _NONE,
        "lmbda": (), "seq_kd": _OFF, "sft_alpha": ("0", "0.0"),
    },
    "generative judges": {"reward_model_plugin": ("", "none", "default")},
    "other kinds of preference training": {
        "ref_adapters": _NONE, "ref_model_type": _NONE, "ref_model_revision": _NONE, "label_smoothing": ("0", "0.0"),
        "rpo_alpha": _NONE, "ld_alpha": _NONE, "discopop_tau": (), "cpo_alpha": (), "simpo_gamma": (),
        "desirable_weight": ("1", "1.0"), "undesirable_weight": ("1", "1.0"), "f_divergence_type": ("reverse_kl",),
        "center_rewards_coefficient": _NONE, "num_ppo_epochs": (), "whiten_rewards": _OFF, "kl_coef": (),
        "cliprange": (),
        "vf_coef": (), "cliprange_value": (), "gamma": (), "lam": (), "num_mini_batches": (),
        "local_rollout_forward_batch_size": (), "num_sample_generations": (), "missing_eos_penalty": _NONE,
    },
    "other tuners": {
        "freeze_parameters": _NONE, "freeze_parameters_regex": _NONE, "freeze_parameters_ratio": ("0", "0.0"),
        "trainable_parameters": _NONE, "trainable_parameters_regex": _NONE, "target_regex": _NONE,
        "target_parameters": _NONE, "init_weights": ("true",), "lora_bias": ("none",), "lora_dtype": _NONE,
        "lora_modules": _NONE, "lorap_lr_ratio": _NONE, "use_rslora": _OFF, "use_dora": _OFF, "lora_ga_batch_size": (),
        "lora_ga_iters": (), "lora_ga_max_length": (), "lora_ga_direction": (), "lora_ga_scale": (),
        "init_lora_weights": _ON,
        "lora_ga_stable_gamma": (), "use_galore": _OFF, "use_q_galore": _OFF, "lisa_activated_layers": ("0",),
        "lisa_step_interval": (), "use_ray": _OFF, "tuner_backend": ("", "peft"), "neftune_noise_alpha": _NONE,
        "unsloth": _OFF, "vera_rank": (), "boft_block_size": (), "fourier_n_frequency": (), "optimizer": _NONE,
    },
    "supervised extras": {
        "agent_template": _NONE, "response_prefix": _NONE, "enable_thinking": _NONE, "num_labels": _NONE,
        "task_type": ("", "causal_lm"), "problem_type": _NONE, "template_backend": ("", "swift", "jinja"),
        "use_chat_template": _ON, "sequence_classification": _OFF, "assistant_only_loss": _ON,
        "completion_only_loss": _ON, "train_on_prompt": _OFF, "metric": _NONE, "channels": _NONE,
        "predict_with_generate": _OFF, "label_smoothing_factor": ("0", "0.0"), "router_aux_loss_coef": ("0", "0.0"),
        "add_non_thinking_prefix": _NONE, "tools_prompt": _NONE, "padding_side": ("left", "right"),
        "rope_scaling": _NONE, "new_special_tokens": _NONE, "max_model_len": _NONE,
    },
    "more ways to load data": {
        "custom_dataset_info": _NONE,
        "download_mode": ("reuse_dataset_if_exists",), "model_kwargs": _NONE, "hub_token": _NONE,
        "load_from_cache_file": ("true", "false"), "remove_unused_columns": ("true", "false"), "lazy_tokenize": _NONE,
        "val_dataset_shuffle": _OFF, "train_dataset_sample": ("", "-1"), "dataset_sample": ("", "-1"),
        "cached_dataset": _NONE, "model_name": _NONE, "model_author": _NONE, "train_dataloader_shuffle": _ON,
        "dataloader_pin_memory": ("true", "false"), "dataloader_persistent_workers": ("true", "false"),
        "dataloader_prefetch_factor": (), "dataloader_drop_last": ("true", "false"), "truncation": _NONE,
    },
    "more control of a run": {
        "push_to_hub": _OFF, "hub_model_id": _NONE, "hub_private_repo": _NONE, "hub_strategy": ("every_save",),
        "logging_dir": _NONE, "ddp_backend": _NONE, "resume_only_model": _OFF, "ignore_data_skip": _OFF,
        "check_model": _ON, "create_checkpoint_symlink": _OFF, "save_safetensors": _ON, "disable_tqdm": _OFF,
        "local_repo_path": _NONE, "max_epochs": _NONE, "device_map": ("", "none", "auto"), "max_memory": _NONE,
        "load_args": ("true", "false"), "load_data_args": _OFF, "early_stop_interval": _NONE, "eval_on_start": _OFF,
        "eval_delay": ("0",), "save_on_each_node": _OFF, "torch_empty_cache_steps": _NONE, "acc_strategy": ("token",),
        "eval_accumulation_steps": _NONE, "use_cpu": _OFF, "no_cuda": _OFF, "average_tokens_across_devices": _ON,
        "include_num_input_tokens_seen": _OFF, "log_level": ("", "passive", "info", "warning"), "stream": _ON,
        "merge_device_map": _NONE, "to_ollama": _OFF, "to_peft_format": _OFF, "to_mcore": _OFF, "to_hf": _OFF,
        "exist_ok": _OFF, "write_batch_size": (), "eval_use_evalscope": _OFF, "callbacks": _NONE,
        "swanlab_project": _NONE, "swanlab_workspace": _NONE, "swanlab_exp_name": _NONE, "swanlab_mode": ("cloud",),
        "swanlab_token": _NONE, "profile": _OFF, "metric_names": ("trl",), "max_excluded_frac": ("1", "1.0"),
        "health_rules": _NONE, "health_action": ("warn",), "attn_implementation": _NONE,
    },
    "integrations": {
        "rollout_source": ("engine",), "atropos_url": _NONE, "atropos_timeout": (), "atropos_ratio": (),
        "atropos_require_logprobs": _OFF, "nemo_gym_head": _NONE, "nemo_gym_mode": _NONE, "weight_bridge": _NONE,
        "use_env_advantages": _OFF, "rollout_kl_coef": ("0", "0.0"), "force_restart": _OFF,
    },
}  # fmt: skip

_FAMILIES = {
    "fipo_": "Algorithms", "chord_": "Algorithms", "rlsd_": "Algorithms", "sdar_": "Algorithms", "teacher_": "teachers",
    "galore_": "other tuners", "adalora_": "other tuners", "reft_": "other tuners", "llamapro_": "other tuners",
    "vera_": "other tuners", "boft_": "other tuners", "fourier_": "other tuners", "lisa_": "other tuners",
    "sglang_": "Engines", "megatron_": "Megatron training",
}  # fmt: skip

_REPLACED = {
    "bf16": "use --torch_dtype bfloat16",
    "fp16": "use --torch_dtype bfloat16, or float16 in swift sft",
    "quantization_bit": "quantisation is not in this version",
    "sft_type": "use --tuner_type",
    "model_id_or_path": "use --model",
    "lora_target_modules": "use --target_modules",
    "custom_train_dataset_path": "use --dataset",
}
"""Flags whose meaning another setting has."""

_VALUES: Mapping[str, Mapping[str, str]] = {
    "rlhf_type": {
        **dict.fromkeys(
            ("dpo", "orpo", "simpo", "kto", "cpo", "rm", "ppo", "gkd"), "other kinds of preference training"
        ),
        "ebft": "integrations",
    },
    "tuner_type": dict.fromkeys(
        ("adalora", "longlora", "llamapro", "vera", "boft", "fourierft", "reft", "adapter", "ia3", "bone", "lora_llm"),
        "other tuners",
    ),
    "loss_type": {"real": "Algorithms", "fipo": "Algorithms"},
}


def known_flag(name: str) -> Known | None:
    """What is known about a flag that is no setting of this version; None means it is unknown."""
    for part, flags in _TABLE.items():
        if name in flags:
            return Known(part, tuple(flags[name]))
    return next((Known(part, _NONE) for prefix, part in _FAMILIES.items() if name.startswith(prefix)), None)


def replaced_flag(name: str) -> str | None:
    """What to use instead of a flag of older versions."""
    return _REPLACED.get(name)


def later_value(name: str, text: str) -> str | None:
    """The part of swift that the value `text` of a setting comes with; None when it is unknown."""
    return _VALUES.get(name, {}).get(text)


def _boolean(text: str) -> str | None:
    value = BOOLEANS.get(text.lower())
    return None if value is None else str(value).lower()
