"""The policy: a decoder with all weights trainable, or a frozen one with a LoRA adapter on top.

Reinforcement learning compares log-probs of the same tokens under the same weights, so dropout is off in
every part of the model unless `--lora_dropout` is given; supervised tuning keeps the model's own.

Adapters to start from: with `tuner_type lora` the one adapter stays separate and is trained on; with
`tuner_type full` all of them are merged into the weights, in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, ResourceError, first_line, suggest, unusable
from swift.models.source import ModelSource, locate, read_json
from swift.startup import hush_libraries

if TYPE_CHECKING:
    import torch
    from torch import nn

    from swift.models.arguments import CheckpointArguments, TunerArguments


def load_policy(
    args: TunerArguments,
    *,
    device: torch.device | str | None = None,
    model_dropout: bool = False,
    reward_head: bool = False,
) -> nn.Module:
    """The model to train, in training mode; only trainable parameters require a gradient.

    Args:
        args: model, dtype, attention and tuner settings.
        device: where the weights go; None leaves them on the CPU.
        model_dropout: keep the dropout rates of the model's config (supervised tuning); off otherwise.
        reward_head: a head of one score instead of the language model's; a new one where the files have none.

    Returns:
        A transformers causal language model, or sequence classifier, or a `peft.PeftModel` around one.

    Raises:
        ConfigError: missing or incomplete files, unknown architecture, several start adapters with LoRA.
        ResourceError: an attention implementation whose package is not installed.
    """
    source = locate(args)
    model = load_base(source.base, args, device=device, model_dropout=model_dropout, reward_head=reward_head)
    if args.tuner_type == "full":
        for folder in source.adapters:
            model = merge_in(model, folder)
        model.requires_grad_(True)
    else:
        model = _with_lora(model, source, args, "SEQ_CLS" if reward_head else "CAUSAL_LM")
    return model.train()


def load_for_inference(args: CheckpointArguments, *, device: torch.device | str | None = None) -> nn.Module:
    """The model with all its adapters merged in, frozen and in evaluation mode."""
    source = locate(args)
    model = load_base(source.base, args, device=device)
    for folder in source.adapters:
        model = merge_in(model, folder)
    return model.requires_grad_(False).eval()


def load_base(
    folder: Path,
    args: CheckpointArguments,
    *,
    device: torch.device | str | None = None,
    model_dropout: bool = False,
    reward_head: bool = False,
) -> Any:
    """The causal language model in `folder`, every weight but a new `reward_head` read from its safetensors files.

    Raises:
        ConfigError, ResourceError: see `load_policy`; also when the files lack weights of the model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = load_config(folder, args)
    if reward_head:
        config.num_labels = 1
    if not model_dropout:
        clear_config_dropout(config)
    kind = AutoModelForSequenceClassification if reward_head else AutoModelForCausalLM
    try:
        with quiet_loading(), unusable(f"--model: {folder}: its weights cannot be loaded"):
            model, info = kind.from_pretrained(
                folder,
                config=config,
                dtype=pick_dtype(args.torch_dtype, device),
                attn_implementation=_attention_for(config, args.attn_impl),
                trust_remote_code=args.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except ImportError as error:
        raise ResourceError(f"--attn_impl: {args.attn_impl}: {first_line(error)}; use --attn_impl sdpa") from error
    if reward_head:
        info["missing_keys"] = [name for name in info["missing_keys"] if name.startswith(f"{model.base_model_prefix}.")]
    _check_complete(folder, info)
    _check_finite(folder, model)
    if not model_dropout:
        clear_module_dropout(model)
    return model.to(device) if device is not None else model


def _attention_for(config: Any, wanted: str) -> str:
    """`--attn_impl` in transformers' words; eager where it is sdpa and the architecture has none, or caps scores."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from swift.models.attention.choice import has_soft_cap

    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    without = known and not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
    if wanted == "sdpa" and (without or has_soft_cap(config)):
        return "eager"
    return "flash_attention_2" if wanted == "flash_attn" else wanted


def load_config(folder: Path, args: CheckpointArguments) -> Any:
    """The architecture's config; `--model_type` replaces the one written in config.json.

    Raises:
        ConfigError: an architecture that transformers does not know, or that needs repository code.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    written = read_json(folder / "config.json")
    model_type = _architecture(args.model_type, CONFIG_MAPPING) if args.model_type else written.get("model_type")
    if model_type not in CONFIG_MAPPING and "auto_map" in written and not args.trust_remote_code:
        raise ConfigError(
            f"--model: {folder}: its architecture needs Python code from its repository; "
            "read that code, then set --trust_remote_code true"
        )
    with unusable(f"--model: {folder}: config.json cannot be used"):
        if args.model_type and model_type != written.get("model_type"):
            return CONFIG_MAPPING[model_type].from_dict({**written, "model_type": model_type})
        return AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code, local_files_only=True)


