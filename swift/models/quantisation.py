"""Models whose linear layers hold 4-bit or 8-bit weights of bitsandbytes (QLoRA, arXiv:2305.14314).

The weights stay as they are: an adapter learns on top, and what leaves the process (a weight sync) is dequantised.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from swift.errors import ResourceError

if TYPE_CHECKING:
    import torch
    from torch import nn


def quantisation_config(args: Any, dtype: torch.dtype) -> Any:
    """The `BitsAndBytesConfig` of transformers for the settings; None without `--quant_method`.

    Args:
        args: settings of a model, possibly `QuantArguments`.
        dtype: of the weights that are not quantised, and of products with those that are.

    Raises:
        ResourceError: bitsandbytes is not installed.
    """
    if not getattr(args, "quant_method", None):
        return None
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
        bnb_4bit_quant_storage=args.bnb_4bit_quant_storage,
    )


def settle(layer: Any, dtype: torch.dtype) -> None:
    """Marks a quantised layer with the type that its weight has when it is dequantised for others.

    It also keeps bitsandbytes from repacking the weight in forward passes without gradients on CPUs with AVX-512: they
    would compute in bfloat16, whatever the model's type, and leave weights that cannot be dequantised.
    """
    layer.unquantised_dtype = dtype
    layer.support_avx512bf16_for_cpu = False


def is_quantised(model: nn.Module) -> bool:
    """Whether any layer of a model holds quantised weights."""
    return any(map(is_quantised_layer, model.modules()))


def is_quantised_layer(layer: nn.Module) -> bool:
    """Whether a layer's own weight is one of bitsandbytes."""
    return type(layer._parameters.get("weight")).__name__ in ("Params4bit", "Int8Params")


def rounds_activations(model: nn.Module) -> bool:
    """Whether products with 8-bit weights round activations, too, so that no dequantised copy has equal log-probs."""
    return any(type(one).__name__ == "Int8Params" for one in model.parameters())


def dequantised(layer: nn.Module) -> torch.Tensor:
    """The weight [out, in] that a quantised layer computes with, in float32."""
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(layer).float()  # type: ignore[no-untyped-call]
