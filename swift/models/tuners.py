"""Trained parameters of a model: all but frozen ones, or an adapter of PEFT on the frozen model.

An adapter whose start is subtracted from the base weights (PiSSA, OLoRA) cannot be used without them. So it is saved,
and sent to engines, as the difference to its start: W + s(B A - B0 A0), a plain LoRA adapter of twice the rank with
A' = [A; A0] and B' = [B, -B0]. A resumed run computes the same start again and reads the first halves.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, first_line, unusable
from swift.flags import flags_of
from swift.models.adapter_config import check_finite
from swift.models.expert_targets import HEADS, fused_projections, resolve
from swift.models.multimodal import (
    NOT_LOADED,
    THINKER,
    check_reached,
    frozen_modules,
    frozen_parameters,
    frozen_parts,
    full_modules,
)
from swift.models.quantisation import is_quantised
from swift.models.source import ModelSource, read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from swift.models.arguments import TunerArguments


@dataclass(frozen=True, slots=True)
class Tuner:
    """A kind of adapter: its config class in `peft`, and the settings that are fields there (setting -> field)."""

    config: str
    fields: Mapping[str, str]


TUNERS = {
    "lora": Tuner(
        "LoraConfig",
        {
            "lora_rank": "r",
            "lora_alpha": "lora_alpha",
            "lora_dropout": "lora_dropout",
            "use_dora": "use_dora",
            "use_rslora": "use_rslora",
            "rank_pattern": "rank_pattern",
            "alpha_pattern": "alpha_pattern",
        },
    ),
    "vera": Tuner(
        "VeraConfig",
        {
            "vera_rank": "r",
            "vera_projection_prng_key": "projection_prng_key",
            "vera_dropout": "vera_dropout",
            "vera_d_initial": "d_initial",
        },
    ),
    "ia3": Tuner("IA3Config", {}),
    "boft": Tuner(
        "BOFTConfig",
        {"boft_block_size": "boft_block_size", "boft_block_num": "boft_block_num", "boft_dropout": "boft_dropout"},
    ),
    "miss": Tuner("MissConfig", {"lora_rank": "r"}),
}


# --- adapters --------------------------------------------------------------------------------------------------------


def add_adapter(model: Any, source: ModelSource, args: TunerArguments, task: str = "CAUSAL_LM") -> Any:
    """`model` frozen below a `peft.PeftModel` with a fresh adapter, or with the one of `--adapters`.

    Raises:
        ConfigError: modules that the model does not have, an unfit adapter, or several.
    """
    from swift.models.lora_products import multiply_in_input_type

    if len(source.adapters) > 1:
        raise ConfigError(
            f"--adapters: {' '.join(map(str, source.adapters))}: {args.tuner_type} training starts from one adapter; "
            "merge the others into the model with `swift merge-lora`, or use --tuner_type full"
        )
    first = source.adapters[0] if source.adapters else None
    policy = _continued(model, first, args) if first else _fresh(model, source, args, task)
    multiply_in_input_type(policy)
    return policy


def _fresh(model: Any, source: ModelSource, args: TunerArguments, task: str) -> Any:
    from peft import get_peft_model, get_peft_model_state_dict

    _check_names(model, args)
    config = adapter_config(model, args, task)
    config.base_model_name_or_path = str(source.base)
    try:
        policy = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(
            f"--tuner_type: {args.tuner_type}: {first_line(error)}; linear modules: {', '.join(linear_names(model))}"
        ) from error
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # equal runs write equal adapter_config.json files
    if isinstance(getattr(config, "target_parameters", None), set):
        config.target_parameters = sorted(config.target_parameters)
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = policy.get_base_model().named_modules()
    check_reached(model, [name for name, layer in layers if isinstance(layer, BaseTunerLayer)], args)
    if args.changes_base:
        check_ranks(policy, args)
        tensors = get_peft_model_state_dict(policy, save_embedding_layers=False)
        policy.adapter_start = {name: tensor.clone() for name, tensor in tensors.items() if _axis(name) is not None}
    return policy


def expert_lines(policy: Any, args: TunerArguments) -> list[str]:
    """The number of parameters that an adapter trains on fused experts, as a line of the plan; no line for 0."""
    dropout = "; no dropout, which PEFT has on modules alone" if args.lora_dropout else ""
    layers: Iterable[Any] = policy.modules()
    count = sum(
        parameter.numel()
        for layer in layers
        if getattr(layer, "num_experts", 0) > 1 and hasattr(layer, "parameter_name")
        for matrices in (layer.lora_A, layer.lora_B)
        for parameter in matrices.parameters()
        if parameter.requires_grad
    )
    return [f"adapter: {count:,} parameters on experts{dropout}"] if count else []


MAMBA, NO_LORA = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}, ["conv1d", "out_proj"]
"""Families in which PEFT refuses LoRA on these modules."""


def adapter_config(model: Any, args: TunerArguments, task: str) -> Any:
    """PEFT's config of the adapter that the settings describe.

    Raises:
        ConfigError: values that do not go together.
    """
    import peft

    tuner = TUNERS[args.tuner_type]
    options = {field: getattr(args, name) for name, field in tuner.fields.items()}
    options = {field: value for field, value in options.items() if value is not None}
    targets: Any = args.target_regex or list(args.target_modules)
    excluded: list[str] = sorted(HEADS) if task == "TOKEN_CLS" else []
    if len(args.target_modules) > 1 and "all-linear" in targets:
        targets = _beside_linear(model, targets, args)
    if targets in ([], ["all-linear"]):
        targets = "all-linear"
        if args.tuner_type == "lora" and getattr(model.config, "model_type", None) in MAMBA:
            excluded += NO_LORA
    if args.tuner_type == "lora":
        if found := None if "llm" in frozen_parts(model, args) else resolve(model, targets):
            targets, options["target_parameters"] = found.modules, sorted(found.parameters)
            if found.widths and getattr(args, "quant_experts", False):
                raise ConfigError(
                    f"--target_modules: {' '.join(args.target_modules)}: has the projections of experts, which "
                    "--quant_experts true quantises; name others, or leave it out"
                )
            ranks, alphas = {}, {}
            for name, width in found.widths.items():  # each projection in it keeps its rank and scale
                ranks[rf".*\.{name}"] = width * args.lora_rank
                alphas[rf".*\.{name}"] = (math.sqrt(width) if args.use_rslora else width) * args.lora_alpha
            options["rank_pattern"] = {**ranks, **args.rank_pattern}
            options["alpha_pattern"] = {**alphas, **args.alpha_pattern}
        options["target_parameters"] = sorted({*options.get("target_parameters", []), *args.target_parameters}) or None
        options["lora_dropout"] = _lora_dropout(args, options["target_parameters"])
        options["init_lora_weights"] = {"true": True, "false": False}.get(args.init_weights, args.init_weights)
    if args.tuner_type == "ia3":
        targets, options["feedforward_modules"] = _ia3_targets(model, targets)
    full = full_modules(model, args)
    if any(is_quantised(model.get_submodule(name)) for name in full):
        raise ConfigError("--full_towers: true: weights that are quantised do not learn; leave it out")
    absent = NOT_LOADED if model.config.model_type == THINKER else ()  # here, but not in other programs
    if others := [*frozen_modules(model, args), *full, *absent]:
        patterns = [rf"{re.escape(name)}(\..*)?" for name in others]
        options["exclude_modules"] = "|".join([*patterns, *(rf"(.*\.)?{name}" for name in excluded)])
    elif excluded:
        options["exclude_modules"] = excluded
    with unusable(f"--tuner_type: {args.tuner_type}: its settings cannot be used"):
        return getattr(peft, tuner.config)(
            task_type=task,
            target_modules=targets,
            modules_to_save=[*args.modules_to_save, *full] or None,
            **options,
        )


def _beside_linear(model: Any, targets: Sequence[str], args: TunerArguments) -> list[str]:
    """The names that all-linear stands for, and those beside it."""
    if args.tuner_type == "ia3":
        raise ConfigError("--target_modules: all-linear: for ia3 it is PEFT's choice alone; name the modules")
    names = {*linear_names(model), *(name.rpartition(".")[2] for name in fused_projections(model))} - HEADS
    names -= set(NO_LORA) if getattr(model.config, "model_type", None) in MAMBA else set()
    return sorted(names.union(targets) - {"all-linear"})


def _lora_dropout(args: TunerArguments, parameters: Any) -> float:
    """The rate, which PEFT has before modules alone."""
    if not parameters:
        return args.lora_dropout or 0.0
    if args.lora_dropout not in (None, 0.0, args.USUAL_DROPOUT):
        raise ConfigError(
            f"--lora_dropout: {args.lora_dropout}: adapters on parameters, such as the experts of a mixture, have "
            "no dropout in PEFT; give --lora_dropout 0"
        )
    return 0.0


def _ia3_targets(model: Any, targets: Any) -> tuple[Any, Any]:
    """Targets, and those of them whose input is scaled instead of their output; PEFT has both by architecture."""
    from peft.utils.constants import (
        TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
        TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
    )

    family = model.config.model_type
    feedforward = TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(family, [])
    if isinstance(targets, list):
        return targets, [name for name in targets if name.rpartition(".")[2] in feedforward]
    if targets != "all-linear":
        return targets, feedforward
    if family not in TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING:
        raise ConfigError(
            f"--target_modules: all-linear: PEFT has no choice of modules for ia3 on {family}; "
            f"name them: {', '.join(linear_names(model))}"
        )
    return TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING[family], feedforward


def _check_names(model: nn.Module, args: TunerArguments) -> None:
    """Refuses names that fit no module, which PEFT ignores silently, and quantised modules in `modules_to_save`."""
    modules = dict(model.named_modules())
    patterns = {  # as PEFT reads them
        "target_modules": [(name, rf"(.*\.)?{re.escape(name)}") for name in args.target_modules],
        "target_regex": [(args.target_regex, args.target_regex)] if args.target_regex else [],
        "modules_to_save": [(name, f".*{re.escape(name)}") for name in args.modules_to_save],
        "rank_pattern": [(name, rf"(.*\.)?({name})") for name in args.rank_pattern],
        "alpha_pattern": [(name, rf"(.*\.)?({name})") for name in args.alpha_pattern],
    }
    frozen = tuple(frozen_modules(model, args))
    inside = [name for name in modules if name in frozen or name.startswith(tuple(f"{root}." for root in frozen))]
    if args.target_regex and (hidden := [name for name in inside if re.fullmatch(args.target_regex, name)]):
        raise ConfigError(
            f"--target_regex: {args.target_regex}: fits {hidden[0]}, which --freeze_vit, --freeze_aligner or "
            "--freeze_llm leaves out; set that to false, or change the expression"
        )
    modules = {name: module for name, module in modules.items() if name not in inside}
    if "llm" in frozen_parts(model, args) and args.target_parameters:
        raise ConfigError(
            f"--target_parameters: {args.target_parameters[0]}: --freeze_llm leaves it out; drop one of the two"
        )
    matrices = sorted(name for name, weight in model.named_parameters() if weight.ndim >= 2)
    for suffix in args.target_parameters:
        if not any(f".{name}".endswith(f".{suffix}") for name in matrices):
            ends = sorted({".".join(name.split(".")[-2:]) for name in matrices})
            raise ConfigError(
                f"--target_parameters: {suffix}: fits no parameter of the model; valid: {', '.join(ends)}"
            )
    fused = fused_projections(model) if args.tuner_type == "lora" else {}
    for flag, named in patterns.items():
        for given, pattern in named:
            found = [module for name, module in modules.items() if re.fullmatch(pattern, name)]
            if flag.startswith("target") and any(re.fullmatch(pattern, name) for name in fused):
                continue
            if not found and given != "all-linear":
                least = 1 if flag == "modules_to_save" else 2  # dimensions of a weight: adapters change matrices
                weighty = {name for name, weight in model.named_parameters() if weight.ndim >= least}
                names = {name.removesuffix(".weight").rpartition(".")[2] for name in weighty}
                valid = ["all-linear"] * flag.startswith("target") + sorted(names)
                raise ConfigError(f"--{flag}: {given}: fits no module of the model; valid: {', '.join(valid)}")
            if flag == "modules_to_save" and any(map(is_quantised, found)):
                raise ConfigError(
                    f"--modules_to_save: {given}: its weights are quantised and do not learn; use --target_modules"
                )


def check_ranks(policy: nn.Module, args: TunerArguments) -> None:
    """Refuses ranks above the number of singular values, of which PiSSA and OLoRA make matrices of another shape."""
    for name, layer in policy.named_modules():
        for adapter in getattr(layer, "lora_A", {}):
            directions = min(layer.in_features, layer.out_features)
            if directions < layer.r[adapter]:
                raise ConfigError(
                    f"--lora_rank: {layer.r[adapter]}: --init_weights {args.init_weights} finds {directions} "
                    f"directions in {name.removeprefix('base_model.model.')}; use at most these"
                )


def check_head(policy: Any, args: TunerArguments) -> None:
    """Refuses an adapter on the output layer, for a loss that multiplies by the weight of that layer itself."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = policy.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        name = next(name for name, module in policy.named_modules() if module is head).rpartition(".")[2]
        setting = "adapters" if args.adapters else "target_regex" if args.target_regex else "target_modules"
        raise ConfigError(
            f"--{setting}: {name}: the loss is computed from the weight of this layer, so an adapter on it would not "
            f"learn; leave it out, or use --modules_to_save {name}, which trains the whole layer"
        )


