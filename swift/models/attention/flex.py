"""Attention of packed segments by FlexAttention: one kernel over the stream, which skips fully masked blocks.

The stream is filled up to one of few lengths (`filled_length`), for each of which it is compiled; a token of the
filling sees itself only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from swift.models.attention.spans import GroupSpans, Variant, in_autocast_type
from swift.models.transfer import to_device

FILL = 1024
"""Streams are filled up to a multiple of this many tokens at least."""
MOST_COMPILED = 64
"""Versions of a compiled function, by length, type and gradient; beyond, torch would compute all [T, T] scores."""


class FlexSegments:
    """Attention of one layout's segments under one block mask."""

    def __init__(self, groups: Sequence[GroupSpans], device: torch.device | str) -> None:
        numbers = segment_numbers(groups)
        self.num_tokens = numbers[0].shape[0]
        self.num_filling = filled_length(self.num_tokens) - self.num_tokens
        filled = [nn.functional.pad(number, (0, self.num_filling), value=-1) for number in numbers]
        filled[0][self.num_tokens :] -= torch.arange(self.num_filling)
        self.block_mask = _block_mask_of(*(to_device(number, device) for number in filled))

    @staticmethod
    def computes(variant: Variant, *, images: bool) -> bool:
        """Only a softmax of scaled products, of all images."""
        return variant.is_plain

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant) -> Tensor:
        """See `SegmentLayout.attend`."""
        states = in_autocast_type(query, key, value)
        filled = [nn.functional.pad(state, (0, 0, 0, self.num_filling)) for state in states]
        output = _flex_attention(query.device.type)(
            *filled, block_mask=self.block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output[:, :, : self.num_tokens].transpose(1, 2).contiguous()


def filled_length(num_tokens: int) -> int:
    """The length up to which a stream is filled: 1, 2, 3, 4, 6, 8, 12, ... times `FILL`, at most half as much again.

    >>> [filled_length(number) // FILL for number in (1, 1024, 1025, 4097, 8193, 12289)]
    [1, 1, 2, 6, 12, 16]
    """
    step = max(FILL, (1 << (num_tokens - 1).bit_length()) // 4)
    return -(-num_tokens // step) * step


def segment_numbers(groups: Sequence[GroupSpans]) -> list[Tensor]:
    """For each token of the stream: number of its segment, of its prompt, and end of the visible part of the prompt.

    A query attends to earlier keys of its prompt up to that end, and to those of its own segment up to itself. The
    prompt of a token in a prompt is that prompt. Where images see themselves, the number of its image, or -1, is a
    fourth.
    """
    num_tokens = sum(span.length for group in groups for span in (group.prompt, *group.completions))
    segment_T, prompt_T, end_T, image_T = torch.full((4, num_tokens), -1, dtype=torch.long)
    number = 0
    for group in groups:
        prompt = number
        for seen, span in [(group.prompt, group.prompt), *group.seen()]:
            segment_T[span.index], prompt_T[span.index], end_T[span.index] = number, prompt, seen.stop
            number += 1
    images = [image for group in groups for image in group.images]
    for number, image in enumerate(images):
        image_T[image.index] = number
    return [segment_T, prompt_T, end_T, *([image_T] if images else [])]


def _block_mask_of(segment_T: Tensor, prompt_T: Tensor, end_T: Tensor, image_T: Tensor | None = None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = segment_T[query] == segment_T[key]
        before = (key <= query) & (own | ((prompt_T[query] == segment_T[key]) & (key < end_T[query])))
        return before if image_T is None else before | ((image_T[query] == image_T[key]) & (image_T[key] >= 0))

    num_tokens = segment_T.shape[0]
    make = _compiled(create_block_mask, segment_T.device.type)  # else a [T, T] matrix is made on the way
    return make(visible, None, None, num_tokens, num_tokens, segment_T.device)


def _flex_attention(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled(flex_attention, device_type)


@lru_cache(maxsize=4)
def _compiled(function: Any, device_type: str) -> Any:
    """The function, compiled where it runs for speed; on the CPU its definition, which tests use."""
    if device_type == "cpu":
        return function
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(MOST_COMPILED, torch._dynamo.config.recompile_limit)
    return torch.compile(function)
