"""Keys and values of a batch: one slot for each row and position, left-padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swift.models.attention.spans import Span
from swift.models.transfer import to_device

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer."""


class PromptCapture:
    """A cache for prefill that stores the keys and values [1, Hkv, T, D] of each layer and returns them.

    No dataclass: FSDP2 would give each layer a copy, with tensors in the type that it computes in.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.layers: Layers = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self.layers)
        self.layers.append((key, value))
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of cached positions: none precede a prompt."""
        return 0


class RowCache:
    """Keys and values of R rows, written in place; a row's prompt may begin at any slot.

        slots     [ left padding | prompt | generated so far | free ]     the new token of every row is in the same slot

    like: layers of a prefill, which determine number, dtype and sizes of the layers.
    """

    is_compileable = False

    def __init__(self, like: Layers) -> None:
        self.used = 0
        """Slots up to the latest token."""
        self.layers: Layers = [(keys[:0, :, :0].clone(), values[:0, :, :0].clone()) for keys, values in like]
        self._first = torch.empty(0, dtype=torch.long)  # [R] the first slot of each row, on the CPU
        self._last = self._first  # [R] the last slot that it may use
        self._visible: Tensor | None = None  # [R, K] attention mask of the slots; None without padding

    def add(self, prompts: Layers, spans: Sequence[Span], budgets: Sequence[int]) -> None:
        """Append rows; all rows are moved so that the first slot in use is slot 0.

        Args:
            prompts: per layer (key, value) of the packed prompts, [1, Hkv, T, D].
            spans: for each row, the span of its prompt in the packed stream.
            budgets: for each row, the maximum number of new tokens.
        """
        device = prompts[0][0].device
        lengths = torch.tensor([span.length for span in spans])
        shift = -int(torch.cat([self._first, self.used - lengths]).min())
        self.used += shift
        first = self.used - lengths
        self._first = torch.cat([self._first + shift, first])
        self._last = torch.cat([self._last + shift, self.used - 1 + torch.tensor(budgets) - 1])
        capacity = int(self._last.max()) + 1
        slots = torch.arange(self.used)
        starts = torch.tensor([span.start for span in spans])[:, None]
        source = to_device((starts + slots - first[:, None]).clamp(min=0), device)
        before = to_device((slots < first[:, None])[:, None, :, None], device)

        for index, prompt in enumerate(prompts):  # at most one layer exists twice at a time
            layer = []
            for old, new in zip(self.layers[index], prompt, strict=True):
                made = new.new_zeros(len(old) + len(source), new.shape[1], capacity, new.shape[3])
                moved = old[:, :, max(0, -shift) :][:, :, : capacity - max(0, shift)]
                made[: len(old), :, max(0, shift) :][:, :, : moved.shape[2]] = moved
                # zeros in the padding: NaN would pass the mask
                made[len(old) :, :, : self.used] = new[0][:, source].transpose(0, 1).masked_fill(before, 0.0)
                layer.append(made)
            self.layers[index] = layer[0], layer[1]
        self._update_mask()

    def reorder_cache(self, rows: Tensor) -> None:
        """Keep only `rows`, an index on the host, in this order; at most one layer exists twice at a time."""
        there = to_device(rows, self.layers[0][0].device)
        for index, (keys, values) in enumerate(self.layers):
            self.layers[index] = keys[there], values[there]
        self._first, self._last = self._first[rows], self._last[rows]
        self._update_mask()

    def _update_mask(self) -> None:
        self._visible = None
        if self._first.numel() and int(self._first.max()) > 0:
            keys = self.layers[0][0]
            self._visible = to_device(torch.arange(keys.shape[2])[None] >= self._first[:, None], keys.device)

    def begin_step(self) -> Tensor | None:
        """Begin the next slot; returns the mask [R, 1, 1, K] over the slots in use, None without padding."""
        self.used += 1
        return None if self._visible is None else self._visible[:, None, None, : self.used]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one new position per row, [R, Hkv, 1, D]; returns all positions so far."""
        keys, values = self.layers[layer_idx]
        keys[:, :, self.used - 1] = key[:, :, 0]
        values[:, :, self.used - 1] = value[:, :, 0]
        return keys[:, :, : self.used], values[:, :, : self.used]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the current step."""
        return self.used - 1
