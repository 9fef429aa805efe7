"""Experts of a mixture in 4 bits (`--quant_experts`): fused, they are parameters of three dimensions, no linear layers.

Each is quantised as soon as it is read, so the device never holds all of them in 16 bits, and dequantised by
bitsandbytes' parametrisation where a layer uses it. transformers has no setting for this: its function that puts a
weight into a model is wrapped while a model is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def is_expert(name: str, weight: Any) -> bool:
    """Whether a parameter is a projection of all experts of a layer."""
    return bool(weight.ndim == 3 and "experts" in name.split("."))


@contextlib.contextmanager
def quantising_experts(settings: Any) -> Iterator[None]:
    """Models that are loaded within have experts of 4 bits, as the `BitsAndBytesConfig` has them for linear layers.

    transformers' warm-up of the allocator is left out: it would reserve the memory of weights in 16 bits.
    """
    import transformers.core_model_loading as loading
    import transformers.modeling_utils as modeling
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    put, warm_up = loading.set_param_for_module, modeling.caching_allocator_warmup

    def put_quantised(model: Any, name: str, value: Any, *arguments: Any, **named: Any) -> None:
        put(model, name, value, *arguments, **named)
        path, _, last = name.rpartition(".")
        if is_expert(name, value) and value.device.type != "meta":
            replace_parameter_4bit(
                model.get_submodule(path),
                last,
                compress_statistics=settings.bnb_4bit_use_double_quant,
                quant_type=settings.bnb_4bit_quant_type,
            )

    loading.set_param_for_module, modeling.caching_allocator_warmup = put_quantised, lambda *_: None
    try:
        yield
    finally:
        loading.set_param_for_module, modeling.caching_allocator_warmup = put, warm_up