def _continued(model: Any, folder: Path, args: TunerArguments) -> Any:
    from peft import PeftConfig

    with adapter_errors(folder):
        start: Any = PeftConfig.from_pretrained(str(folder))
        kind = str(start.peft_type.value).lower()
    if kind != args.tuner_type:
        fix = f"use --tuner_type {kind}" if kind in TUNERS else "merge it with `swift merge-lora`"
        raise ConfigError(f"--adapters: {folder}: an adapter of type {kind}, not {args.tuner_type}; {fix}")
    if kind == "lora" and args.init_weights != "true":
        raise ConfigError(
            f"--init_weights: {args.init_weights}: --adapters {folder} is the start; leave one of them out"
        )
    _check_unchanged(start, folder, args)
    for name, field in TUNERS[kind].fields.items():
        if name.endswith("dropout"):  # a rate left from supervised tuning must not enter RL
            rate = _lora_dropout(args, start.target_parameters) if kind == "lora" else getattr(args, name)
            setattr(start, field, rate or 0.0)
    return with_adapter(model, folder, config=start, is_trainable=True)


def _check_unchanged(start: Any, folder: Path, args: TunerArguments) -> None:
    """Refuses settings of a fresh adapter that the one to start from does not have; a default counts as not given."""
    targets = {name: name for name in ("target_modules", "target_parameters", "modules_to_save")}
    fields = {**TUNERS[args.tuner_type].fields, **targets, "target_regex": "target_modules"}
    cls: Any = type(args)
    for name, field in fields.items():
        given, has = getattr(args, name), getattr(start, field, None) or ""
        same = set(given) == set(has) - HEADS if isinstance(given, list) else given == has
        if not same and not name.endswith("dropout") and given != flags_of(cls)[name].default:
            words = " ".join(given) if isinstance(given, list) else given
            raise ConfigError(f"--{name}: {words}: --adapters {folder} was made with another value; leave it out")


