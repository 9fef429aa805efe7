"""Attention of packed segments by masked SDPA: the kernel of devices without a faster one, and the reference in tests.

Segments of similar size are gathered into blocks of rows: prompts, padded at their ends, and completions behind a copy
of their prompt, which is padded at its front:

    prompts        [R, P]        causal; one with images that see themselves is a block of its own
    completions    [R, P + L]    keys of the prompt, then own keys, causal; padded prompt keys are masked

A block is one SDPA call for all its rows and heads. Completions that see a part of their prompt each (the columns of
strided EBFT) are many and short: some of them at a time, in a tile, stand behind one copy of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swift.models.attention.spans import PLAIN, GroupSpans, Span, Variant, attended, in_autocast_type
from swift.models.transfer import to_device

# T tokens of the stream, R rows of a block, P prompt keys, L steps of the longest row, C = P + L keys
# H query heads, K key/value heads, D head width, E value width, X heads times width

WASTE = 1.25
"""A block may compute this many times the scores of its rows; more rows in a call are worth that."""

TILE = 256
"""Tokens of the completions in a tile: few beside a prompt that is worth sharing, enough for a matrix product."""

SCORES = 2**24
"""Scores that are computed at once where a layer's attention is not plain (64 MiB in fp32)."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A segment and the prompt that it sees before itself, which is empty before a prompt."""

    prompt: Span
    span: Span


class SegmentRows:
    """Attention of one layout's segments, block by block.

    Args:
        groups: the segments.
        device: of the stream.
        first_query: queries are only the tokens from here on, the last one of each completion; keys are all.
    """

    def __init__(self, groups: Sequence[GroupSpans], device: torch.device | str, first_query: int = 0) -> None:
        prompts, completions = [], []
        alone: list[_Block] = []
        for group in groups:
            row = _Row(Span(group.prompt.start, 0), group.prompt)
            if group.images and not first_query:
                alone.append(_PromptWithImages(row, group.images, device))
            elif not first_query:
                prompts.append(row)
            if group.prefixes:
                columns, size = group.seen(), max(1, TILE // group.completions[0].length)
                alone += [_Tile(columns[i : i + size], device, first_query) for i in range(0, len(columns), size)]
            else:
                completions += [_Row(group.prompt, span) for span in group.completions if span.length]
        self._blocks = [_Block(rows, device) for part in (prompts, completions) for rows in _blocks(part)] + alone
        places = torch.empty(sum(int(block.real.sum()) for block in self._blocks), dtype=torch.long)
        first = 0
        for block in self._blocks:  # row `places[t]` of all outputs, one block after the other, is query t
            places[block.query_index[block.real]] = first + block.real.flatten().nonzero()[:, 0]
            first += block.real.numel()
        self._places = to_device(places, device)

    @staticmethod
    def computes(variant: Variant, *, images: bool) -> bool:
        """Whether this kernel computes the variant, and images that see themselves: it computes all."""
        return True

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant = PLAIN
    ) -> Tensor:
        """See `SegmentLayout.attend`."""
        heads = query.shape[1], key.shape[1]
        tables_TX = [states[0].transpose(0, 1).flatten(1) for states in in_autocast_type(query, key, value)]
        parts = [block.attend(*tables_TX, heads=heads, scale=scale, variant=variant) for block in self._blocks]
        found = torch.cat([part.flatten(0, 1) for part in parts])
        return nn.functional.embedding(self._places, found).view(1, -1, heads[0], value.shape[3])


