"""The policy: a decoder with trainable weights, or a frozen one with an adapter on top (`swift.models.tuners`).

Reinforcement learning compares log-probs of the same tokens under the same weights, so dropout is off in
every part of the model unless `--lora_dropout` is given; supervised tuning keeps the model's own.

Adapters to start from: with `tuner_type full` all of them are merged into the weights, in order; otherwise the one
adapter stays separate and is trained on.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swift.errors import ConfigError, ResourceError, first_line, join_problems, suggest, unusable
from swift.models.expert_quantisation import is_expert, quantising_experts
from swift.models.multimodal import is_part, loads_whole, refuse_part, refuse_towers
from swift.models.new_tokens import add_rows, require_trained_rows
from swift.models.quantisation import (
    is_quantised,
    prepare_quantised,
    quantisation_config,
    quantise_without_numbers,
    unpacked,
)
from swift.models.rope import context_of, lengthen
from swift.models.source import locate, read_json, weight_files
from swift.models.tuners import adapter_config, add_adapter, check_ranks, freeze, merge_in
from swift.startup import hush_libraries

if TYPE_CHECKING:
    import torch
    from torch import nn

    from swift.models.arguments import CheckpointArguments, TunerArguments
    from swift.models.labels import Labels

logger = logging.getLogger(__name__)

Head = Literal["answer", "step", "label"]
HEADS: dict[Head | None, tuple[str, str, int]] = {
    None: ("AutoModelForCausalLM", "CAUSAL_LM", 0),
    "answer": ("AutoModelForSequenceClassification", "SEQ_CLS", 1),
    "step": ("AutoModelForTokenClassification", "TOKEN_CLS", 2),
    "label": ("AutoModelForSequenceClassification", "SEQ_CLS", 0),
}
"""Head of a model -> class of transformers, task of PEFT, and labels: a score of an answer, or right and wrong of each
step; 0 is as many as `Labels` says."""


def set_labels(config: Any, head: Head | None, labels: Labels | None = None) -> None:
    """Give a config the labels of a head, of a classifier those that are given."""
    if head == "label":
        assert labels is not None, "a classifier has labels"
        config.num_labels, config.problem_type = labels.num, labels.problem
    elif head is not None:
        config.num_labels = HEADS[head][2]


def load_policy(
    args: TunerArguments,
    *,
    device: torch.device | str | None = None,
    model_dropout: bool = False,
    reward_head: Head | None = None,
) -> nn.Module:
    """The model to train, in training mode; only trainable parameters require a gradient.

    Args:
        args: model, dtype, attention and tuner settings.
        device: where the weights go; None leaves them on the CPU.
        model_dropout: keep the dropout rates of the model's config (supervised tuning); off otherwise.
        reward_head: a head of scores instead of the language model's; a new one where the files have none.

    Returns:
        A transformers causal language model, or classifier, or a `peft.PeftModel` around one.

    Raises:
        ConfigError: missing or incomplete files, unknown architecture, several start adapters for an adapter.
        ResourceError: an attention implementation whose package is not installed.
    """
    from swift.models.towers import recompute_tower

    source = locate(args)
    refuse_part(load_config(source.base, args), source.base, args, HEADS[reward_head][0])
    model = load_base(source.base, args, device=device, model_dropout=model_dropout, reward_head=reward_head)
    if hasattr(model.config, "quantization_config") and is_quantised(model):  # by --quant_method, or in its files
        join_problems([*args.quantised_problems(f"--model: {source.base}")])
    recompute_tower(model, args)
    if args.tuner_type == "full":
        for folder in source.adapters:
            model = merge_in(model, folder)
        model.requires_grad_(True)
        freeze(model, args)
    else:
        model = add_adapter(model, source, args, HEADS[reward_head][1])
    require_trained_rows(model, args)
    return model.train()


def load_for_inference(args: CheckpointArguments, *, device: torch.device | str | None = None) -> nn.Module:
    """The model with all its adapters merged in, frozen and in evaluation mode.

    On quantised weights (`--quant_method`, or files that are quantised) a single adapter stays on top of them.
    """
    source = locate(args)
    config = load_config(source.base, args)
    if source.adapters:
        refuse_part(config, source.base, args)
    elif is_part(type(config)) and not loads_whole(config, args):
        logger.warning(
            "--model: %s: only its text part is loaded; images, video and audio are not supported", source.base
        )
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
    reward_head: Head | None = None,
) -> Any:
    """The causal language model in `folder`, every weight but a new `reward_head` read from its safetensors files.

    On the device "meta" the weights have names, shapes and types, which are all that is read of the files.

    Raises:
        ConfigError, ResourceError: see `load_policy`; also when the files lack weights of the model.
    """
    import transformers
    from torch import nn
    from transformers.modeling_utils import get_hf_quantizer

    from swift.models.autocast import set_autocast

    config = load_config(folder, args)
    set_labels(config, reward_head, getattr(args, "labels", None))
    if not model_dropout:
        clear_config_dropout(config)
    dtype = pick_dtype(args.torch_dtype, device)
    plain, placed = unpacked(config), _placed(folder, config, args, device)
    quantised = "device_map" in placed
    kind = getattr(transformers, class_of(config, args, reward_head))
    if is_of_transformers(config):
        _without_weights(folder, config, kind)
    try:
        with (
            quiet_loading(),
            unusable(f"--model: {folder}: its weights cannot be loaded"),
            quantising_experts(placed["quantization_config"])
            if getattr(args, "quant_experts", False)
            else contextlib.nullcontext(),
        ):
            if str(device) == "meta":
                if quantised:
                    get_hf_quantizer(copy.copy(config), placed["quantization_config"], placed["device_map"], True, {})
                if quantised or plain is not None:  # packed weights have other names and shapes
                    return _without_weights(folder, plain or config, kind)
                kind = kind._model_mapping.get(type(config), kind)  # one for several architectures needs a folder
                placed = {"state_dict": _on_meta(folder), "device_map": {"": device}}
            model, info = kind.from_pretrained(
                folder if str(device) != "meta" else None,
                config=config,
                dtype=dtype,
                attn_implementation=_attention_for(config, args.attn_impl),
                trust_remote_code=args.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **placed,
            )
    except ImportError as error:
        of_flash = args.attn_impl == "flash_attn" and "flash" in str(error).lower()
        subject, fix = (
            (f"--attn_impl: {args.attn_impl}", "; use --attn_impl sdpa") if of_flash else (f"--model: {folder}", "")
        )
        raise ResourceError(f"{subject}: {first_line(error)}{fix}") from error
    if quantised:
        prepare_quantised(model, dtype)
    if plain is not None:
        model._weight_conversions = None  # it is saved as it is
    set_autocast(model, getattr(args, "autocast", None))
    _check_weights(folder, model, info, reward_head)
    add_rows(model, args)
    if not model_dropout:
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
    return model.to(device) if device is not None and not quantised else model


def _placed(folder: Path, config: Any, args: CheckpointArguments, device: torch.device | str | None) -> dict[str, Any]:
    """Arguments of from_pretrained for a model that is quantised, and then placed, while it is loaded, or unpacked."""
    import transformers

    chosen = None
    if getattr(args, "quant_method", None):
        chosen = quantisation_config(args, pick_dtype(args.torch_dtype, device))
        if hasattr(config, "quantization_config"):
            raise ConfigError(f"--quant_method: bnb: the weights in {folder} are quantised already; leave it out")
    if unpacked(config) is not None:
        return {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    if chosen is None and not hasattr(config, "quantization_config"):
        return {}
    return {"quantization_config": chosen, "device_map": {"": device or "cpu"}}


def _on_meta(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the files, without data."""
    from transformers.modeling_utils import load_state_dict

    return {name: one for file in weight_files(folder) for name, one in load_state_dict(file, "meta").items()}


