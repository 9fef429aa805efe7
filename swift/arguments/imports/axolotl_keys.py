"""What single keys of Axolotl become where that is more than another name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.arguments.imports import trl
from swift.arguments.imports.draft import Draft, Rule, refused, same, text_of
from swift.arguments.plugins import settings_class
from swift.arguments.values import show
from swift.flags import spellings_of

MULTIMODAL = "images and sound are not supported; a text run would be another one"


def is_true(raw: Any) -> bool:
    """Whether a value of a YAML is true."""
    return show(text_of(raw)).lower() == "true"


def number(raw: Any) -> float:
    """A number of a configuration, 0 where there is none."""
    text = show(text_of(raw))
    return float(text) if re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE) else 0.0


def share_of_rows(draft: Draft, key: str, raw: Any) -> None:
    """`val_set_size`: a share, or a number of rows."""
    if re.fullmatch(r"[1-9]\d*(\.0*)?", str(raw)):
        draft.lose(key, f"{raw} rows: --split_dataset_ratio is a share; or give --val_dataset")
    else:
        draft.take(key, "split_dataset_ratio", raw)


def evaluates(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has rows for evaluation."""
    return bool(number(config.get("val_set_size")) or config.get("test_datasets"))


def times_per_epoch(name: str) -> Rule:
    """`saves_per_epoch`, `evals_per_epoch`: a share of all steps, as Axolotl computes it."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        times = number(raw) * (number(draft.config.get("num_epochs")) or 1.0)
        if name == "eval" and not evaluates(draft.config):
            draft.same(key, "there are no rows to evaluate on")
        elif not times:
            draft.same(key, f"{raw} changes nothing")
        elif times <= 1:
            draft.take(key, f"{name}_strategy", "epoch" if name == "save" else "no")
        else:
            draft.take(key, f"{name}_strategy", "steps")
            draft.take(key, f"{name}_steps", f"{1 / times:.6g}")

    return rule


def batch_size(draft: Draft, key: str, raw: Any) -> None:
    """`batch_size`: of a process and an optimizer step, where there is no `gradient_accumulation_steps`."""
    if draft.config.get("gradient_accumulation_steps"):
        draft.same(key, "gradient_accumulation_steps has precedence")
    else:
        steps = int(number(raw) // (number(draft.config.get("micro_batch_size")) or 1))
        draft.take(key, "gradient_accumulation_steps", max(steps, 1))


def max_length(draft: Draft, key: str, raw: Any) -> None:
    """`sequence_len`: prompts have no limit in their GRPO."""
    if draft.mode == "rlhf":
        draft.same(key, "limits no prompt in GRPO")
    elif draft.config.get("processor_type"):
        draft.same(key, "limits no row where there are images")
    else:
        draft.take(key, "max_length", raw)


def too_long(draft: Draft, key: str, raw: Any) -> None:
    """`excess_length_strategy`: rows over the limit are left out or cut."""
    if raw == "drop" and draft.mode != "rlhf":
        draft.same(key, "rows over the limit are left out")
    elif raw == "truncate" and draft.mode in ("sft", "pt"):
        draft.take(key, "truncation_strategy", "right")
    else:
        draft.lose(key, f"{raw}: rows over the limit are left out")


def train_on_inputs(draft: Draft, key: str, raw: Any) -> None:
    """False is what happens here; true trains on whole rows."""
    if not is_true(raw):
        draft.same(key, "the loss counts answers")
    else:
        draft.take(key, "loss_scale", "all")


def warmup(draft: Draft, key: str, raw: Any) -> None:
    """`warmup_steps`: below 1 a share of all steps."""
    draft.take(key, "warmup_ratio" if 0 < number(raw) < 1 else "warmup_steps", raw)


def schedule(draft: Draft, key: str, raw: Any) -> None:
    """`lr_scheduler`, whose floor is a key of its own."""
    if raw == "cosine" and number(draft.config.get("cosine_min_lr_ratio")):
        draft.same(key, "see cosine_min_lr_ratio")
    else:
        draft.take(key, "lr_scheduler_type", raw)


def least_rate(draft: Draft, key: str, raw: Any) -> None:
    """`cosine_min_lr_ratio`: of the peak rate, to which a cosine falls."""
    if number(draft.config.get("cosine_constant_lr_ratio")):
        draft.lose(key, f"{raw}: with cosine_constant_lr_ratio no schedule here")
    elif draft.config.get("lr_scheduler", "cosine") == "cosine" and number(raw):
        draft.take(key, "lr_scheduler_type", "cosine_with_min_lr")
        draft.take(key, "lr_scheduler_kwargs", {"min_lr_rate": number(raw)})
    else:
        draft.same(key, "is of the cosine schedule")


def precision(dtype: str) -> Rule:
    """`bf16`, `fp16` and others: where one is true; without any, float32."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        others = [name for name in ("bf16", "fp16", "bfloat16", "float16") if name != key]
        if is_true(raw) or raw == "full":
            draft.take(key, "torch_dtype", dtype)
        elif raw == "auto":
            draft.same(key, "the machine decides")
        elif key != "bf16" or any(draft.config.get(name) and is_true(draft.config[name]) for name in others):
            draft.same(key, "false changes nothing here")
        else:
            draft.take(key, "torch_dtype", "float32")

    return rule


