"""Flags, values and modes of ms-swift, TRL and Axolotl that swift does not support.

A known flag is accepted, with a note, at a value without effect: one that switches it off, the one that swift always
has, or any value of a flag that changes speed alone. Every other value is refused.
"""

from __future__ import annotations

import contextlib

from swift.arguments import absent
from swift.arguments.modes import METHODS, MODES, command_of
from swift.arguments.plugins import settings_class
from swift.arguments.values import Raw, convert, show
from swift.flags import flags_of, spellings_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OFF = frozenset(("", "none", "null", "[]", "{}", "false", "no", "off", "0", "0.0"))
_NEUTRAL = _OFF | {"1", "1.0", "-1", "default"}
"""Values that switch a flag off, or are a factor, a count or a limit that changes nothing."""

_SAME = {
    flag: value
    for value, flags in {
        "true": "save_safetensors use_chat_template add_non_thinking_prefix "
        "check_model stream train_dataloader_shuffle average_tokens_across_devices enable_flattened_weight_sync "
        "load_from_cache_file",
        "1": "vllm_pipeline_parallel_size",
        "causal_lm": "task_type",
        "delete": "truncation_strategy",
        "binpack": "packing_strategy",
    }.items()
    for flag in flags.split()
}
"""Flags -> the value that swift always has."""

_SPEED = _names(
    "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "remove_unused_columns lazy_tokenize use_logits_to_keep padding_side padding_free template_backend use_liger_loss "
    "use_data_producer experts_impl eval_limit eval_dataset_args eval_generation_config extra_eval_args "
    "vit_attn_impl packing_num_proc vllm_use_async_engine vllm_server_pass_dataset max_batch_size tuner_backend"
)
"""Flags that change no result here, whatever their value; some belong to a flag that is refused."""

_OF_REFUSED = ("galore_", "adalora_", "reft_", "llamapro_", "fourier_", "lora_ga_", "lisa_step_")
"""Beginnings of flags that have an effect with a tuner, a start or a switch only that is refused."""

_REFUSED = _names(
    "device_map enable_thinking add_non_thinking_prefix context_manager hub_strategy log_level group_size"
)
"""Flags without a value that has no effect."""

_KNOWN = frozenset(absent.flags())
_FAMILIES = absent.families()

_WHY = {
    "lisa_activated_layers": "layers are trained or frozen for a whole run (--freeze_parameters)",
    "use_galore": "gradients are not projected here, which needs the package galore_torch",
}
"""Known flags -> why they are not supported."""

_INSTEAD = {
    "tuner_backend": "adapters are PEFT's here, which trains the same",
    "vllm_server_pass_dataset": "here the trainer plays the turns: if the server's command has --multi_turn_scheduler, "
    "--gym_env or --max_turns, give them to swift rlhf",
}
"""Flags that change nothing -> what there is in their place."""

_VALUES = {"multi_turn_scheduler": ("thinking_tips_scheduler",)}
"""Values that a plugin of ms-swift adds there."""

_MODES = {
    "train": "swift sft, or swift rlhf --rlhf_type grpo",
    "grpo": "swift rlhf --rlhf_type grpo",
    "gdpo": "swift rlhf --rlhf_type gdpo",
    "rloo": "swift rlhf --rlhf_type rloo",
    "ppo": "swift rlhf --rlhf_type grpo",
    "deploy": "swift rollout, which serves a model",
    "serve": "swift rollout, which serves a model",
    "chat": "swift infer, which answers at the terminal",
    "eval": "swift infer, which answers a dataset, and swift reward-test, which scores the answers",
    "sample": "swift infer, which answers a dataset",
    "app": "swift infer, which answers at the terminal",
    "web-ui": "swift infer, which answers at the terminal",
    "merge-adapter": "swift merge-lora",
    "megatron": "swift sft or swift rlhf with --deepspeed or --fsdp",
}
"""Modes elsewhere -> the nearest here."""


def is_known(name: str) -> bool:
    """Whether a name that is no setting here is a flag elsewhere."""
    return name in _KNOWN | _SPEED | _REFUSED | _SAME.keys() or name.startswith(_FAMILIES)


def changes_nothing(name: str, text: str) -> bool:
    """Whether the value `text` of a known flag has no effect, or the effect that swift always has."""
    if name in _SPEED or name.startswith(_OF_REFUSED):
        return True
    if same := _SAME.get(name):
        return text.lower() == same or (same == "true" and text.lower() in ("1", "yes", "on"))
    return name not in _REFUSED and text.lower() in _OFF


def asks_nothing(name: str, raw: Raw) -> bool:
    """Whether a value of a setting of other modes leaves it off there, or is a neutral default."""
    if show(raw).lower() not in _NEUTRAL:
        return False
    for cls in map(settings_class, MODES):
        if flag := flags_of(cls).get(spellings_of(cls).get(name, "")):
            with contextlib.suppress(ValueError):
                if convert(flag, raw) == flag.default:
                    return True
    return False


def no_effect(name: str) -> str:
    """The text of a note about a known flag whose value `changes_nothing`."""
    return f"known in ms-swift; {_INSTEAD.get(name, 'this value changes nothing here')}"


def refusal(name: str) -> str:
    """The text of an error line about a known flag."""
    if name in _WHY:
        return f"{_WHY[name]}; leave it out"
    return f"known in ms-swift, not supported here; {absent.fix_of(name)}"


def is_known_value(name: str, text: str) -> bool:
    """Whether ms-swift has the value `text` of a setting."""
    return text in [*absent.values_of(name), *_VALUES.get(name, ())]


def nearest_mode(name: str) -> str | None:
    """The command of swift that replaces a mode of another command line."""
    return f"swift {command_of(name)}" if name in METHODS else _MODES.get(name)
