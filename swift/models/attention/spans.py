"""The segments of a packed stream, and what a layer's attention does in them beside a softmax of scaled products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens of the stream from `start`, each `step` behind the one before it."""

    start: int
    length: int
    step: int = 1

    @property
    def stop(self) -> int:
        """One past the last token, of a span without gaps."""
        return self.start + self.length

    @property
    def index(self) -> Tensor:
        """[length] where its tokens stand in the stream."""
        return torch.arange(self.start, self.start + self.length * self.step, self.step)


@dataclass(frozen=True, slots=True)
class GroupSpans:
    """A prompt segment and the completion segments that attend to it; they follow it in the stream.

    prefixes: how many tokens of the prompt each completion sees; empty where each sees all. images: parts of the prompt
    whose tokens also see those after them in the same part.
    """

    prompt: Span
    completions: tuple[Span, ...]
    prefixes: tuple[int, ...] = ()
    images: tuple[Span, ...] = ()

    def seen(self) -> list[tuple[Span, Span]]:
        """Each completion behind the part of the prompt that it sees."""
        pairs = zip_longest(self.prefixes, self.completions)
        return [(self.prompt if size is None else Span(self.prompt.start, size), own) for size, own in pairs]


def packed_rows(lengths: Sequence[int]) -> list[GroupSpans]:
    """Rows of a stream, one after the other, that attend only to themselves."""
    ends = accumulate(lengths)
    return [GroupSpans(Span(end - length, length), ()) for length, end in zip(lengths, ends, strict=True) if length]


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
    return tuple(state.to(torch.get_autocast_dtype(device_type)) for state in states)


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
    if variant.softcap is None and variant.sinks is None:
        grouped = query.shape[-3] != key.shape[-3]
        if grouped and mask is not None:  # with both, GPUs have no kernel but the one that keeps all scores
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped and mask is None
        )

    def product(left: Tensor, right: Tensor) -> Tensor:  # heads of one key/value head are rows of one matrix
        return (left.reshape(*right.shape[:-2], -1, left.shape[-1]) @ right).view(*left.shape[:-1], -1)

    scores = product(query, key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if variant.sinks is None:
        return product(scores.softmax(-1).to(value.dtype), value)
    sinks = variant.sinks.float().expand(scores.shape[:-1])[..., None]
    return product(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(value.dtype), value)
