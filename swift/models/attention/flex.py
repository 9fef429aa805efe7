"""Attention of packed segments by FlexAttention: one kernel over the stream that passes over blocks nobody sees.

The stream is filled up to a multiple of `FILL` tokens, so that it is compiled for few lengths; the filling is a segment
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from swift.models.attention.spans import GroupSpans, Variant, in_autocast_type

FILL = 1024
"""Streams are filled up to a multiple of this many tokens."""


class FlexSegments:
    """Attention of one layout's segments under one block mask."""

    def __init__(self, groups: Sequence[GroupSpans], device: torch.device | str) -> None:
        segment_T, prompt_T = segment_numbers(groups)
        self.num_tokens = segment_T.shape[0]
        self.num_filling = -self.num_tokens % FILL
        filled = [nn.functional.pad(one, (0, self.num_filling), value=-1).to(device) for one in (segment_T, prompt_T)]
        self.block_mask = _block_mask_of(*filled)

    @staticmethod
    def computes(variant: Variant) -> bool:
        """Only a softmax of scaled products."""
        return variant.is_plain

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant) -> Tensor:
        """See `SegmentLayout.attend`."""
        states = in_autocast_type(query, key, value)
        filled = [nn.functional.pad(one, (0, 0, 0, self.num_filling)) for one in states]
        output = _flex_attention(query.device.type)(
            *filled, block_mask=self.block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output[:, :, : self.num_tokens].transpose(1, 2).contiguous()


def segment_numbers(groups: Sequence[GroupSpans]) -> tuple[Tensor, Tensor]:
    """For each token of the stream the number of its segment, and of its prompt's (its own, where it is in a prompt).

    A query sees the keys before it whose segment is one of these two; of its own, itself too.
    """
    segments: list[Tensor] = []
    prompts: list[Tensor] = []
    for group in groups:
        prompt = len(segments)
        for span in (group.prompt, *group.completions):
            prompts.append(torch.full((span.length,), prompt))
            segments.append(torch.full((span.length,), len(segments)))
    return torch.cat(segments), torch.cat(prompts)


def _block_mask_of(segment_T: Tensor, prompt_T: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = segment_T[query] == segment_T[key]
        return (key <= query) & (own | (prompt_T[query] == segment_T[key]))

    num_tokens = segment_T.shape[0]
    compiled = segment_T.device.type != "cpu"  # else a [T, T] matrix is made on the way
    return create_block_mask(visible, None, None, num_tokens, num_tokens, segment_T.device, _compile=compiled)


@lru_cache(maxsize=2)
def _flex_attention(device_type: str) -> Any:
    """FlexAttention, compiled where it runs for speed; on the CPU its definition, which tests use."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)
