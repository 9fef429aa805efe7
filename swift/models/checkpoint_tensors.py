"""The tensors of the checkpoint that a policy in training would make, readable one layer at a time.

A policy's module is not shaped like its checkpoint: an adapter splits a weight into a base and what is trained, trained
modules stand beside their originals, quantised weights are packed, wrappers add parts to names, some architectures fuse
experts when they load, and ZeRO-3 or FSDP2 leave only a shard of each parameter on a rank. `checkpoint_units` lists
what a saved and merged checkpoint would hold, by layer, each tensor with the parameters it is made of; reading needs
those parameters gathered. The base weights are never edited: W + scaling B A (or what PEFT makes of another adapter) is
a new float32 tensor, rounded once to the checkpoint's type.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swift.errors import ConfigError
from swift.models.autocast import autocast_dtype
from swift.models.quantisation import dequantised, is_quantised_layer
from swift.models.sharded import gathered, whole_shape
from swift.models.source import weight_files
from swift.models.tuners import relative_to_base

Whole = Callable[[Tensor], Tensor]
"""Gives the whole tensor of a parameter that is gathered at the moment."""

_TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "base_layer")
"""Parts of module names that wrappers add and that no checkpoint has."""


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor: name and type in the checkpoint, the parameters it is made of, and how.

    identity: equal for two tensors that are the same weights (a head tied to the embedding).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[Tensor, ...]
    read: Callable[[Whole], Tensor]
    identity: tuple[int, ...]


@dataclass(slots=True)
class CheckpointUnit:
    """Tensors that an engine must get together: a decoder layer, an embedding with the head tied to it, a norm."""

    key: str
    tensors: list[CheckpointTensor] = field(default_factory=list)

    @property
    def is_layer(self) -> bool:
        """Whether it is one of many: its name ends in a number."""
        return self.key.rpartition(".")[2].isdigit()

    @property
    def nbytes(self) -> int:
        """Size of its tensors in the checkpoint's types."""
        return sum(torch.Size(tensor.shape).numel() * tensor.dtype.itemsize for tensor in self.tensors)


def checkpoint_units(model: nn.Module) -> list[CheckpointUnit]:
    """What a checkpoint of `model` holds, in the model's order; no collective.

    Args:
        model: a transformers model, possibly under PEFT, DDP or DeepSpeed's engine.

    Raises:
        ConfigError: an adapter that cannot be merged into weights, or a head that was trained apart from the
            embedding to which the model ties it.
    """
    tensors = checkpoint_tensors(model)
    _check_ties(base_model(model), tensors)
    partner = _tied_partners(tensors)
    units: dict[str, CheckpointUnit] = {}
    for tensor in tensors:
        place = partner.get(tensor.name, tensor.name)
        layer = re.match(r".*?\.\d+(?=\.)", place)  # with the modules inside, also where these are many
        key = layer[0] if layer else place.rpartition(".")[0]
        units.setdefault(key, CheckpointUnit(key)).tensors.append(tensor)
    return list(units.values())


def checkpoint_tensors(model: nn.Module) -> list[CheckpointTensor]:
    """The same without units, also of a model whose tied weights were trained apart."""
    return list(_walk(base_model(model), ""))


def own_parameters(model: nn.Module) -> dict[int, str]:
    """Names of the parameters of the model below an adapter, by identity."""
    return {id(parameter): _clean(name) for name, parameter in base_model(model).named_parameters()}


def read_unit(model: nn.Module, unit: CheckpointUnit, whole: Whole) -> dict[str, Tensor]:
    """A unit's tensors under the names of the checkpoint's files, while its sources are gathered."""
    tensors = {tensor.name: tensor.read(whole) for tensor in unit.tensors}
    return as_saved(base_model(model), tensors)


def describe_unit(model: nn.Module, unit: CheckpointUnit) -> dict[str, Tensor]:
    """The same as `read_unit`, without data: tensors on the meta device; no collective."""
    tensors = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in unit.tensors}
    return as_saved(base_model(model), tensors)


