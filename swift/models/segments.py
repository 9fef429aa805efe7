"""The segments of a packed stream, and the kernel that computes their attention.

`SegmentLayout` travels through a model's layers to the attention function. Which kernel it asks is decided in
`kernel_for`, per device, once:

    cuda    `segment_flex`    FlexAttention, if a trial agrees with the next
    others  `segment_rows`    masked SDPA

A layer whose attention is more than a softmax of scaled products says so by a `Variant`; `segment_rows` knows all of
them. A window that is wider than every sequence of the stream is none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from swift.models.segment_rows import SegmentRows

Kernel = Literal["flex", "rows"]

logger = logging.getLogger("swift.models")

TRIAL_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of two kernels on standard normal states, relative to the largest value (TF32 included)."""


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens of the stream from `start`."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class GroupSpans:
    """A prompt segment and the completion segments that attend to it; they follow it in the stream."""

    prompt: Span
    completions: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """What a layer's attention does beside softmax(scale q k).

    window: a query sees itself and the window - 1 tokens before it. softcap: a score s becomes c tanh(s / c)
    (arXiv:2408.00118, section 2). sinks: a further logit of each head [H], whose share of the softmax goes nowhere
    (arXiv:2508.10925, section 2.2).
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing beside it."""
        return self.window is None and self.softcap is None and self.sinks is None

    def within(self, num_tokens: int) -> Variant:
        """The same for sequences of at most `num_tokens` tokens."""
        return self if self.window is None or self.window < num_tokens else replace(self, window=None)


PLAIN = Variant()


def attended(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float | None, variant: Variant
) -> Tensor:
    """Masked attention of one variant; its window is in the mask.

    Args:
        query: [..., A, L, D].
        key: [..., B, C, D], with A a multiple of B.
        value: [..., B, C, E].
        mask: bool, broadcast to [..., A, L, C]: what is seen; None for everything.
        scale: softmax scale; None means 1 / sqrt(D).
        variant: its sinks broadcast to [..., A, L].

    Returns:
        [..., A, L, E]
    """
    grouped = query.shape[-3] != key.shape[-3]
    if variant.softcap is None and variant.sinks is None:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    if grouped:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if variant.sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    sinks = variant.sinks.float().expand(scores.shape[:-1])[..., None]
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(value.dtype) @ value


class _Attends(Protocol):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor: ...


class SegmentLayout:
    """The segments of one packed stream, with what attention needs to know about them, made once for all layers.

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
        self._made: dict[Kernel, _Attends] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant = PLAIN
    ) -> Tensor:
        """Attention of every segment to its prompt and itself.

        Args:
            query: [1, H, T, D] over the packed stream.
            key: [1, K, T, D]; query heads h * H / K and following see key/value head h.
            value: [1, K, T, E].
            scale: softmax scale; None means 1 / sqrt(D).
            variant: of the layer.

        Returns:
            [1, T, H, E]
        """
        variant = variant.within(self.longest)
        if not variant.is_plain:
            return self._rows().attend(query, key, value, scale, variant)
        heads = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        return self.using(kernel_for(query.device, _computed_in(query), heads)).attend(query, key, value, scale)

    def _rows(self) -> SegmentRows:
        """The kernel that knows every variant."""
        from swift.models.segment_rows import SegmentRows

        rows = self.using("rows")
        assert isinstance(rows, SegmentRows)
        return rows

    def using(self, kernel: Kernel) -> _Attends:
        """One kernel's view of this layout."""
        if kernel not in self._made:
            self._made[kernel] = _make(kernel, self.groups, self.device)
        return self._made[kernel]


def _make(kernel: Kernel, groups: Sequence[GroupSpans], device: torch.device) -> _Attends:
    if kernel == "flex":
        from swift.models.segment_flex import FlexSegments

        return FlexSegments(groups, device)
    from swift.models.segment_rows import SegmentRows

    return SegmentRows(groups, device)


def _computed_in(states: Tensor) -> torch.dtype:
    """The type in which attention is computed."""
    device_type = states.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states.dtype


@lru_cache(maxsize=64)
def kernel_for(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int, int]) -> Kernel:
    """The kernel for states on a device.

    Args:
        device: where they are.
        dtype: in which attention is computed.
        heads: H, K, D and E of `SegmentLayout.attend`.
    """
    if device.type != "cuda":
        return "rows"
    obstacle = flex_obstacle(device, dtype, heads)
    if obstacle is None:
        return "flex"
    logger.warning("attention: %s; packed segments use masked SDPA instead of FlexAttention, which is slower", obstacle)
    return "rows"


def flex_obstacle(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int, int], *, backward: bool = True
) -> str | None:
    """Why FlexAttention cannot be used for such states, in a few words; None when it agrees with masked SDPA.

    Args:
        device: where it is tried out.
        dtype: of the states.
        heads: H, K, D and E of `SegmentLayout.attend`.
        backward: whether gradients are compared, too.
    """
    if dtype not in TRIAL_TOLERANCE:
        return f"FlexAttention is not tried in {str(dtype).removeprefix('torch.')}"
    groups = [GroupSpans(Span(0, 150), (Span(150, 70), Span(220, 200))), GroupSpans(Span(420, 30), (Span(450, 1),))]
    layout = SegmentLayout(groups, device)
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv, head_size, value_size = heads
    shapes = [(1, num_heads, 451, head_size), (1, num_kv, 451, head_size), (1, num_kv, 451, value_size)]
    states = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    def outcome(kernel: Kernel) -> list[Tensor]:
        query, key, value = (one.clone().requires_grad_(backward) for one in states)
        output = layout.using(kernel).attend(query, key, value, None)
        if not backward:
            return [output]
        return [output, *torch.autograd.grad(output.float().square().sum(), (query, key, value))]

    try:
        with torch.autocast(device.type, enabled=False), torch.set_grad_enabled(backward):
            pairs = list(zip(outcome("flex"), outcome("rows"), strict=True))
    except Exception as error:  # compilers and drivers fail in types of their own; the reason is shown
        return f"FlexAttention fails here ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
    gap = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return None if gap <= TRIAL_TOLERANCE[dtype] else f"FlexAttention differs from masked SDPA by {gap:.1e}"