def merge_in(model: Any, folder: Path) -> Any:
    """`model` with an adapter merged into its weights; on quantised weights the adapter stays on top of them.

    On the device "meta" it is found out whether the adapter fits, and `model` comes back as it was.

    Raises:
        ConfigError: the adapter does not fit, or is a second one on quantised weights.
    """
    from peft import PeftModel

    quantised = is_quantised(model)
    if quantised and isinstance(model, PeftModel):
        raise ConfigError(
            f"--adapters: {folder}: a second adapter on quantised weights; merge the first one with "
            "`swift merge-lora`, or leave --quant_method out"
        )
    policy = with_adapter(model, folder)
    with adapter_errors(folder):
        if model.device.type == "meta":
            return policy.unload()
        _untie(policy)
        return policy if quantised else policy.merge_and_unload(safe_merge=True)


def _untie(policy: nn.Module) -> None:
    """Gives adapted layers that share their weight (an embedding, the head) one of their own to merge into."""
    from torch import nn

    owners = Counter(id(weight) for _, weight in policy.named_parameters(remove_duplicate=False))
    for name, layer in policy.named_modules():
        if name.endswith(".base_layer") and owners[id(getattr(layer, "weight", None))] > 1:
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


def with_adapter(model: Any, folder: Path, **options: Any) -> Any:
    """`model` below a `peft.PeftModel` with the adapter in `folder`. Raises ConfigError: it does not fit."""
    from peft import PeftModel

    with adapter_errors(folder):
        check_finite(folder)
        policy: Any = PeftModel.from_pretrained(model, str(folder), **options)
    _check_taken(policy, folder)
    return policy