def class_of(config: Any, args: CheckpointArguments, reward_head: Head | None) -> str:
    """The class of transformers that makes the model."""
    from swift.models.reward_classes import ensure_reward_class

    if reward_head in ("answer", "label"):
        ensure_reward_class(config)
    whole = reward_head is None and loads_whole(config, args)
    return "AutoModelForImageTextToText" if whole else HEADS[reward_head][0]


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
    """The architecture's config; `--model_type` replaces the one written in config.json, `lengthen` its context.

    Raises:
        ConfigError: an architecture that transformers lacks, that needs repository code, or is multimodal.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    written = read_json(folder / "config.json")
    refuse_towers(written, str(folder), sees=args.SEES)
    model_type = _architecture(args.model_type, CONFIG_MAPPING) if args.model_type else written.get("model_type")
    if model_type not in CONFIG_MAPPING and "auto_map" in written and not args.trust_remote_code:
        raise ConfigError(
            f"--model: {folder}: its architecture needs Python code from its repository; "
            "read that code, then set --trust_remote_code true"
        )
    for name, value in _numbers(written):
        if not abs(value) <= sys.float_info.max or (name == "rope_theta" and value <= 0):
            raise ConfigError(
                f"--model: {folder}: config.json: {name} {str(value)[:20]}: the model computes NaN; correct it"
            )
    hush_libraries()  # of a part that is not loaded, a config may warn
    with unusable(f"--model: {folder}: config.json cannot be used"):
        if args.model_type and model_type != written.get("model_type"):
            config = CONFIG_MAPPING[model_type].from_dict({**written, "model_type": model_type})
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code, local_files_only=True)
    lengthen(config, args)
    return config


def is_of_transformers(config: Any) -> bool:
    """Whether no code of a repository makes the model of a config."""
    from transformers import CONFIG_MAPPING

    kind = config.model_type
    return kind in CONFIG_MAPPING and type(config) is CONFIG_MAPPING[kind]  # its values() would import all families


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of a config and of the configs in it; lists may hold bounds, such as Mamba's, that are infinite."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield name, value


def context_length(args: CheckpointArguments) -> int | None:
    """The longest sequence of the model in tokens; see `context_of`."""
    return context_of(load_config(locate(args).base, args), args)


def pick_dtype(name: str | None, device: torch.device | str | None = None) -> torch.dtype:
    """`--torch_dtype` as torch's type; None means float32 on the CPU and bfloat16 elsewhere."""
    import torch

    if name:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    on_cpu = torch.device(device).type == "cpu" if device is not None else not torch.cuda.is_available()
    return torch.float32 if on_cpu else torch.bfloat16


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Suppresses messages and progress bars of libraries that read and write weights."""
    from transformers.utils import logging

    from swift.models.sharded import quiet_accelerator

    hush_libraries()
    quiet_accelerator()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def clear_config_dropout(config: Any) -> None:
    """Sets every dropout rate of a config, and of those in it, to 0, under whatever name the architecture has."""
    for name, value in list(vars(config).items()):
        if name in getattr(config, "sub_configs", {}) and value is not None:
            clear_config_dropout(value)
        is_rate = name.endswith(("dropout", "_pdrop", "dropout_prob", "dropout_rate"))
        if is_rate and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, 0.0)


def check_policy(args: TunerArguments, reward_head: Head | None = None, *, weights: bool = True) -> Any:
    """Refuses a model that cannot be trained, and names and shapes that do not fit it, without reading its weights.

    Args:
        args: model and tuner settings.
        reward_head: see `load_policy`.
        weights: whether there are files of weights, whose names and shapes are read; the config is enough.

    Returns:
        The policy on the device "meta"; None where code of a repository, which may need real tensors, makes it.

    Raises:
        ConfigError, ResourceError: see `load_policy`.
    """
    from swift.models.towers import recompute_tower

    source = locate(args, require_weights=weights)
    config = load_config(source.base, args)
    refuse_part(config, source.base, args, HEADS[reward_head][0])
    if not is_of_transformers(config):
        return None
    if weights:
        model = load_base(source.base, args, device="meta", model_dropout=True, reward_head=reward_head)
    else:
        model = from_config(config, args, reward_head)
    if getattr(args, "quant_experts", False) and not any(map(is_expert, *zip(*model.named_parameters(), strict=True))):
        raise ConfigError("--quant_experts: true: the model has no experts that are one parameter; leave it out")
    if hasattr(config, "quantization_config") and unpacked(config) is None:
        join_problems([*args.quantised_problems(f"--model: {source.base}")])
    recompute_tower(model, args)
    if args.tuner_type == "full":
        for folder in source.adapters:
            model = merge_in(model, folder)
        freeze(model, args)
        require_trained_rows(model, args)
        return model
    task = HEADS[reward_head][1]
    if source.adapters:
        policy = add_adapter(model, source, args, task)
    else:
        adapter_config(model, args, task)
        kind = "lora" if args.tuner_type == "vera" else args.tuner_type  # whose start is computed from weights
        dora = args.use_dora and not weights  # plans count its magnitudes
        policy = add_adapter(
            model, source, dataclasses.replace(args, tuner_type=kind, init_weights="true", use_dora=dora), task
        )
    if args.changes_base:
        check_ranks(policy, args)
    require_trained_rows(policy, args)
    return policy


def from_config(config: Any, args: TunerArguments, reward_head: Head | None = None) -> Any:
    """The model on the device "meta", from its config alone."""
    import torch
    import transformers

    from swift.models.autocast import set_autocast

    clear_config_dropout(config)
    set_labels(config, reward_head, getattr(args, "labels", None))
    with quiet_loading(), torch.device("meta"):
        model = getattr(transformers, class_of(config, args, reward_head)).from_config(
            config,
            dtype=pick_dtype(args.torch_dtype, "meta"),
            attn_implementation="eager" if _attention_for(config, args.attn_impl) == "eager" else "sdpa",
        )
    if getattr(args, "quant_method", None):
        dtype = pick_dtype(args.torch_dtype, "meta")
        quantise_without_numbers(model, quantisation_config(args, dtype), dtype)
    set_autocast(model, args.autocast)
    return model


def _without_weights(folder: Path, config: Any, kind: Any) -> Any:
    """A model on the meta device, made after a look at the files: nothing has the size of a wrong number of a config.

    Raises:
        ConfigError: config.json does not fit the weights.
    """
    import torch
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    with unusable(f"--model: {folder}: its weights cannot be loaded"):
        for file in weight_files(folder):
            if file.exists() and not file.is_file():
                raise ConfigError(f"--model: {file}: no regular file")
            with safe_open(file, framework="numpy") as tensors:
                sizes |= {key: math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    with quiet_loading(), unusable(f"--model: {folder}: no such model can be made"), torch.device("meta"):
        model = kind.from_config(config)
    if not hasattr(config, "quantization_config"):
        for name, tensor in model.state_dict().items():
            if sizes.get(name, tensor.numel()) != tensor.numel():
                raise _shape_error(folder, name)
    return model


def _shape_error(folder: Path, name: str) -> ConfigError:
    return ConfigError(f"--model: {folder}: weights of another shape than config.json says: {name}")


def _architecture(name: str, known: Any) -> str:
    """A transformers architecture for `--model_type`; release names such as qwen2_5 mean their family."""
    if name in known:
        return name
    families = sorted((family for family in known if name.startswith(family)), key=len)
    if not families:
        raise ConfigError(f"--model_type: {name}: not an architecture of transformers; {suggest(name, list(known))}")
    return str(families[-1])


def _check_weights(folder: Path, model: Any, info: dict[str, Any], reward_head: Head | None) -> None:
    """Refuses files whose weights are incomplete (but for a new `reward_head`), of another shape, or not finite."""
    import torch

    missing = sorted(info["missing_keys"])
    if reward_head:
        missing = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if missing:
        raise ConfigError(
            f"--model: {folder}: {len(missing)} weights of the architecture are not in its safetensors files "
            f"({', '.join(missing[:3])}); is the download complete?"
        )
    for mismatch in info["mismatched_keys"]:
        raise _shape_error(folder, str(mismatch[0]))
    for name, weight in model.named_parameters():
        readable = weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta
        readable = readable and not hasattr(weight, "quant_state")
        if readable and not weight.detach().sum(dtype=torch.float32).isfinite():
            raise ConfigError(
                f"--model: {folder}: {name}: its weights are not finite in {weight.dtype}; get the file again, or "
                "choose another --torch_dtype"
            )