def attention(draft: Draft, key: str, raw: Any) -> None:
    """A kernel, by its name; others compute the same attention."""
    if raw in ("flash_attention_2", "sdpa", "flex_attention", "eager"):
        draft.take(key, "attn_impl", raw)
    elif raw in ("sage", "fp8"):
        draft.lose(key, f"{raw}: 8-bit attention; --attn_impl sdpa computes it in the model's precision")
    else:
        draft.same(key, f"{raw}: another kernel of the same attention; --attn_impl chooses one")


def targets(draft: Draft, key: str, raw: Any) -> None:
    """`lora_target_modules`, which `lora_target_linear` overrides."""
    if is_true(draft.config.get("lora_target_linear")):
        draft.same(key, "lora_target_linear has them all")
    else:
        trl.take_targets(draft, key, raw)


def adapter(draft: Draft, key: str, raw: Any) -> None:
    """`lora` or `qlora`; a full run has none."""
    if raw not in ("lora", "qlora"):
        refused("lora and qlora are the adapters that can be imported")(draft, key, raw)
    draft.take(key, "tuner_type", "lora")


def unfrozen(draft: Draft, key: str, raw: Any) -> None:
    """Expressions of the parameters to train, whose points are no wildcards."""
    words = [raw] if isinstance(raw, str) else list(raw)
    if any(re.search(r"\[\d*:\d*\]$", word) for word in words):
        draft.lose(key, f"{' '.join(words)}: rows of a parameter cannot be frozen")
        return
    draft.take(key, "freeze_parameters_ratio", "1.0")
    draft.take(key, "trainable_parameters_regex", "|".join(word.replace(".", r"\.") for word in words))


def special_tokens(draft: Draft, key: str, raw: Any) -> None:
    """Padding carries no loss; other tokens decide what a row contains."""
    roles = dict(raw) if isinstance(raw, dict) else {"tokens": raw}
    for name in ("additional_special_tokens", "tokens"):
        if added := roles.pop(name, None):
            draft.lose(key, f"{show(text_of(added))}: add them to tokenizer and embedding of --model with transformers")
    if roles.pop("pad_token", None):
        draft.same(key, "pad_token: padding carries no loss")
    if roles := {name: token for name, token in roles.items() if token}:
        draft.take(key, "special_tokens", roles)


def plugins(draft: Draft, key: str, raw: Any) -> None:
    """Integrations by their names: some change nothing here, some are refused."""
    for path in raw if isinstance(raw, list) else [raw]:
        integration = "".join(str(path).split(".")[2:3])
        if integration in ("cut_cross_entropy", "kernels", "liger", "expert_parallel"):
            draft.same(key, f"{integration}: changes speed and memory alone")
        elif integration == "swanlab":
            draft.take(key, "report_to", "swanlab")
        elif integration in ("diffusion", "llm_compressor", "kd", "grokfast", "hatchery", "spectrum", "densemixer"):
            refused("trains in another way, which swift does not")(draft, key, path)
        else:
            draft.lose(key, f"{path}: integrations are flags, or --external_plugins")


def deepspeed(draft: Draft, key: str, raw: Any) -> None:
    """A file of Axolotl's, by its name; another file as it is."""
    stage = re.match(r"zero([123])", Path(str(raw)).name)
    offload = "_offload" if "offload" in str(raw) else ""
    draft.take(key, "deepspeed", f"zero{stage[1]}{offload}" if stage and not Path(str(raw)).exists() else raw)


def fsdp(draft: Draft, key: str, raw: Any) -> None:
    """The words of FSDP1; the first that says how much is sharded counts."""
    words = raw if isinstance(raw, list) else str(raw).split()
    draft.take(key, "fsdp", next((word for word in words if word in ("full_shard", "shard_grad_op")), words[0]))


def recomputation(draft: Draft, key: str, raw: Any) -> None:
    """Some ways of it also let activations wait on the host."""
    way = str(raw)
    draft.take(key, "gradient_checkpointing", "true" if way in ("unsloth", "offload", "offload_disk") else raw)
    if way.startswith("offload"):
        draft.take(key, "activation_offloading", "true")


