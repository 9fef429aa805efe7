"""The segments of a packed stream, and what a layer's attention does in them beside a softmax of scaled products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


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


def in_autocast_type(*states: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the type in which SDPA would compute."""
    device_type = states[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return states
    return tuple(one.to(torch.get_autocast_dtype(device_type)) for one in states)


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
