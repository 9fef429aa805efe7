"""Attention of packed segments by flash-attn's variable-length kernel, as transformers calls it.

A completion's keys are those of its prompt, copied, then its own; the causal mask ends at the last key, so it sees all
of its prompt. A prompt with one completion is one sequence with it::

    stream     [ p0 p1 p2 | a b | d ]                     queries: lengths 3, 2, 1
    keys       [ p0 p1 p2 | p0 p1 p2 a b | p0 p1 p2 d ]   lengths 3, 5, 4
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from swift.models.attention.spans import GroupSpans, Variant, in_autocast_type
from swift.models.transfer import to_device


class FlashSegments:
    """Attention of one layout's segments as sequences of a variable-length batch; states have 16 bits."""

    def __init__(self, groups: Sequence[GroupSpans], device: torch.device | str) -> None:
        queries: list[int] = []
        keys: list[Tensor] = []
        order: list[Tensor] = []
        for group in groups:
            prompt = group.prompt.index
            own = [(seen.index, span.index) for seen, span in group.seen() if span.length]
            if len(own) == 1 and len(own[0][0]) == len(prompt):
                prompt, own = torch.cat([prompt, own[0][1]]), []
            queries += [len(prompt), *(len(places) for _, places in own)]
            keys += [prompt, *(torch.cat(pair) for pair in own)]
            order += [prompt, *(places for _, places in own)]
        self.key_index = to_device(torch.cat(keys), device)
        """[C] where in the stream each key stands."""
        query_index = torch.cat(order)
        self.query_index = None if bool((query_index.diff() == 1).all()) else to_device(query_index, device)
        """[T] where in the stream each query stands; None where they are in its order."""
        lengths = queries, [len(places) for places in keys]
        self.starts_q, self.starts_k = (
            to_device([0, *accumulate(sizes)], device, dtype=torch.int32) for sizes in lengths
        )
        self.longest_q, self.longest_k = map(max, lengths)

    @staticmethod
    def computes(variant: Variant, *, images: bool) -> bool:
        """All but sinks, which flash-attn 2 lacks, and images that see themselves."""
        return variant.sinks is None and not images

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant) -> Tensor:
        """See `SegmentLayout.attend`."""
        from transformers.modeling_flash_attention_utils import _flash_attention_forward

        query, key, value = in_autocast_type(query, key, value)
        head_size, value_size = query.shape[3], value.shape[3]
        value = nn.functional.pad(value, (0, head_size - value_size))
        query = query.transpose(1, 2) if self.query_index is None else query.transpose(1, 2)[:, self.query_index]
        output = _flash_attention_forward(
            query,
            self._keys(key),
            self._keys(value),
            attention_mask=None,
            query_length=query.shape[1],
            is_causal=True,
            softmax_scale=scale,
            sliding_window=variant.window,
            softcap=variant.softcap,
            cu_seq_lens_q=self.starts_q,
            cu_seq_lens_k=self.starts_k,
            max_length_q=self.longest_q,
            max_length_k=self.longest_k,
            attn_implementation="flash_attention_2",
        )
        output = output[..., :value_size].contiguous()
        return output if self.query_index is None else output[:, self.query_index.argsort()]

    def _keys(self, states: Tensor) -> Tensor:
        """[1, K, T, D] of the stream -> [1, C, K, D] of the keys; an embedding, whose gradient is deterministic."""
        table_TX = states[0].transpose(0, 1).flatten(1)
        return nn.functional.embedding(self.key_index, table_TX).view(1, -1, states.shape[1], states.shape[3])