def read_adapter(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The active adapter alone, as `save_pretrained` would write it; a collective when parameters are sharded.

    Returns:
        the content of adapter_config.json, and copies of the adapter's tensors under peft's names, bit for bit.

    Raises:
        ConfigError: the policy has no adapter.
    """
    from peft import get_peft_model_state_dict

    policy = _unwrapped(model)
    if not is_peft(policy):
        raise ConfigError("--vllm_enable_lora: true: the policy has no adapter to send; use --tuner_type lora")
    name = policy.active_adapter
    config = policy.peft_config[name]
    biases = config.bias != "none"  # those of the base are trained, too
    own = {
        key: value
        for key, value in policy.named_parameters()
        if f".{name}." in f"{key}." or (biases and key.endswith(".bias"))
    }
    with gathered(own.values()) as whole:
        state = {key: whole(value) for key, value in own.items()}
        found = get_peft_model_state_dict(policy, state_dict=state, adapter_name=name, save_embedding_layers=False)
        tensors = {key: found[key].clone().contiguous() for key in sorted(found)}
    described = json.loads(json.dumps({**config.to_dict(), "inference_mode": True}, default=sorted))  # sets
    return relative_to_base(policy, described, tensors)


def computing_dtype(model: nn.Module) -> torch.dtype | None:
    """The type of products where it is not that of the parameters: FSDP2 shards float32 masters; with `--autocast`.

    None: the parameters are what is computed with.
    """
    for module in _unwrapped(model).modules():
        if hasattr(module, "_get_fsdp_state"):
            dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
            return dtype
    return autocast_dtype(model)


def as_saved_unsharded(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A gathered state dict as it would be without sharding: tied weights once, in the type computed with."""
    base, dtype = base_model(model), computing_dtype(model)
    tied = _tied_names(base)
    kept = {name: value for name, value in state.items() if tied.get(name) not in state}
    if dtype is None:
        return kept
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in kept.items()}


def base_model(model: nn.Module) -> Any:
    """The transformers model below DDP, DeepSpeed's engine and PEFT."""
    model = _unwrapped(model)
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def is_peft(model: nn.Module) -> bool:
    """Whether the policy is an adapter on a base model."""
    from peft import PeftModel

    return isinstance(_unwrapped(model), PeftModel)


def _unwrapped(model: nn.Module) -> Any:
    """Without torch.compile's module, and DDP and DeepSpeed's engine, both of which call the model `module`."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(getattr(model, "module", None), nn.Module) else model


def as_saved(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo what loading did to names and shapes (fused experts, renamed parts), as `save_pretrained` does."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def is_rearranged(model: Any, folder: Path) -> bool:
    """Whether a checkpoint has names that `model` lacks, because loading rearranges them, such as those of experts."""
    from safetensors import safe_open

    known = set(model.state_dict())
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            if not known.issuperset(tensors.keys()):
                return True
    return False


def load_rearranged(model: Any, folder: Path) -> None:
    """Load a checkpoint into `model` as `from_pretrained` does; needs the memory of the weights once more."""
    from swift.models.policy import quiet_loading

    with quiet_loading():
        loaded = type(model).from_pretrained(
            folder, dtype=model.dtype, attn_implementation="eager", use_safetensors=True, local_files_only=True
        )
    model.load_state_dict(loaded.state_dict())


# --- ties --------------------------------------------------------------------------------------------------------


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def _tied_names(model: nn.Module) -> dict[str, str]:
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _tied_partners(tensors: Sequence[CheckpointTensor]) -> dict[str, str]:
    """Tensors that are the weights of an earlier one, whatever the config calls it -> the earlier one's name."""
    first: dict[tuple[int, ...], str] = {}
    partners = {}
    for tensor in tensors:
        earlier = first.setdefault(tensor.identity, tensor.name)
        if earlier != tensor.name:
            partners[tensor.name] = earlier
    return partners


def _check_ties(model: nn.Module, tensors: Sequence[CheckpointTensor]) -> None:
    by_name = {tensor.name: tensor for tensor in tensors}
    for tied, other in _tied_names(model).items():
        if tied in by_name and other in by_name and by_name[tied].identity != by_name[other].identity:
            raise ConfigError(
                f"policy: {tied}: the model ties it to {other}, but the adapter changes only one of them, which no "
                "engine can load; leave both out of --target_modules and --modules_to_save, or use --tuner_type full"
            )


# --- modules -----------------------------------------------------------------------------------------------------