def _check_taken(policy: Any, folder: Path) -> None:
    """Refuses a LoRA adapter with tensors that the model has no place for, of which PEFT only warns."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return
    with safe_open(file, framework="numpy") as tensors:
        given = {name for name in tensors.keys() if ".lora_" in name}  # noqa: SIM118
    lost = given - set(get_peft_model_state_dict(policy, save_embedding_layers=False))
    if lost:
        raise ConfigError(
            f"--adapters: {folder}: {len(lost)} of {len(given)} tensors have no place in the model (such as "
            f"{min(lost)}); give the base model it was trained on"
        )


def adapter_errors(folder: Path) -> AbstractContextManager[None]:
    """Turns peft's failures on an unfit adapter into one line that names the folder."""
    return unusable(f"--adapters: {folder}: does not fit the model", "; give the base model it was trained on")


def linear_names(model: nn.Module) -> list[str]:
    """The last name parts of a model's linear layers, without the output head: what an adapter can target."""
    from torch import nn

    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(names)


# --- an adapter whose start was taken out of the base ----------------------------------------------------------------


def _axis(name: str) -> int | None:
    """Where the rank of a LoRA matrix is, by its name in a file; None for other tensors."""
    found = re.search(r"\.lora_(?:embedding_)?([AB])\b", name)
    return None if found is None else "AB".index(found[1])