def layers_on_the_host(draft: Draft, key: str, raw: Any) -> None:
    """Frozen layers that come to the device one by one; sharded ones can."""
    if not is_true(raw):
        draft.same(key, "false changes nothing here")
    elif draft.config.get("fsdp") or draft.config.get("fsdp_config"):
        draft.take(key, "fsdp_offload_params", "true")
    else:
        draft.lose(key, f"{raw}: layers are on the device, which needs more; --fsdp_offload_params does it with --fsdp")


def fsdp_config(draft: Draft, key: str, raw: Any) -> None:
    """A line for each key; whatever is sharded, the gradients are the same."""
    for given, value in raw.items() if isinstance(raw, dict) else ():
        name, on, place = given.removeprefix("fsdp_"), is_true(value), f"{key}.{given}"
        if name == "offload_params":
            draft.take(place, "fsdp_offload_params", "true" if on else "false")
        elif name == "activation_checkpointing" and on and "gradient_checkpointing" not in draft.config:
            draft.take(place, "gradient_checkpointing", "true")
        elif name == "reshard_after_forward":
            draft.take(place, "fsdp", "full_shard" if on else "shard_grad_op")
        elif name == "sharding_strategy" and str(value) in ("NO_SHARD", "HYBRID_SHARD"):
            draft.lose(place, f"{value}: --fsdp shards over all processes, or copies of --fsdp_replicas")
        else:
            draft.same(place, "layers are wrapped, and states saved, without settings")
    if "fsdp" not in draft.settings and "fsdp" not in draft.config:
        draft.take(key, "fsdp", "full_shard")


def scaled_rewards(draft: Draft, key: str, raw: Any) -> None:
    """`scale_rewards`, which in EBFT is an estimator."""
    if draft.mode == "ebft" and str(raw).lower() in ("true", "group"):
        draft.take(key, "ebft_advantage_estimator", "group_norm")
    else:
        trl.RULES["scale_rewards"](draft, key, raw)


def of_the_ratio(draft: Draft, key: str, raw: Any) -> None:
    """What bounds a ratio of policies, which is 1 in EBFT."""
    block = draft.config.get("trl")
    if draft.mode == "ebft" and isinstance(block, dict) and number(block.get("num_iterations", 1)) == 1:
        draft.same(key, "with one update of each rollout the ratio is 1")
    else:
        draft.take(key, key.rpartition(".")[2], raw)


def recomputed_how(draft: Draft, key: str, raw: Any) -> None:
    """`gradient_checkpointing_kwargs`: whether it is reentrant changes no gradient."""
    if not isinstance(raw, dict) or set(raw) - {"use_reentrant"}:
        draft.take(key, key, raw)
    else:
        draft.same(key, "recomputation is never reentrant; the gradients are the same")


def served(draft: Draft, key: str, raw: Any) -> None:
    """The block `vllm` sets up the server, which is a command of its own, or an engine beside the trainer."""
    name = key.rpartition(".")[2]
    block = draft.config.get("trl")
    if isinstance(block, dict) and block.get("vllm_mode") == "colocate" and f"vllm_{name}" in spellings_of(draft.cls):
        draft.take(key, f"vllm_{name}", raw)
        return
    flags = spellings_of(settings_class("rollout"))
    flag = next((flag for flag in (f"vllm_{name}", name) if flag in flags), None)
    draft.same(key, f"of the server: {f'swift rollout --{flag} {raw}' if flag else 'swift rollout has no such flag'}")


def tracker(draft: Draft, key: str, raw: Any) -> None:
    """`wandb_project`: a project switches the tracker on."""
    draft.export(key, "WANDB_PROJECT", raw)
    if str(draft.config.get("use_wandb")).lower() != "false":
        draft.take(key, "report_to", "wandb")


def uploaded(draft: Draft, key: str, raw: Any) -> None:
    """`hub_model_id`: the model is uploaded there, to a private repository."""
    draft.take(key, "hub_model_id", raw)
    if "hub_model_id" in draft.settings:
        draft.take(key, "push_to_hub", "true")
        draft.take(key, "hub_private_repo", "true")


def labels(draft: Draft, key: str, raw: Any) -> None:
    """`num_labels` is 1 in reward models and follows from the method."""
    if str(raw) == "1" or draft.mode in ("rm", "prm"):
        draft.same(key, "follows from the method")
    elif "task_type" in spellings_of(draft.cls):
        draft.take(key, "task_type", "seq_cls")
        draft.take(key, "num_labels", raw)
    else:
        refused("classifiers cannot be trained")(draft, key, raw)