def _walk(module: nn.Module, prefix: str) -> Iterator[CheckpointTensor]:
    """Every tensor below `module`, under its name in the checkpoint."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, AuxiliaryTrainingWrapper):
        yield from _trained_instead(module, prefix)
        return
    if isinstance(module, BaseTunerLayer):
        yield from _tuned(module, prefix)
        return
    hidden = module._non_persistent_buffers_set
    quantised = is_quantised_layer(module)
    if quantised:
        yield _dequantised(prefix, module)
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name not in hidden and not (quantised and name == "weight"):
            yield _as_is(prefix + name, tensor)
    for name, child in module.named_children():
        yield from _walk(child, prefix if name in _TRANSPARENT else f"{prefix}{name}.")


def _as_is(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> CheckpointTensor:
    if tensor.is_quantized:
        raise ConfigError(f"policy: {name}: quantised weights cannot be sent to an engine; load it in 16 bits")
    kept = dtype or tensor.dtype
    return CheckpointTensor(
        name, kept, whole_shape(tensor), (tensor,), lambda whole: whole(tensor).to(kept), (id(tensor),)
    )


def _trained_instead(module: Any, prefix: str) -> Iterator[CheckpointTensor]:
    """A module of `modules_to_save`: the trained copy takes the original's names and types."""
    from peft.utils.other import ModulesToSaveWrapper

    if not isinstance(module, ModulesToSaveWrapper):
        raise ConfigError(
            f"policy: {prefix.rstrip('.')}: {type(module).__name__} cannot be merged into a checkpoint; "
            "use --modules_to_save, or --target_modules with LoRA"
        )
    active = module.active_adapters
    if not active or module.disable_adapters:
        yield from _walk(module.original_module, prefix)
        return
    types = {tensor.name: tensor.dtype for tensor in _walk(module.original_module, prefix)}
    for tensor in _walk(module.modules_to_save[active[0]], prefix):
        yield _as_is(tensor.name, tensor.sources[0], types.get(tensor.name))


def _dequantised(prefix: str, layer: Any) -> CheckpointTensor:
    """The weight of a quantised layer as it computes with it, in the type that the other weights have."""
    weight, dtype = layer.weight, layer.unquantised_dtype
    shape = (layer.out_features, layer.in_features)
    return CheckpointTensor(
        f"{prefix}weight", dtype, shape, (weight,), lambda whole: dequantised(layer, whole).to(dtype), (id(weight), 0)
    )


def _tuned(layer: Any, prefix: str) -> Iterator[CheckpointTensor]:
    """A layer with adapters: its base, with what the active ones add.

    PEFT adapts a bare parameter (fused experts) with a wrapper of its own, one around the other; each changes its own.
    """
    active = [] if layer.disable_adapters else layer.active_adapters
    adapters = [name for name in active if name not in layer.merged_adapters and _has(layer, name)]
    lora_bias = getattr(layer, "lora_bias", None)  # by adapter; other kinds than LoRA may change a bias, too
    changes_bias = lora_bias is None or any(lora_bias.get(name) for name in adapters)
    if lora_bias and changes_bias and getattr(layer.get_base_layer(), "bias", None) is None:
        raise ConfigError(
            f"policy: {prefix.rstrip('.')}: lora_bias: the layer has no bias to merge it into; "
            "use --vllm_enable_lora true"
        )
    sources, only = tuple(layer.parameters()), getattr(layer, "parameter_name", None)
    if only:
        sources = (layer.get_param(), *layer.lora_A.parameters(), *layer.lora_B.parameters())
    for tensor in _walk(layer.base_layer, prefix):
        part = tensor.name.removeprefix(prefix)
        if adapters and (part == only if only else part != "bias" or changes_bias):
            read = functools.partial(_read_merged, layer, adapters, part, tensor.dtype, sources)
            yield replace(tensor, sources=sources, read=read, identity=(*tensor.identity, id(layer)))
        else:
            yield tensor


def _has(layer: Any, adapter: str) -> bool:
    """Whether an adapter touches this layer."""
    return any(adapter in getattr(layer, name) for name in layer.adapter_layer_names)


def _read_merged(
    layer: Any, adapters: Sequence[str], part: str, dtype: torch.dtype, sources: Sequence[Tensor], whole: Whole
) -> Tensor:
    """PEFT's merge on a float32 copy of the layer; on quantised weights, which have LoRA alone, its parts."""
    base = layer.get_base_layer()
    if is_quantised_layer(base):
        merged = dequantised(base, whole) if part == "weight" else whole(base.bias).float()
        for name in adapters:
            if part == "bias":
                merged = merged + whole(layer.lora_B[name].bias) * layer.scaling[name]
            elif name in layer.lora_variant:
                merged = layer.lora_variant[name].merge_safe(layer, name, merged)
            else:
                down, up = whole(layer.lora_A[name].weight), whole(layer.lora_B[name].weight)
                merged = merged + layer.scaling[name] * (up.float() @ down.float())
        return merged.to(dtype)
    copies = {id(source): nn.Parameter(torch.empty(0)) for source in layer.parameters()}  # of what has no part in it
    for source in sources:
        copies[id(source)] = nn.Parameter(whole(source).to(torch.float32, copy=True), requires_grad=False)
    twin = copy.deepcopy(layer, copies).float()
    twin.merge()
    return twin.get_base_layer().get_parameter(part).detach().to(dtype)  # type: ignore[no-any-return]
