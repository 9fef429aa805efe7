"""Whether a group's prompt is computed once for its completions, or once for each of them.

Shared, a layer is spared C - 1 prompts and pays for the group's own part of attention. On a CPU that part is a number
of small operations for each tile (`swift.models.segment_tiles`), which cost about the same whatever they compute;
completions with a prompt of their own share the tiles of all others. A tile holds all heads unless the prompt is too
long to be copied. So a group shares where

    (C - 1) x P x seconds of a token  >  (1 + tiles) x seconds of a tile

in one layer, forward and backward. With one thread and completions of up to 65 tokens that is 20 spared tokens at
hidden size 128 and 2 at 512; so G = 8 completions share prompts from 3 tokens on, or from 1. Elsewhere than on a CPU
one kernel takes all segments, or a loop over groups takes longer the more there are: sharing always pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift.models.activation_memory import ModelShape
from swift.models.segment_tiles import BLOCK, COPIED

FLOPS_PER_S = 150e9
"""Matrix products of one thread."""

ELEMENT_S = 4e-9
"""Everything but matrix products, forward and backward, for each of the elements that a layer makes of a token."""

TILE_S = 1e-4
"""A tile, forward and backward; the rest of a group's part costs as much once."""


@dataclass(frozen=True, slots=True)
class SharingCost:
    """What both ways cost in one layer, measured on one machine; the ratio is what matters.

    token_s: forward and backward of one token. tile_s: of one tile. kv_heads: key/value heads; each has its own tiles
    behind a long prompt.
    """

    token_s: float
    tile_s: float
    kv_heads: int

    def pays(self, prompt_tokens: int, completion_tokens: Sequence[int]) -> bool:
        """Whether completions of these lengths should share a prompt.

        Args:
            prompt_tokens: of their prompt.
            completion_tokens: of each completion; the last token is no input.
        """
        spared = (len(completion_tokens) - 1) * prompt_tokens
        blocks = -(-(max(completion_tokens) - 1) // BLOCK)
        tiles = blocks * (self.kv_heads if prompt_tokens > COPIED else 1)
        return spared * self.token_s > (1 + tiles) * self.tile_s


def sharing_cost(config: Any, *, device_type: str, threads: int = 1) -> SharingCost | None:
    """The costs of a model; None where sharing always pays.

    Args:
        config: transformers' config of a decoder.
        device_type: where it computes.
        threads: of a CPU; they speed up tokens, not the dispatch of small operations.
    """
    if device_type != "cpu":
        return None
    text = config.get_text_config()
    shape = ModelShape.of(text)
    elements = 10 * shape.hidden + 4 * shape.intermediate
    token_s = 3 * shape.linear_flops / shape.layers / FLOPS_PER_S + elements * ELEMENT_S
    heads = getattr(text, "num_attention_heads", None) or 1
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return SharingCost(token_s / threads, TILE_S, max(kv_heads) if isinstance(kv_heads, (list, tuple)) else kv_heads)
