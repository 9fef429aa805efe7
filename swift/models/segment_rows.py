"""Attention of packed segments by masked SDPA: the way of every device that has no better one, and the oracle.

The completions of a group become rows of one length behind a copy of their prompt. Layers with windows that cut
something off, soft caps or sinks come here on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swift.models.segments import PLAIN, Variant, attended

if TYPE_CHECKING:
    from swift.models.segments import GroupSpans


SCORES = 2**24
"""Scores of completions that are computed at once where a layer's attention is not plain (64 MiB in fp32)."""


class SegmentRows:
    """Attention of one layout's segments, group by group.

    Args:
        groups: the segments.
        device: where the index tensors live.
    """

    def __init__(self, groups: Sequence[GroupSpans], device: torch.device | str) -> None:
        self.groups = list(groups)
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._blocks = [_CompletionBlock(group, device) for group in self.groups if _has_inputs(group)]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant = PLAIN
    ) -> Tensor:
        """See `SegmentLayout.attend`."""
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        if torch.is_autocast_enabled(query.device.type):  # SDPA would cast; the output takes what it gives
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        for group in self.groups:
            rows = slice(group.prompt.start, group.prompt.stop)
            states = (query[:, :, rows], key[:, :, rows], value[:, :, rows])
            if variant.is_plain:
                of_prompt = nn.functional.scaled_dot_product_attention(*states, is_causal=True, scale=scale)
            else:
                mask = self._mask(group.prompt.length, variant.window, query.device)
                of_prompt = _recomputed(attended, *states, mask=mask, scale=scale, variant=_of_heads(variant))
            output[:, :, rows] = of_prompt
        for block in self._blocks:
            block.attend(query, key, value, output, scale, variant)
        return output.transpose(1, 2).contiguous()

    def _mask(self, length: int, window: int | None, device: torch.device) -> Tensor:
        """[P, P] of a prompt."""
        if (length, window) not in self._masks:
            self._masks[length, window] = _visible(length, 0, window, device)
        return self._masks[length, window]


def _has_inputs(group: GroupSpans) -> bool:
    return any(span.length for span in group.completions)


def _recomputed(compute: Callable[..., Tensor], *states: Tensor, **options: Any) -> Tensor:
    """What `compute` gives; its inner results are not kept for the backward but computed again."""
    if not torch.is_grad_enabled():
        return compute(*states, **options)
    return checkpoint(compute, *states, use_reentrant=False, preserve_rng_state=False, **options)


def _of_heads(variant: Variant) -> Variant:
    """The variant with its sinks [H, 1], for states [..., H, L, D]."""
    return variant if variant.sinks is None else replace(variant, sinks=variant.sinks[:, None])


def _visible(num_queries: int, num_before: int, window: int | None, device: torch.device) -> Tensor:
    """[L, P + L]: what each of L queries behind P tokens sees."""
    visible = torch.ones(num_queries, num_before + num_queries, dtype=torch.bool, device=device)
    visible = visible.tril(diagonal=num_before)
    return visible if window is None else visible.triu(diagonal=num_before - window + 1)


class _CompletionBlock:
    """The completions of one group as a rectangular batch: queries [C, L], keys [C, P + L].

    Rows shorter than L are filled with the row's own last token; causality keeps the filling out of the result.
    """

    def __init__(self, group: GroupSpans, device: torch.device | str) -> None:
        spans = [span for span in group.completions if span.length]
        longest = max(span.length for span in spans)
        steps = torch.arange(longest)
        starts = torch.tensor([span.start for span in spans])[:, None]
        lengths = torch.tensor([span.length for span in spans])[:, None]
        own = starts + torch.minimum(steps, lengths - 1)  # [C, L] stream index of each query
        real = steps < lengths
        self.own_index = own.to(device)
        self._real_rows = real.nonzero(as_tuple=True)[0].numpy()  # ascending
        self.real_rows = torch.from_numpy(self._real_rows).to(device)
        self.real_steps = real.nonzero(as_tuple=True)[1].to(device)
        self.real_index = own[real].to(device)
        self.prompt = slice(group.prompt.start, group.prompt.stop)
        self._masks: dict[int | None, Tensor] = {}  # [L, P + L] by window

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            num_before = self.prompt.stop - self.prompt.start
            self._masks[window] = _visible(self.own_index.shape[1], num_before, window, self.own_index.device)
        return self._masks[window]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, scale: float | None, variant: Variant
    ) -> None:
        """Write the attention of the group's completions into `output` [1, H, T, E]."""
        num_rows, longest = self.own_index.shape
        compute = self._attended if variant.is_plain else partial(_recomputed, self._attended)
        scores = query.shape[1] * longest * (self.prompt.stop - self.prompt.start + longest)
        step = num_rows if variant.is_plain else max(1, SCORES // scores)
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            found = compute(query, key, value, rows=rows, scale=scale, variant=variant)
            of_rows = slice(*np.searchsorted(self._real_rows, (rows.start, rows.stop)))
            places = self.real_rows[of_rows] - first, slice(None), self.real_steps[of_rows]
            output[0, :, self.real_index[of_rows]] = found[places].transpose(0, 1)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, *, rows: slice, scale: float | None, variant: Variant
    ) -> Tensor:
        """[C, H, L, E] of some completions."""
        own_index = self.own_index[rows]

        def with_prompt(states: Tensor) -> Tensor:  # [1, H, T, D] -> [C, H, P + L, D]
            prompt = states[:, :, self.prompt].expand(own_index.shape[0], -1, -1, -1)
            return torch.cat([prompt, states[0][:, own_index].transpose(0, 1)], dim=2)

        return attended(
            query[0][:, own_index].transpose(0, 1),
            with_prompt(key),
            with_prompt(value),
            mask=self._mask(variant.window),
            scale=scale,
            variant=_of_heads(variant),
        )
