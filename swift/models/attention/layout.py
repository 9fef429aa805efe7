"""The segments of a packed stream, and the kernel that computes their attention.

flash    flash-attn, with `--attn_impl flash_attn`
flex     FlexAttention, with `--attn_impl flex_attention`, and on CUDA if a trial agrees with rows
rows     masked SDPA: everything else, and every layer that the others cannot compute
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from swift.errors import first_line
from swift.models.attention.flash import FlashSegments
from swift.models.attention.flex import FlexSegments
from swift.models.attention.rows import SegmentRows
from swift.models.attention.spans import PLAIN, GroupSpans, Span, Variant, attended

Kernel = Literal["rows", "flex", "flash"]
View = TypeVar("View")

KERNELS: dict[Kernel, Any] = {
    "rows": SegmentRows,
    "flex": FlexSegments,
    "flash": FlashSegments,
}

logger = logging.getLogger("swift.models")

TRIAL_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of two kernels on standard normal states, relative to the largest value (TF32 included)."""


class SegmentLayout:
    """The segments of one packed stream, with each kernel's view of them, made once for all layers.

    Args:
        groups: the segments in stream order; together they are the whole stream.
        device: of the stream.
    """

    def __init__(self, groups: Sequence[GroupSpans], device: torch.device | str = "cpu") -> None:
        self.groups = list(groups)
        self.device = torch.device(device)
        self.longest = max(
            group.prompt.length + max((span.length for span in group.completions), default=0) for group in self.groups
        )
        self.images = any(group.images for group in self.groups)
        """Whether there are some that see themselves."""
        self._views: dict[Any, Any] = {}

    def view_of(self, kind: Callable[[Sequence[GroupSpans], torch.device], View]) -> View:
        """The segments as a kernel of this kind takes them, made once."""
        if kind not in self._views:
            self._views[kind] = kind(self.groups, self.device)
        return self._views[kind]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        variant: Variant = PLAIN,
        kernel: Kernel | None = None,
    ) -> Tensor:
        """Attention of every segment to its prompt and itself.

        Args:
            query: [1, H, T, D] over the packed stream.
            key: [1, K, T, D]; query heads h * H / K and following see key/value head h.
            value: [1, K, T, E].
            scale: softmax scale; None means 1 / sqrt(D).
            variant: of the layer; a window that is wider than every sequence is none.
            kernel: None means the best of the device.

        Returns:
            [1, T, H, E]
        """
        variant = variant.within(self.longest)
        if kernel is not None and not KERNELS[kernel].computes(variant, images=self.images):
            kernel = None
        if kernel is None and variant.is_plain:
            heads = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
            autocasts = torch.is_autocast_enabled(query.device.type)
            dtype = torch.get_autocast_dtype(query.device.type) if autocasts else query.dtype
            kernel = kernel_for(query.device, dtype, heads)
        view: SegmentRows | FlexSegments | FlashSegments = self.view_of(KERNELS[kernel or "rows"])
        return view.attend(query, key, value, scale, variant)


@dataclass(eq=False, slots=True)
class DecodeLayout:
    """Attention of one new token per row to its row of the key/value cache.

    mask: [R, 1, 1, C] bool, False where the cache holds left padding, or None when no row is padded.
    """

    mask: Tensor | None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant = PLAIN
    ) -> Tensor:
        """Query heads of a key/value head become query positions, so that no head is ever repeated.

        Args:
            query: [R, H, 1, D].
            key: [R, K, C, D]; the last position is that of the new token.
            value: [R, K, C, E].
            scale: softmax scale; None means 1 / sqrt(D).
            variant: of the layer.

        Returns:
            [R, 1, H, E]
        """
        num_rows, num_heads, _, head_size = query.shape
        num_kv = key.shape[1]
        grouped = query.view(num_rows, num_kv, -1, head_size)
        mask, variant = self.mask, variant.within(key.shape[2])
        if variant.window is not None:
            key, value = key[:, :, -variant.window :], value[:, :, -variant.window :]
            mask = None if mask is None else mask[..., -variant.window :]
        if variant.sinks is not None:
            variant = replace(variant, sinks=variant.sinks.view(num_kv, -1))
        found = attended(grouped, key, value, mask=mask, scale=scale, variant=variant)
        return found.reshape(num_rows, 1, num_heads, value.shape[3])


@lru_cache(maxsize=64)
def kernel_for(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int, int]) -> Kernel:
    """The best kernel for states on a device; `heads`: H, K, D and E of `SegmentLayout.attend`."""
    if device.type != "cuda":
        return "rows"
    obstacle = flex_obstacle(device, dtype, heads)
    if obstacle is None:
        return "flex"
    logger.warning("attention: %s; packed segments use masked SDPA instead of FlexAttention, which is slower", obstacle)
    return "rows"


def flex_obstacle(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int, int]) -> str | None:
    """Why FlexAttention cannot be used for such states, in a few words; None when it agrees with masked SDPA."""
    if dtype not in TRIAL_TOLERANCE:
        return f"FlexAttention is not tried in {str(dtype).removeprefix('torch.')}"
    groups = [GroupSpans(Span(0, 150), (Span(150, 70), Span(220, 200))), GroupSpans(Span(420, 30), (Span(450, 1),))]
    layout = SegmentLayout(groups, device)
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv, head_size, value_size = heads
    shapes = [(1, num_heads, 451, head_size), (1, num_kv, 451, head_size), (1, num_kv, 451, value_size)]
    states = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    def outcome(kernel: Kernel) -> list[Tensor]:
        query, key, value = (state.clone().requires_grad_() for state in states)
        output = layout.attend(query, key, value, None, kernel=kernel)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), (query, key, value))]

    try:
        with torch.autocast(device.type, enabled=False), torch.enable_grad():
            pairs = list(zip(outcome("flex"), outcome("rows"), strict=True))
    except Exception as error:  # compilers and drivers fail in types of their own; the reason is shown
        return f"FlexAttention fails here ({type(error).__name__}: {first_line(error)[:120]})"
    gap = float(torch.stack([((a - b).abs().max() / b.abs().max()).float() for a, b in pairs]).max())  # or NaN
    return None if gap <= TRIAL_TOLERANCE[dtype] else f"FlexAttention differs from masked SDPA by {gap:.1e}"
