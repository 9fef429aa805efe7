"""Registration of packed attention with transformers' table of attention functions.

A layout travels as `attention_layout` through the layers of any decoder that uses `AttentionInterface`, so no model is
patched. The name of packed attention in a model's config selects the kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from swift.models.attention.layout import DecodeLayout, Kernel, SegmentLayout
from swift.models.attention.rows import SegmentRows
from swift.models.attention.sequence_parallel import SpreadLayout, spread_decoder
from swift.models.attention.spans import Variant

KERNEL_OF: dict[str, Kernel | None] = {"swift_segments": None, "swift_block_mask": "flex", "swift_varlen": "flash"}
"""Name of packed attention in a model's config -> kernel; None means the best kernel of the device."""


def _segment_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_layout: SegmentLayout | SpreadLayout | DecodeLayout | SegmentRows | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers; see `AttentionInterface` for the contract.

    Raises:
        NotImplementedError: the layer does not pass the layout on, or needs more than a `Variant`.
    """
    if attention_layout is None:
        raise NotImplementedError("its layers do not pass the packed layout on to attention")
    if extras.get("position_bias") is not None:  # packed attention would leave it out
        raise NotImplementedError("its attention takes position_bias")
    window = extras.get("sliding_window")
    variant = Variant(window if window and window > 0 else None, extras.get("softcap"), extras.get("s_aux"))
    if isinstance(attention_layout, SegmentLayout | SpreadLayout):
        kernel = KERNEL_OF[module.config._attn_implementation]
        return attention_layout.attend(query, key, value, scaling, variant, kernel), None
    return attention_layout.attend(query, key, value, scaling, variant), None


def enable_packed_attention(model: nn.Module, kernel: Kernel | None = None) -> None:
    """Make `model` (a transformers decoder, possibly under PEFT) take `attention_layout` in its forward."""
    from transformers import AttentionInterface

    for name in KERNEL_OF:
        AttentionInterface.register(name, _segment_attention)
    chosen = next(name for name, known in KERNEL_OF.items() if known == kernel)
    spread_decoder(decoder_of(model))
    set_attention(model, chosen)


def set_attention(model: nn.Module, name: str) -> None:
    """Choose the attention function of the language model; towers keep theirs."""
    base = transformers_model(model)
    if hasattr(base.base_model.config, "text_config"):
        base = base.base_model
    parts = {part: getattr(base.config, part, None) for part in getattr(base.config, "sub_configs", {})}
    if parts.get("text_config") is None:
        base.set_attn_implementation(name)
        return
    own = {part: config._attn_implementation for part, config in parts.items() if config is not None}
    base.set_attn_implementation({"": base.config._attn_implementation, **own, "text_config": name})


def is_packed(model: nn.Module) -> bool:
    """Whether the layers of `model` ask an `attention_layout`."""
    return transformers_model(model).config.get_text_config()._attn_implementation in KERNEL_OF


def decoder_of(model: nn.Module) -> Any:
    """The layers of the language model below its head."""
    base = transformers_model(model)
    return base.get_decoder() if hasattr(base.base_model.config, "vision_config") else base.base_model


def transformers_model(model: nn.Module) -> Any:
    """The transformers model below wrappers (DDP, PEFT)."""
    model = getattr(model, "module", model)
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model
