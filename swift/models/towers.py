"""Learning rates and recomputation of a vision tower and its aligner that differ from the language model's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from swift.errors import ConfigError, counted
from swift.models.attention.interface import transformers_model
from swift.models.multimodal import Part, loads_whole, no_tower, parts_of, parts_of_parameters

RATES: dict[Part, str] = {"vit": "vit_lr", "aligner": "aligner_lr"}
"""Parts -> the settings of their learning rates."""


def rates_of(args: Any) -> dict[Part, float]:
    """The learning rates that parts of a model have of their own."""
    rates = {part: getattr(args, name) for part, name in RATES.items()}
    return {part: rate for part, rate in rates.items() if rate is not None}


def rate_lines(policy: Any, args: Any) -> list[str]:
    """The groups of parameters with their learning rates, as a line of the plan; none if all have one rate.

    Raises:
        ConfigError: a language model, or nothing is trained in a part that has a rate of its own.
    """
    rates = rates_of(args)
    if not rates:
        return []
    if not loads_whole(policy.config, args):
        name = RATES[next(iter(rates))]
        raise no_tower(name, getattr(args, name))
    model = transformers_model(policy)
    sizes: dict[Part, int] = {"llm": 0, "head": 0, "vit": 0, "aligner": 0}
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, part in parts_of_parameters(model).items():
        sizes[part] += trained[name].numel() if name in trained else 0
    for part, rate in rates.items():
        if not sizes[part]:
            raise ConfigError(
                f"--{RATES[part]}: {rate:g}: nothing is trained there; use --freeze_{part} false, or leave it out"
            )
    groups = [
        f"{part} {rates.get(part, args.learning_rate):g} ({counted(size, 'parameter')})"
        for part, size in sizes.items()
        if size
    ]
    return [f"learning rates: {', '.join(groups)}"]


def give_rates(optimizer: Optimizer, policy: nn.Module, rates: Mapping[Part, float]) -> None:
    """Split the groups of an optimizer that has not stepped yet, so that parts have their rates; others come first."""
    model = transformers_model(policy)
    named = dict(model.named_parameters())
    part_of = {named[name]: part for name, part in parts_of_parameters(model).items()}
    rates = {"llm": optimizer.defaults["lr"], **rates}
    whole = list(optimizer.param_groups)
    optimizer.param_groups.clear()
    for part, rate in rates.items():
        for group in whole:
            of_part = [one for one in group["params"] if (part_of[one] if part_of[one] in rates else "llm") == part]
            if of_part:
                optimizer.add_param_group({**group, "params": of_part, "lr": rate})


def recompute_tower(model: Any, args: Any) -> None:
    """Let the tower compute its layers again in the backward pass if it is to differ from the language model in that.

    Hooks switch it on, or off, while the tower is computed: trainers switch the layers of a model all together.

    Raises:
        ConfigError: a language model, or layers that cannot be computed again.
    """
    wanted = args.vit_gradient_checkpointing
    if wanted is not None and not loads_whole(model.config, args):
        raise no_tower("vit_gradient_checkpointing", wanted)
    if args.tuner_type != "full" and not args.freeze_vit:
        name_inputs(model)
    if wanted in (None, args.gradient_checkpointing):
        return

    def layers_in(module: nn.Module) -> list[Any]:
        return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]

    def switch(value: bool, module: nn.Module, *_: Any) -> None:
        for layer in layers_in(module):
            layer.gradient_checkpointing = value

    towers = towers_of(model)
    layers = [layer for tower in towers for layer in layers_in(tower)]
    if wanted and not layers:
        raise ConfigError(
            "--vit_gradient_checkpointing: true: transformers cannot compute this tower's layers again; leave it out"
        )
    for layer in layers:
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    for tower in towers:
        tower.register_forward_pre_hook(functools.partial(switch, wanted))
        tower.register_forward_hook(functools.partial(switch, not wanted), always_call=True)


def towers_of(model: Any) -> list[Any]:
    """The largest modules that are parts of the tower of a whole model."""
    parts = parts_of(model)
    names = [name for name, part in parts.items() if part == "vit" and parts.get(name.rpartition(".")[0]) != "vit"]
    return [model.get_submodule(name) for name in names]


def name_inputs(model: Any) -> None:
    """Tell transformers the first layer of a tower (Qwen3-VL's) to which adapters on it let it give a gradient.

    Reentrant checkpointing, which TRL uses for adapters under ZeRO-3, trains nothing behind inputs without one.
    """
    for tower in towers_of(model):
        if hasattr(tower, "patch_embed"):
            tower._input_embed_layer = "patch_embed"
