"""A saved LoRA adapter on a model: which tensors it changes, and to what."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swift.errors import ConfigError, first_line
from swift.models.checkpoint_tensors import CheckpointTensor, checkpoint_units

CHANGES_BASE = re.compile("pissa|olora|corda|loftq|lora_ga", re.IGNORECASE)
"""Initialisations of an adapter that change the base weights, which the receiver does not have."""


def merged_tensors(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[CheckpointTensor]:
    """The tensors that differ from the model's once the adapter is merged; `read` computes them, in float32.

    PEFT builds the layers around the model's own parameters, in a copy of its module tree.

    Args:
        model: without PEFT; is not changed.
        config: adapter_config.json.
        tensors: those that peft saves, complete.

    Raises:
        ValueError: the tensors fit neither the config nor the model.
        ConfigError: an adapter whose merged weights cannot be computed from the model's.
    """
    from peft import LoraConfig, get_peft_model

    if (method := str(config.get("peft_type") or "LORA")) != "LORA":
        raise ConfigError(f"peft_type {method}: only LoRA can be merged into weights")
    check_start(config)
    own = dict(model.named_parameters(remove_duplicate=False))
    trains_biases = config.get("bias", "none") != "none"  # PEFT loads them into the base
    shared = [tensor for name, tensor in own.items() if not (trains_biases and name.endswith(".bias"))]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in [*shared, *model.buffers()]})
    options = {**config, "init_lora_weights": True, "inference_mode": True, "peft_type": "LORA"}
    with torch.random.fork_rng():
        try:
            policy = get_peft_model(twin, LoraConfig.from_peft_type(**options))  # type: ignore[arg-type]
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"adapter_config.json: {first_line(error)}") from error
    load_adapter(policy, tensors)
    found = [tensor for unit in checkpoint_units(policy) for tensor in unit.tensors]
    return [
        tensor
        for tensor in found
        if (tensor.name in own and tensor.sources[0] is not own[tensor.name]) or len(tensor.sources) > 1
    ]


def load_adapter(policy: Any, tensors: Mapping[str, Tensor]) -> None:
    """Puts the tensors of an adapter's file into a `peft.PeftModel`, also where it has none yet (on the meta device).

    Raises:
        ValueError: they are not those of the adapter.
    """
    from peft import get_peft_model_state_dict

    own = policy.state_dict(keep_vars=True)
    needed = get_peft_model_state_dict(policy, state_dict=own, save_embedding_layers=False)
    wanted = get_peft_model_state_dict(policy, state_dict=own, save_embedding_layers=True)  # PEFT saves them at times
    problems = [f"{name} is missing" for name in needed.keys() - tensors.keys()]
    problems += [f"{name} is no tensor of such an adapter on this model" for name in tensors.keys() - wanted.keys()]
    problems += [
        f"{name} has shape {list(tensor.shape)} instead of {list(wanted[name].shape)}"
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    if problems:
        raise ValueError("; ".join(sorted(problems)[:3]))
    names = {id(tensor): name for name, tensor in own.items()}
    loaded = {
        names[id(tensor)]: tensors[key] if tensor.is_meta else tensors[key].to(tensor) for key, tensor in needed.items()
    }
    policy.load_state_dict(loaded, strict=False, assign=True)


def check_start(config: Mapping[str, Any]) -> None:
    """Raises ConfigError: an adapter that belongs to other base weights than those of the model."""
    start = config.get("init_lora_weights")
    if isinstance(start, str) and CHANGES_BASE.match(start):
        raise ConfigError(f"init_lora_weights {start}: changes the base weights too; send merged weights")
    if config.get("ensure_weight_tying"):
        raise ConfigError("ensure_weight_tying: true: ties an adapter of the embedding to the head; cannot be merged")
