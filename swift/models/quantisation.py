"""Models whose linear layers hold 4-bit or 8-bit weights of bitsandbytes (QLoRA, arXiv:2305.14314).

The quantised weights are frozen: an adapter is trained on top of them, and a weight sync sends dequantised copies.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
from typing import TYPE_CHECKING, Any

from swift.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


def quantisation_config(args: Any, dtype: torch.dtype) -> Any:
    """The `BitsAndBytesConfig` of transformers for `--quant_method` and its settings.

    Args:
        args: settings of a model, `QuantArguments`.
        dtype: of the weights that are not quantised, and of products with those that are.

    Raises:
        ResourceError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ResourceError(
            "--quant_method: bnb: needs the package bitsandbytes, which is not installed; install it, or leave it out"
        )
    from transformers import BitsAndBytesConfig

    if args.quant_bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=args.bnb_4bit_compute_dtype or dtype,
        # FSDP and ZeRO-3 shard what has a floating type, and compute in one type
        bnb_4bit_quant_storage=args.bnb_4bit_quant_storage
        or (dtype if getattr(args, "shards_weights", False) else "uint8"),
    )


def prepare_quantised(model: Any, dtype: torch.dtype) -> None:
    """Prepares quantised layers for training and for weight syncs; other layers stay as they are.

    Each layer records in `unquantised_dtype` the type of its dequantised weight. bitsandbytes' repacking of weights
    for CPUs with AVX-512 is disabled: repacked layers compute in bfloat16, whatever the model's type, and cannot be
    dequantised. 8-bit layers keep their scales when their weight is moved, as DoRA does in each forward pass. If the
    files are quantised, conversions to their names are dropped, because dequantised tensors have other names.
    """
    layers = [layer for layer in model.modules() if is_quantised_layer(layer)]
    for layer in layers:
        layer.unquantised_dtype = dtype
        layer.support_avx512bf16_for_cpu = False
        if hasattr(layer, "init_8bit_state"):
            layer.init_8bit_state = functools.partial(_take_8bit_state, layer)
    if layers and getattr(model, "_weight_conversions", None):
        packed = "Bnb4bitDeserialize"
        model._weight_conversions = [
            conversion
            for conversion in model._weight_conversions
            if packed not in [type(step).__name__ for step in getattr(conversion, "operations", [])]
        ]


def quantise_without_numbers(model: Any, settings: Any, dtype: torch.dtype) -> None:
    """Give a model on the device "meta" the layers and packed weights that loading it with these settings would make.

    bitsandbytes keeps a table on the device of its first use: the process that calls this loads no weights afterwards.
    """
    import torch
    from transformers.quantizers import AutoHfQuantizer

    with torch.device("meta"):
        AutoHfQuantizer.from_config(settings, pre_quantized=False).preprocess_model(
            model, dtype=dtype, device_map={"": "meta"}
        )
    for layer in filter(_has_own_kind, model.modules()):
        found: Any = layer
        for parameter in layer.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        found.weight._quantize(torch.device("meta"))
    prepare_quantised(model, dtype)


def scales_of(model: nn.Module) -> list[torch.Tensor]:
    """What the weights are dequantised with, which are no parameters."""
    import torch

    found = []
    for layer in filter(_has_own_kind, model.modules()):
        states = [vars(layer.weight), *(vars(state) for state in _states(layer.weight))]
        found += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return found


def _states(weight: Any) -> list[Any]:
    """The state of a 4-bit weight, and that of its scales where these are quantised, too."""
    state = getattr(weight, "quant_state", None)
    return [one for one in (state, getattr(state, "state2", None)) if one is not None]


def count_of(parameter: Any) -> int:
    """How many numbers a parameter stands for, of which two may be packed into a byte."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else parameter.numel()


def _take_8bit_state(layer: Any) -> None:
    """`Linear8bitLt.init_8bit_state`, which takes the scales away from the weight, so that a moved one has none."""
    layer.state.CB, layer.state.SCB = layer.weight.CB, layer.weight.SCB
    layer.weight.CB = None


def unpacked(config: Any) -> Any:
    """The config of a model whose files are packed in MXFP4 (gpt-oss) as that of the weights they are unpacked to when
    they are read, which alone can be trained; None for other models.
    """
    packing = getattr(config, "quantization_config", None)
    method = packing.get("quant_method") if isinstance(packing, dict) else getattr(packing, "quant_method", None)
    if method != "mxfp4":
        return None
    plain = copy.copy(config)
    del plain.quantization_config
    return plain


def is_quantised(model: nn.Module) -> bool:
    """Whether any layer of a model holds quantised weights."""
    return any(map(is_quantised_layer, model.modules()))


def is_quantised_layer(layer: nn.Module) -> bool:
    """Whether a layer's own weight is one of bitsandbytes, or was before it was sharded."""
    return _has_own_kind(layer) or hasattr(layer, "unquantised_dtype")


def _has_own_kind(layer: nn.Module) -> bool:
    """Whether the weight is one of bitsandbytes, which knows its scales; a sharded one is not."""
    return type(layer._parameters.get("weight")).__name__ in ("Params4bit", "Int8Params")


def keep_quant_states(module: nn.Module, device: torch.device) -> None:
    """Before `module` is sharded: 4-bit layers keep what their weights are dequantised with, on the device."""
    for layer in filter(is_quantised_layer, module.modules()):
        found: Any = layer
        found.quant_state = found.weight.quant_state
        found.quant_state.to(device)


def rounds_activations(model: nn.Module) -> bool:
    """Whether products round activations, too, so that no dequantised copy has equal log-probs.

    With 8-bit weights they do, and with 4-bit ones if `--bnb_4bit_compute_dtype` is not the model's type.
    """
    return any(
        layer.unquantised_dtype not in (None, getattr(layer, "compute_dtype", None))
        for layer in model.modules()
        if is_quantised_layer(layer)
    )


def dequantised(layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The weight [out, in] that a quantised layer computes with, in float32; `whole` gives a gathered parameter."""
    from peft.utils.integrations import dequantize_bnb_weight  # dequantize_module_weight replaces the weight

    from swift.models.sharded import is_zero3

    if _has_own_kind(layer) and not is_zero3(layer.weight):
        return dequantize_bnb_weight(layer.weight, getattr(layer, "state", None)).float()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(whole(layer.weight), layer.quant_state).float()  # type: ignore[no-any-return]