def auto_class(draft: Draft, key: str, raw: Any) -> None:
    """The class of the model follows from config.json; one for images is refused where there are none."""
    if "ImageTextToText" in str(raw):
        processor(draft, key, raw)
    else:
        draft.same(key, "read from config.json")


def processor(draft: Draft, key: str, raw: Any) -> None:
    """`processor_type`: a model with images, which some methods train; none trains one with sound."""
    if not draft.sees or re.search("voxtral|audio|(?<!qwen2_5)omni", str(raw), re.IGNORECASE):
        refused(MULTIMODAL)(draft, key, raw)
    draft.same(key, "the model is loaded with its tower and its processor")


def mistral_common(draft: Draft, key: str, raw: Any) -> None:
    """`tokenizer_use_mistral_common`: a tokenizer that is no file of the model's."""
    if is_true(raw):
        draft.lose(key, "chats are written by the model's own tokenizer and template, which may differ")
    else:
        draft.same(key, "false changes nothing here")


def packed_files(draft: Draft, key: str, raw: Any) -> None:
    """`model_quantization_config`: files in MXFP4 are unpacked when they are read."""
    wanted = draft.config.get("model_quantization_config_kwargs") or {}
    if raw == "Mxfp4Config" and isinstance(wanted, dict) and is_true(wanted.get("dequantize")):
        draft.same(key, "files in MXFP4 are unpacked when they are read")
    else:
        draft.lose(key, f"{show(text_of(raw))}: a model is trained as it is in its files, MXFP4 unpacked")


def packed_experts(draft: Draft, key: str, raw: Any) -> None:
    """`quantize_moe_experts`: to 4 bits, without adapters of their own."""
    if is_true(raw) and (not is_true(draft.config.get("load_in_4bit")) or draft.config.get("lora_target_parameters")):
        draft.lose(key, "experts are quantised to 4 bits, where no adapter is on them, by --quant_experts")
    else:
        draft.take(key, "quant_experts", raw)


def compiled(draft: Draft, key: str, raw: Any) -> None:
    """`torch_compile`, which packed rows of changing layout, and some methods, are faster without."""
    if is_true(draft.config.get("sample_packing")) or "torch_compile" not in spellings_of(draft.cls):
        draft.same(key, "changes speed and memory alone; the model is not compiled")
    else:
        draft.take(key, "torch_compile", raw)


SHARING = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size")
"""Keys of processes that compute the same rows together."""


def shared_rows(draft: Draft, key: str, raw: Any) -> None:
    """Sizes of context and tensor parallelism; in GRPO, its batches have the completions of a process of each group."""
    if str(raw) == "1":
        draft.same(key, "1 changes nothing")
        return
    size = math.prod(int(number(draft.config[name])) or 1 for name in SHARING if draft.config.get(name))
    draft.take(key, "sequence_parallel_size", size)
    if draft.mode == "rlhf":
        draft.lose(key, f"{raw}: a batch has {raw} times the completions; divide gradient_accumulation_steps by it")


def replicas(draft: Draft, key: str, raw: Any) -> None:
    """The size of data parallelism beside FSDP's (HSDP)."""
    if number(raw) > 1 and (draft.config.get("fsdp") or draft.config.get("fsdp_config")):
        draft.take(key, "fsdp_replicas", raw)
    else:
        draft.same(key, "the processes are counted")


def router_loss(draft: Draft, key: str, raw: Any) -> None:
    """`model_config`: changes of config.json, of which the load-balancing loss is a setting here."""
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if name == "output_router_logits" and is_true(value) and "router_aux_loss_coef" in spellings_of(draft.cls):
            draft.take(f"{key}.{name}", "router_aux_loss_coef", None)
        else:
            draft.lose(f"{key}.{name}", f"{show(text_of(value))}: config.json stays as it is; change it there")


def bits(draft: Draft, key: str, raw: Any) -> None:
    """`bnb_config_kwargs`: its keys are translated one by one."""
    draft.translate([(name, value) for name, value in raw.items()] if isinstance(raw, dict) else [], {})
    draft.same(key, "see its keys")


def logs(names: str) -> dict[str, Rule]:
    """Rules for keys that decide what is logged, and where."""
    return dict.fromkeys(names.split(), same("decides what is logged; the training is the same"))


def unknown_there(names: str) -> dict[str, Rule]:
    """Rules for keys of its examples that Axolotl does not read."""
    return dict.fromkeys(names.split(), same("Axolotl has no such key, and ignores it"))


def speed(names: str) -> dict[str, Rule]:
    """Rules for keys that change no number of a run."""
    return dict.fromkeys(names.split(), same("changes speed and memory alone"))
