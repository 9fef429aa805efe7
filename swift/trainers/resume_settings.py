"""Which settings may change when a run is resumed.

A setting is of one of three kinds. *Fixed* ones decide what is in the checkpoint (weights, adapters, data order,
batches, pipeline state): changing one would continue another run, so it is an error. *Free* ones decide where the
run is watched and how fast it goes, not what it computes; some of them only while weights are synced after every
update. All others may change, with a note: from there it is no longer the run that was started.

The number of processes may change, and how they share batches with it, as long as the batches stay what they are; only
ZeRO's state is cut for a number of processes. FSDP's may be cut in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.data.system import resolve_system
from swift.errors import ConfigError, counted
from swift.flags import typed
from swift.observability.secrets import MASK

# fmt: off
FIXED = frozenset(
    {
        "rlhf_type", "model", "model_revision", "model_type", "template", "torch_dtype", "autocast", "tuner_type",
        "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "adapters",
        "target_parameters",
        "target_regex", "use_dora", "use_rslora", "init_weights", "rank_pattern", "alpha_pattern", "vera_rank",
        "vera_projection_prng_key", "vera_d_initial", "boft_block_size", "boft_block_num",
        "quant_method", "quant_bits",
        "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "freeze_parameters", "freeze_parameters_regex",
        "freeze_parameters_ratio", "trainable_parameters", "trainable_parameters_regex",
        "freeze_vit", "freeze_aligner", "freeze_llm", "max_pixels", "vit_lr", "aligner_lr",
        "ref_model", "dataset", "columns", "system", "dataset_shuffle", "split_dataset_ratio", "streaming",
        "shuffle_buffer_size", "split", "packing", "packing_strategy", "packing_length", "padding_free",
        "group_by_length", "loss_scale", "disable_ignore_empty_think", "assistant_only_loss",
        "completion_only_loss", "interleave_prob",
        "stopping_strategy", "curriculum_column", "curriculum_order", "curriculum_bins", "chat_template_kwargs",
        "model_name", "model_author", "dataloader_drop_last",
        "strict", "max_length", "truncation_strategy", "seed", "data_seed",
        "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps",
        "steps_per_generation", "generation_batch_size", "num_iterations", "world_size",
        "advantage_estimator", "dynamic_sample", "moe_router_replay", "sync_ref_model", "optim", "optim_args",
        "master_weights", "deepspeed", "fsdp", "sequence_parallel_size",
        "reward_funcs", "reward_model", "ebft_mode", "ebft_feature_layers", "ebft_feature_norm",
        "ebft_embed_method", "dataset_transform", "ebft_stride", "ebft_context_length", "ebft_generate_max_len",
        "ebft_min_completion_prefix", "ebft_mask_thinking_ce", "teacher_model", "step_separator",
        "train_on_last_step_only", "num_labels", "problem_type", "use_chat_template",
        "agent_template",
    }
)
"""Changing one of these is an error."""

FREE = frozenset(
    {
        "output_dir", "add_version", "resume_from_checkpoint", "logging_steps", "report_to", "save_steps",
        "save_total_limit", "save_only_model", "async_save", "eval_strategy", "eval_steps",
        "per_device_eval_batch_size",
        "num_generations_eval", "val_dataset", "log_completions", "log_unique_prompts", "log_entropy",
        "metric_names", "health_action", "health_rules",
        "dry_run", "debug", "json",
        "external_plugins", "reward_workers", "dataset_num_proc", "dataloader_num_workers", "ddp_timeout",
        "engine_restarts", "engine_timeout", "rollout_timeout", "stall_timeout", "parity_check", "use_hf",
        "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "cpu_devices",
        "vllm_gpu_memory_utilization", "vllm_device", "vllm_server_host", "vllm_server_port",
        "vllm_server_base_url", "vllm_server_timeout", "logging_first_step", "log_rollout_offpolicy_metrics",
        "nemo_gym_command", "nemo_gym_dir", "nemo_gym_config_paths", "nemo_gym_head", "nemo_gym_server_timeout",
        "max_excluded_frac",
        "load_from_cache_file", "push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "eval_on_start",
        "allow_media_urls",
        "run_name", "save_strategy", "fsdp_replicas", "fsdp_offload_params", "gc_collect_after_offload",
        "offload_model", "offload_optimizer", "sleep_level", "bnb_4bit_quant_storage",
        "move_model_batches", "activation_offloading", "trust_remote_code", "ddp_find_unused_parameters",
    }
)
"""Changing one of these does not change what is computed."""

SHARING = frozenset(
    {
        "world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
        "generation_batch_size",
    }
)
"""How processes share batches: these may change together."""

OUT_OF_TURN = frozenset(
    {
        "eval_strategy", "eval_steps", "val_dataset", "save_strategy", "save_steps", "save_only_model", "parity_check",
        "sleep_level",
    }
)
"""Free ones that sync weights before `--vllm_sync_interval` is over: evaluation and the repeated parity check need the
weights of then, the first generation after a checkpoint or a sleep of level 2 gets them, and the interval counts from
there. Free only while weights are synced after every update anyway.
"""
# fmt: on


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """What differs between a checkpoint's settings and those of the command that resumes it.

    changed: name -> (value then, value now), of every kind.
    problems: error lines of fixed settings; notes: lines about settings that change the run from here on.
    """

    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> SettingsChange:
    """Compare two args.json contents, of the checkpoint and of the command that resumes; pure apart from paths.

    Names that the former lacks (an older version wrote it) and masked values are passed over. Example: num_generations
    8 -> 4 is a problem, learning_rate 1e-5 -> 1e-6 a note, save_steps neither unless vllm_sync_interval is above 1.
    """
    change = SettingsChange()
    reason = _why_not_shared_otherwise(saved, current)
    interval = max(int(settings.get("vllm_sync_interval") or 1) for settings in (saved, current))
    for name, now in current.items():
        if name.startswith("_") or name not in saved or MASK in (saved[name], now):
            continue
        then = saved[name]
        if _same(then, now) or (name == "system" and _same_system(then, now)):
            continue
        change.changed[name] = (then, now)
        if name in SHARING and reason is None:
            if name == "world_size":
                change.notes.append(f"resume: {counted(now, 'process')} from this step, {then} before; equal batches")
        elif name == "world_size":
            line = f"NPROC_PER_NODE: {counted(now, 'training process')}: the checkpoint was made by {then}"
            change.problems.append(f"{line}{reason} start {counted(then, 'process')}, or start a new run")
        elif name in FIXED and not (name == "fsdp" and then and now):
            change.problems.append(
                f"--{name}: {typed(now)}: the checkpoint was made with {typed(then)} and this setting may not "
                f"change on resume; use --{name} {typed(then)}, or start a new run"
            )
        elif name not in FREE:
            change.notes.append(f"resume: {name} changes from {typed(then)} to {typed(now)} at this step")
        elif interval > 1 and name in OUT_OF_TURN:
            change.notes.append(
                f"resume: {name} changes from {typed(then)} to {typed(now)} at this step; with --vllm_sync_interval "
                f"{interval} it also decides when the sampler gets new weights"
            )
    return change


def _why_not_shared_otherwise(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Why processes cannot share the batches in another way, and what to do; None if they can."""
    if current.get("world_size") != saved.get("world_size") and current.get("deepspeed"):
        return ", and ZeRO's state is cut for that number;"
    if "num_generations" not in current:  # rows are dealt by a data loader
        for name in ("group_by_length", "dataloader_drop_last"):
            if current.get(name):
                return f", and the order of rows depends on it with --{name};"
    if current.get("rlhf_type") == "kto" and current.get("loss_type") in (None, "kto"):
        return ", and the KL of --rlhf_type kto is a mean over the rows of all processes;"
    rows = "per_device_train_batch_size"
    if current.get(rows) != saved.get(rows) and (
        "num_generations" not in current or current.get("loss_type") == "bnpo"
    ):
        return f", and the loss has means over a micro-batch: keep --{rows} {saved.get(rows)};"
    (total, generation), now = _batches(saved), _batches(current)
    if now == (total, generation):
        return None
    updates, rest = divmod(total, (current.get("world_size") or 1) * (current.get("per_device_train_batch_size") or 1))
    if not updates or rest:
        return f", with {counted(total, 'row')} a step;"
    steps = f" --steps_per_generation {updates * generation // total}" if current.get("steps_per_generation") else ""
    return f", with {counted(total, 'row')} a step; use --gradient_accumulation_steps {updates}{steps},"


def _batches(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows (completions) of an update, and of a generation batch, over all processes."""
    rows = (settings.get("world_size") or 1) * (settings.get("per_device_train_batch_size") or 1)
    updates = settings.get("gradient_accumulation_steps") or 1
    steps = settings.get("steps_per_generation") or updates
    return rows * updates, settings.get("generation_batch_size") or rows * steps


def _same(then: Any, now: Any) -> bool:
    """Equal values; two spellings of one existing path are equal too."""
    if isinstance(then, list | tuple) and isinstance(now, list | tuple):
        return len(then) == len(now) and all(_same(a, b) for a, b in zip(then, now, strict=True))
    if then == now:
        return True
    if not (isinstance(then, str) and isinstance(now, str)):
        return False
    return Path(now).exists() and Path(then).resolve() == Path(now).resolve()


def _same_system(then: str | None, now: str | None) -> bool:
    """Whether two system prompts are one text. Earlier versions wrote the name of its file down."""
    try:
        return resolve_system(then)[0] == resolve_system(now)[0]
    except ConfigError:  # the file of then is gone
        return False
