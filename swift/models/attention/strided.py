"""Blocks that continue documents from many places at once: the layout of strided EBFT (arXiv:2603.12248).

A stream holds documents, then blocks of `length` tokens, step after step: token t of each block stands beside token t
of the others, so that a key/value cache grows by one slice per step. A column is a block sampled once. With L document
tokens and C columns::

    stream       [ document 0 | document 1 | token 0 of all columns | token 1 of all columns | ... ]
    index        token t of column c: L + t C + c
    position     anchor_c + t

A column's token sees its document up to the anchor and the column's earlier tokens, nothing else: what an ordinary pass
over `document[:anchor] + block` sees. To attention each column is a completion of part of its document (`GroupSpans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from swift.models.attention.layout import SegmentLayout
from swift.models.attention.rows import SegmentRows
from swift.models.attention.spans import GroupSpans, Span


def block_anchors(num_tokens: int, *, length: int, stride: int, first: int) -> range:
    """Where blocks of `length` tokens begin in a document: every `stride` from `first`, each within the document.

    >>> len(block_anchors(64, length=8, stride=8, first=28)), len(block_anchors(15, length=8, stride=8, first=8))
    (4, 0)
    """
    return range(first, num_tokens - length + 1, stride)


@dataclass(frozen=True)
class BlockStream:
    """Documents and the columns behind them.

    lengths: tokens of each document. columns: (document, anchor) of each, in the documents' order, anchor at least 1.
    length: tokens of a block.
    """

    lengths: Sequence[int]
    columns: Sequence[tuple[int, int]]
    length: int

    @property
    def num_document_tokens(self) -> int:
        """L."""
        return sum(self.lengths)

    @cached_property
    def starts(self) -> list[int]:
        """Where each document begins in the stream."""
        return [0, *accumulate(self.lengths)][:-1]

    @cached_property
    def anchors(self) -> Tensor:
        """[C] where each column begins in its document."""
        return torch.tensor([anchor for _, anchor in self.columns], dtype=torch.long)

    @cached_property
    def places(self) -> Tensor:
        """[C] the anchors in the stream: where the document goes on as its author wrote it."""
        return self.anchors + torch.tensor([self.starts[document] for document, _ in self.columns], dtype=torch.long)

    def index(self, num_steps: int | None = None) -> Tensor:
        """[t, C] where the first steps of the columns stand in the stream; all by default."""
        steps, size = torch.arange(self.length if num_steps is None else num_steps), len(self.columns)
        return self.num_document_tokens + steps[:, None] * size + torch.arange(size)

    def predecessors(self) -> Tensor:
        """[t, C] the place in the stream that predicts each token: of a block's first, the one before its anchor."""
        return torch.cat([self.places[None] - 1, self.index(self.length - 1)])

    def references(self) -> Tensor:
        """[C, t] where the document's own tokens stand beside each column."""
        return self.places[:, None] + torch.arange(self.length)

    def positions(self, num_steps: int) -> Tensor:
        """[L + t C] position of each token in its sequence."""
        blocks = self.anchors + torch.arange(num_steps)[:, None]
        return torch.cat([*map(torch.arange, self.lengths), blocks.flatten()])

    def groups(self, num_steps: int) -> list[GroupSpans]:
        """The segments of a stream with so many steps."""
        first, size = self.num_document_tokens, len(self.columns)
        owned: list[list[tuple[int, Span]]] = [[] for _ in self.lengths]
        for column, (document, anchor) in enumerate(self.columns if num_steps else ()):
            owned[document].append((anchor, Span(first + column, num_steps, size)))
        documents = zip(self.starts, self.lengths, owned, strict=True)
        return [
            GroupSpans(Span(start, length), tuple(span for _, span in own), tuple(anchor for anchor, _ in own))
            for start, length, own in documents
        ]

    def layout(self, num_steps: int, device: torch.device | str) -> SegmentLayout:
        """Attention of a stream with so many steps."""
        return SegmentLayout(self.groups(num_steps), device)

    def step_layout(self, num_steps: int, device: torch.device | str) -> SegmentRows:
        """Attention of the last of so many steps, [1, H, C, D], to all that a key/value cache holds."""
        first = self.num_document_tokens + (num_steps - 1) * len(self.columns)
        return SegmentRows(self.groups(num_steps), device, first)
