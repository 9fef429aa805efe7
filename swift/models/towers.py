"""Recomputation of a vision tower that differs from the language model's."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from swift.errors import ConfigError
from swift.models.multimodal import loads_whole, no_tower, parts_of


def recompute_tower(model: Any, args: Any) -> None:
    """Let the tower compute its layers again in the backward pass if it is to differ from the language model in that.

    Hooks switch it on, or off, while the tower is computed: trainers switch the layers of a model all together.

    Raises:
        ConfigError: a language model, or layers that cannot be computed again.
    """
    wanted = args.vit_gradient_checkpointing
    if not loads_whole(model.config, args):
        if wanted is not None:
            raise no_tower("vit_gradient_checkpointing", wanted)
        return
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