def _blocks(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows of similar size, to be computed together."""
    block: list[_Row] = []
    needed = longest = before = 0
    for row in sorted(rows, key=lambda row: (row.prompt.length, row.span.length)):
        longest, before = max(longest, row.span.length), max(before, row.prompt.length)
        scores = row.span.length * (row.prompt.length + row.span.length)  # of a head
        needed += scores
        if block and (len(block) + 1) * longest * (before + longest) > WASTE * needed:
            yield block
            block, needed, longest, before = [], scores, row.span.length, row.prompt.length
        block.append(row)
    if block:
        yield block


class _Block:
    """Rows that are computed together; what pads a row's own tokens is its last one, behind all that it computes."""

    def __init__(self, rows: Sequence[_Row], device: torch.device | str) -> None:
        self.longest = max(row.span.length for row in rows)
        self.num_before = max(row.prompt.length for row in rows)
        steps = torch.arange(self.longest)
        starts = torch.tensor([row.span.start for row in rows])[:, None]
        lengths = torch.tensor([row.span.length for row in rows])[:, None]
        self.query_index = own_index = starts + torch.minimum(steps, lengths - 1)
        self.real = steps < lengths  # [R, L]
        self._query_index = self._key_index = to_device(own_index, device)
        self._padded: Tensor | None = None  # [R, 1, 1, P]
        if self.num_before:
            stops = torch.tensor([row.prompt.stop for row in rows])[:, None]
            before = torch.tensor([row.prompt.length for row in rows])[:, None]
            distance = torch.arange(self.num_before, 0, -1)
            self._key_index = to_device(torch.cat([stops - torch.minimum(distance, before), own_index], 1), device)
            if bool((before < self.num_before).any()):
                self._padded = to_device((distance > before)[:, None, None], device)
        self._masks: dict[int | None, Tensor] = {}
        self._is_causal = not self.num_before

    def attend(self, *tables_TX: Tensor, heads: tuple[int, int], scale: float | None, variant: Variant) -> Tensor:
        """[R, Q, H x E] from tables of the stream."""
        compute: Callable[..., Tensor] = partial(self._attend, heads=heads, scale=scale, variant=variant)
        if variant.is_plain:
            return compute(*tables_TX, rows=slice(None))
        num_rows, num_queries = self._query_index.shape
        step = max(1, SCORES // (heads[0] * num_queries * (self.num_before + self.longest)))
        if torch.is_grad_enabled():  # inner results are not kept but made again
            compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([compute(*tables_TX, rows=slice(i, i + step)) for i in range(0, num_rows, step)])

    def _attend(
        self,
        query_TX: Tensor,
        key_TX: Tensor,
        value_TX: Tensor,
        *,
        heads: tuple[int, int],
        scale: float | None,
        variant: Variant,
        rows: slice,
    ) -> Tensor:
        def gathered(table: Tensor, index: Tensor, num_heads: int) -> Tensor:
            states = nn.functional.embedding(index[rows], table)
            return states.view(*states.shape[:2], num_heads, -1).transpose(1, 2)

        query = gathered(query_TX, self._query_index, heads[0])
        key, value = (gathered(table, self._key_index, heads[1]) for table in (key_TX, value_TX))
        if variant.is_plain and self._is_causal:
            found = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=heads[0] != heads[1]
            )
        else:
            if variant.sinks is not None:
                variant = replace(variant, sinks=variant.sinks[:, None])
            if variant.window not in self._masks:
                self._masks[variant.window] = self._visible(variant.window, query.device)
            mask = self._masks[variant.window]
            if self._padded is not None:
                mask = mask & ~nn.functional.pad(self._padded[rows], (0, self.longest))
            found = attended(query, key, value, mask=mask, scale=scale, variant=variant)
        return found.transpose(1, 2).flatten(2)

    def _visible(self, window: int | None, device: torch.device) -> Tensor:
        """[Q, P + L]: what each query sees where no prompt is padded."""
        shape = self.longest, self.num_before + self.longest
        visible = torch.ones(shape, dtype=torch.bool, device=device).tril(self.num_before)
        return visible if window is None else visible.triu(self.num_before - window + 1)


class _PromptWithImages(_Block):
    """A prompt in which the tokens of an image see each other; a window cuts what lies before.

    images: where they are in the stream.
    """

    def __init__(self, row: _Row, images: Sequence[Span], device: torch.device | str) -> None:
        super().__init__([row], device)
        self._is_causal = False
        self._images = [slice(image.start - row.span.start, image.stop - row.span.start) for image in images]

    def _visible(self, window: int | None, device: torch.device) -> Tensor:
        visible = super()._visible(None, device)
        for image in self._images:
            visible[image, image] = True
        return visible if window is None else visible.triu(1 - window)


class _Tile(_Block):
    """Completions of equal length behind one copy of their prompt, of which each sees a part: a block of one row."""

    def __init__(self, columns: Sequence[tuple[Span, Span]], device: torch.device | str, first_query: int) -> None:
        prompt = max((seen for seen, _ in columns), key=lambda seen: seen.length)
        own_index = torch.stack([span.index for _, span in columns])  # [columns, steps]
        anchor = torch.tensor([seen.length for seen, _ in columns])[:, None].expand_as(own_index)
        column = torch.arange(len(columns))[:, None].expand_as(own_index)
        self._own = torch.stack([anchor, column, anchor + torch.arange(own_index.shape[1])])
        queries = slice(-1 if first_query else 0, None)
        self._queries = self._own[:, :, queries]
        self.longest, self.num_before = own_index.numel(), prompt.length
        self.query_index = own_index[:, queries].reshape(1, -1) - first_query
        self.real = torch.ones_like(self.query_index, dtype=torch.bool)
        self._query_index = to_device(self.query_index, device)
        self._key_index = to_device(torch.cat([prompt.index, own_index.flatten()])[None], device)
        self._padded, self._masks, self._is_causal = None, {}, False

    def _visible(self, window: int | None, device: torch.device) -> Tensor:
        """[Q, P + L]: of the prompt what is before the anchor, then the earlier tokens of the same column."""
        anchor, column, position = to_device(self._queries.reshape(3, -1, 1), device)
        _, columns, positions = to_device(self._own.flatten(1), device)
        before = torch.arange(self.num_before, device=device)
        visible = torch.cat([before < anchor, (columns == column) & (positions <= position)], 1)
        return visible if window is None else visible & (torch.cat([before, positions]) > position - window)