def relative_to_base(
    policy: Any, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of an adapter relative to the original base model; see the module."""
    import torch

    start: dict[str, Tensor] | None = getattr(policy, "adapter_start", None)
    if start is None:
        return config, tensors
    factor = math.sqrt(2) if config["use_rslora"] else 2
    config = {
        **config,
        "r": 2 * config["r"],
        "lora_alpha": factor * config["lora_alpha"],
        "rank_pattern": {name: 2 * rank for name, rank in config["rank_pattern"].items()},
        "alpha_pattern": {name: factor * alpha for name, alpha in config["alpha_pattern"].items()},
        "init_lora_weights": True,
    }
    joined = dict(tensors)
    for name, first in start.items():
        axis = _axis(name)
        first = first.to(tensors[name])
        joined[name] = torch.cat([tensors[name], -first if axis else first], axis or 0)
    return config, joined


def make_relative(policy: Any, folder: Path) -> None:
    """Rewrites the adapter that `save_pretrained` wrote to `folder`, for a policy with an `adapter_start`."""
    from safetensors.torch import load_file, save_file

    weights, described = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    config, tensors = relative_to_base(policy, read_json(described), load_file(weights))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    described.write_text(json.dumps(config, indent=2, sort_keys=True))


def load_relative(policy: Any, folder: Path) -> None:
    """Reads an adapter that `make_relative` wrote into the policy, whose start must be the one it is relative to.

    Raises:
        ConfigError: this start is another one.
    """
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    for name, first in policy.adapter_start.items():
        axis = _axis(name) or 0
        tensors[name], start = tensors[name].chunk(2, axis)
        if not torch.equal(start.abs(), first.abs().cpu()):
            raise ConfigError(
                f"--resume_from_checkpoint: {folder}: --init_weights gives other matrices here than where it was made; "
                "resume it there, or start from its weights with --adapters"
            )
    set_peft_model_state_dict(policy, tensors)


# --- full tuning -----------------------------------------------------------------------------------------------------


def freeze(model: nn.Module, args: TunerArguments) -> None:
    """Takes the gradient from the parameters that the freeze settings name; those of `trainable_*` keep it.

    Raises:
        ConfigError: a name or expression fits no parameter, or nothing is left to train.
    """
    named = dict(model.named_parameters())
    frozen = frozen_parameters(model, args)
    if args.freeze_parameters_ratio:
        ends = list(accumulate(parameter.numel() for parameter in named.values()))
        frozen |= set(list(named)[: bisect_right(ends, int(ends[-1] * args.freeze_parameters_ratio))])
    for flag in ("freeze_parameters", "trainable_parameters"):
        regex = getattr(args, f"{flag}_regex")
        patterns = [(flag, text, rf"\A{re.escape(text)}") for text in getattr(args, flag)]
        if regex:
            patterns.append((f"{flag}_regex", regex, regex))
        for setting, text, pattern in patterns:
            chosen = {name for name in named if re.search(pattern, name)}
            if not chosen:
                first = ", ".join(list(named)[:2])
                raise ConfigError(f"--{setting}: {text}: fits no parameter's name; the first ones: {first}")
            frozen = frozen | chosen if flag == "freeze_parameters" else frozen - chosen
    if len(frozen) == len(named):
        raise ConfigError("--freeze_parameters: every parameter is frozen; name some with --trainable_parameters")
    for name in frozen:
        named[name].requires_grad_(False)