def context_length(args: CheckpointArguments) -> int | None:
    """The longest sequence of the model in tokens, from its config; None when it names no limit."""
    config = load_config(locate(args).base, args).get_text_config()
    return getattr(config, "max_position_embeddings", None)


def pick_dtype(name: str | None, device: torch.device | str | None = None) -> torch.dtype:
    """`--torch_dtype` as torch's type; None means float32 on the CPU and bfloat16 elsewhere."""
    import torch

    if name:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    on_cpu = torch.device(device).type == "cpu" if device is not None else not torch.cuda.is_available()
    return torch.float32 if on_cpu else torch.bfloat16


def merge_in(model: Any, folder: Path) -> Any:
    """`model` with a LoRA adapter merged into its weights; the adapter's modules are gone afterwards."""
    from peft import PeftModel

    with adapter_errors(folder):
        return PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)


def adapter_errors(folder: Path) -> AbstractContextManager[None]:
    """Turns peft's failures on an unfit adapter into one line that names the folder."""
    return unusable(f"--adapters: {folder}: does not fit the model", "; give the base model it was trained on")


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Hides what libraries say while reading and writing weights, and DeepSpeed's look for a device."""
    from transformers.utils import logging

    from swift.models.sharded import settle_accelerator

    hush_libraries()
    settle_accelerator()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def clear_config_dropout(config: Any) -> None:
    """Sets every dropout rate of a config to 0, under whatever name the architecture has for it."""
    for name, value in list(vars(config).items()):
        is_rate = name.endswith(("dropout", "_pdrop", "dropout_prob", "dropout_rate"))
        if is_rate and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, 0.0)


def clear_module_dropout(model: nn.Module) -> None:
    """Sets the rate of every dropout module to 0."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _with_lora(model: Any, source: ModelSource, args: TunerArguments, task: str = "CAUSAL_LM") -> Any:
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model

    if len(source.adapters) > 1:
        raise ConfigError(
            f"--adapters: {' '.join(map(str, source.adapters))}: LoRA training starts from one adapter; "
            "merge the others into the model with `swift merge-lora`, or use --tuner_type full"
        )
    if source.adapters:
        folder = source.adapters[0]
        with adapter_errors(folder):
            start = PeftConfig.from_pretrained(str(folder))
            start.lora_dropout = args.lora_dropout or 0.0  # a rate left from supervised tuning must not enter RL
            return PeftModel.from_pretrained(model, str(folder), config=start, is_trainable=True)
    targets = list(args.target_modules)
    config = LoraConfig(
        task_type=task,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout or 0.0,
        target_modules="all-linear" if targets in ([], ["all-linear"]) else targets,
        modules_to_save=list(args.modules_to_save) or None,
        base_model_name_or_path=str(source.base),
    )
    try:
        policy = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(
            f"--target_modules: {' '.join(targets)}: {first_line(error)}; "
            f"valid: all-linear, {', '.join(linear_names(model))}"
        ) from error
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # equal runs write equal adapter_config.json files
    return policy


def check_targets(args: TunerArguments) -> None:
    """Refuses `--target_modules` that the model does not have, without loading its weights.

    Raises:
        ConfigError: no module has one of the names.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if args.tuner_type != "lora" or list(args.target_modules) in ([], ["all-linear"]):
        return
    source = locate(args)
    with torch.device("meta"), quiet_loading():
        model = AutoModelForCausalLM.from_config(
            load_config(source.base, args), trust_remote_code=args.trust_remote_code
        )
    if not source.adapters:
        _with_lora(model, source, args)


def linear_names(model: nn.Module) -> list[str]:
    """The last name parts of a model's linear layers, without the output head: what LoRA can target."""
    from torch import nn

    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(names)


def _architecture(name: str, known: Any) -> str:
    """A transformers architecture for `--model_type`; release names such as qwen2_5 mean their family."""
    if name in known:
        return name
    families = sorted((family for family in known if name.startswith(family)), key=len)
    if not families:
        raise ConfigError(f"--model_type: {name}: not an architecture of transformers; {suggest(name, list(known))}")
    return str(families[-1])


def _check_complete(folder: Path, info: dict[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"--model: {folder}: {len(missing)} weights of the architecture are not in its safetensors files "
            f"({', '.join(missing[:3])}); is the download complete?"
        )
    mismatched = [str(entry[0]) for entry in info["mismatched_keys"]]
    if mismatched:
        raise ConfigError(f"--model: {folder}: weights of another shape than config.json says: {mismatched[0]}")


def _check_finite(folder: Path, model: nn.Module) -> None:
    import torch

    for name, weight in model.named_parameters():
        readable = weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta
        if readable and not weight.detach().sum(dtype=torch.float32).isfinite():
            raise ConfigError(
                f"--model: {folder}: {name}: its weights are not finite in {weight.dtype}; get the file again, or "
                "choose another --torch_dtype"
            )
