"""Keys and values of rows that share prompts: a prompt is held and read once for all rows that go on from it.

Rows are laid out in C cells. The rows of a cell have the same prompt, so their queries make one matrix against its
keys; each row's own tokens lie beside that. With Hkv key/value heads and S slots per cell, per layer::

    prompt   keys [C, Hkv, D, W]     values [C, Hkv, W, D]         W: longest prompt, rounded up
    own      keys [C, Hkv, S, D, K]  values [C, Hkv, S, K, D]      K: room for tokens so far, grown when it is used up

Keys are stored with positions last: a product that reads them in that order is a fifth faster. A row that leaves stops
costing its share of the model at once and leaves a hole; when holes are a quarter of the slots, the cells are made anew
from the rows that are there, with S such that C * (W + S * K) is least.

What a row gets does not depend on the rows beside it, to the last bit: with compiled kernels (`swift.native`) in any
case, with PyTorch's where those allow it (`PlainDecoder.same_in_any_batch` tries). For those, widths are multiples of
16, sums over positions are cut into equal blocks, and no product has less than four rows. Filled-up positions hold
zeros, count with probability 0, and sit behind the ones that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swift.models.forward import Span
from swift.rollout.engines import decode_step
from swift.rollout.engines.decode_step import ALIGNMENT

HOLES = 0.25
"""Share of empty slots at which the cells are made anew; it copies the cache."""
FIRST_ROOM, MOST_GROWTH = 32, 256
"""Own positions there is room for at first; it doubles, by no more than this."""


def aligned(width: int) -> int:
    """`width` rounded up."""
    return -(-width // ALIGNMENT) * ALIGNMENT


def cell_size(counts: Sequence[int], width: int, length: int) -> int:
    """Slots per cell for prompts with `counts` rows each, so that positions read and held are fewest.

    >>> cell_size([8, 8, 8], 280, 64), cell_size([1, 1, 8], 280, 64), cell_size([1, 1, 8], 20, 64)
    (8, 4, 1)
    """
    return min(
        set(counts) | {1, -(-sum(counts) // len(counts))}, key=lambda size: _positions(counts, size, width, length)
    )


def positions_needed(counts: Sequence[int], width: int, length: int) -> int:
    """Positions (each a key and a value per layer and head) held for prompts up to `width`, rows up to `length`."""
    width, length = aligned(width), aligned(length)
    return _positions(counts, cell_size(counts, width, length), width, length)


def _positions(counts: Sequence[int], size: int, width: int, length: int) -> int:
    return sum(-(-count // size) for count in counts) * (width + size * length)


@dataclass(slots=True)
class _Row:
    """A live row: its prompt, the most own tokens that it will have, its slot, its own tokens in the cache."""

    prompt: int
    limit: int
    slot: int = -1
    length: int = 0


class PromptCache:
    """The cache of a batch to which rows can be added."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # prompt keys, values, own keys, values
        self._rows: list[_Row] = []
        self._prompt_lengths: list[int] = []  # of every prompt that ever came
        self._cells: list[int] = []  # the prompt of each cell
        self._size = 1  # slots per cell
        self._width = 0
        self._room = 0
        self._prompt_mask: Tensor | None = None  # [C * Hkv, 1, W], 0 or -inf
        self._row_of_slot: Tensor | None = None  # None: row i is in slot i
        self._padded_slots: Tensor | None = None
        self._slots_R = self._prompts_R = self._own_R = torch.empty(0, dtype=torch.int64)
        self._position = 0  # where every row writes, the latest where they differ
        self._differ: tuple[list[Tensor], Tensor] | None = None  # where they differ: places and mask, when asked for
        self.arrangement = 0
        """Counts how often the tensors of `layers` were made anew."""

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return len(self._rows)

    @property
    def most_positions(self) -> int:
        """No row has more, with the one that this step writes."""
        return self._width + self._position + 1

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for layer in self.layers for part in layer)

    # --- rows come and leave ------------------------------------------------------------------------------------

    def add(
        self, captured: list[tuple[Tensor, Tensor]], spans: Sequence[Span], which: Sequence[int], limits: Sequence[int]
    ) -> None:
        """Add rows behind those that are there.

        Args:
            captured: per layer key and value of a packed stream of new prompts, [T, Hkv, D].
            spans: where each new prompt lies in it.
            which: for each new row, its prompt among `spans`.
            limits: for each new row, the most own tokens that it will have.
        """
        first = len(self._prompt_lengths)
        self._prompt_lengths += [span.length for span in spans]
        self._rows += [_Row(first + prompt, limit) for prompt, limit in zip(which, limits, strict=True)]
        self._arrange(captured, spans, first)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in this order, which is that of before."""
        self._rows = [self._rows[i] for i in rows]
        if self._rows and len(self._rows) <= (1 - HOLES) * len(self._cells) * self._size:
            self._arrange([], (), len(self._prompt_lengths))
        else:
            self._index()

    def _arrange(self, captured: list[tuple[Tensor, Tensor]], spans: Sequence[Span], first: int) -> None:
        """Make the cells anew from `_rows`; those with slot -1 are new and their prompts are in `captured`."""
        old_cells, old_width = self._cells, self._width
        prompts = list(dict.fromkeys(row.prompt for row in self._rows))
        members = {prompt: [row for row in self._rows if row.prompt == prompt] for prompt in prompts}
        self._width = aligned(max(self._prompt_lengths[prompt] for prompt in prompts))
        longest = max(row.length for row in self._rows)
        self._room = self._room_for(longest + 1)
        limit = aligned(max(row.limit for row in self._rows))
        self._size = cell_size([len(rows) for rows in members.values()], self._width, limit)
        self._cells, slots = [], []  # slots: the row of each, None for a hole
        for prompt, rows in members.items():
            for start in range(0, len(rows), self._size):
                part: list[_Row | None] = [*rows[start : start + self._size]]
                self._cells.append(prompt)
                slots += part + [None] * (self._size - len(part))
        sources = [old_cells.index(p) if p < first else len(old_cells) + p - first for p in self._cells]
        origins = [row.slot if row is not None else -1 for row in slots]
        for slot, row in enumerate(slots):
            if row is not None:
                row.slot = slot
        for index in range(len(captured) or len(self.layers)):
            new = captured[index] if captured else None
            old = self.layers[index] if index < len(self.layers) else None
            made = self._layer(old, new, spans, sources, origins, old_width, longest)
            if old is None:
                self.layers.append(made)
            else:
                self.layers[index] = made  # never more than one layer exists twice
        self.arrangement += 1
        self._index()
        self._mask_prompts()

    def _room_for(self, length: int) -> int:
        room = FIRST_ROOM
        while room < length:
            room += min(room, MOST_GROWTH)
        return min(room, aligned(max(row.limit for row in self._rows)))

    def _layer(
        self,
        old: tuple[Tensor, Tensor, Tensor, Tensor] | None,
        new: tuple[Tensor, Tensor] | None,
        spans: Sequence[Span],
        sources: Sequence[int],
        origins: Sequence[int],
        old_width: int,
        longest: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One layer in the new arrangement.

        Args:
            old: as it is.
            new: key and value of new prompts.
            spans: where those lie.
            sources: for each cell where its prompt is: an old cell, or (counted on) one of `spans`.
            origins: for each slot the old slot of its row, -1 for one that begins.
            old_width: W before.
            longest: most own tokens of a row so far.
        """
        key = new[0] if new is not None else old[2]  # type: ignore[index]
        num_heads, size = key.shape[1], new[0].shape[2] if new is not None else old[2].shape[3]  # type: ignore[index]
        cells = len(sources)
        prompt_keys = key.new_zeros(cells, num_heads, size, self._width)
        prompt_values = key.new_zeros(cells, num_heads, self._width, size)
        num_old = old[0].shape[0] if old is not None else 0
        for cell, source in enumerate(sources):
            if source < num_old:
                width = min(old_width, self._width)
                prompt_keys[cell, :, :, :width] = old[0][source, :, :, :width]  # type: ignore[index]
                prompt_values[cell, :, :width] = old[1][source, :, :width]  # type: ignore[index]
            else:
                span = spans[source - num_old]
                prompt_keys[cell, :, :, : span.length] = new[0][span.start : span.stop].permute(1, 2, 0)  # type: ignore[index]
                prompt_values[cell, :, : span.length] = new[1][span.start : span.stop].transpose(0, 1)  # type: ignore[index]
        own_keys = key.new_zeros(cells, num_heads, self._size, size, self._room)
        own_values = key.new_zeros(cells, num_heads, self._size, self._room, size)
        moved = [(slot, origin) for slot, origin in enumerate(origins) if origin >= 0]
        if moved and longest:
            assert old is not None
            to, at = torch.tensor(moved, device=key.device).T
            was = old[2].shape[2]
            to_cell, to_slot, at_cell, at_slot = to // self._size, to % self._size, at // was, at % was
            own_keys[to_cell, :, to_slot, :, :longest] = old[2][at_cell, :, at_slot, :, :longest]
            own_values[to_cell, :, to_slot, :longest] = old[3][at_cell, :, at_slot, :longest]
        return prompt_keys, prompt_values, own_keys, own_values

    def _index(self) -> None:
        """Which row is in which slot."""
        slots = [row.slot for row in self._rows]
        total = len(self._cells) * self._size
        self._row_of_slot = self._padded_slots = None
        if slots != list(range(total)):
            rows = dict(zip(slots, range(len(slots)), strict=True))
            device = self.layers[0][0].device
            self._row_of_slot = torch.tensor([rows.get(slot, 0) for slot in range(total)], device=device)
        self._slots_R = torch.tensor(slots)
        self._prompts_R = torch.tensor([self._prompt_lengths[row.prompt] for row in self._rows])

    def _mask_prompts(self) -> None:
        lengths = [self._prompt_lengths[prompt] for prompt in self._cells]
        self._prompt_mask = None
        if min(lengths) < self._width:
            keys = self.layers[0][0]
            hidden = torch.arange(self._width)[None] >= torch.tensor(lengths)[:, None]
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(keys)
            self._prompt_mask = mask.repeat_interleave(keys.shape[1], 0)[:, None]

    # --- a decode step ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Every live row takes its next position."""
        lengths = [row.length for row in self._rows]
        longest = max(lengths)
        if longest >= self._room:
            self._grow(longest + 1)
        if longest >= self._room:
            raise ValueError(f"a row that was added for {self._room} tokens at most has {longest} and takes another")
        self._position = longest
        self._differ = None
        self._own_R = torch.tensor(lengths)
        for row in self._rows:
            row.length += 1

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slot, own tokens before this step and tokens of the prompt of each row, [R] each, on the CPU."""
        return self._slots_R, self._own_R, self._prompts_R

    def _grow(self, length: int) -> None:
        room, self._room = self._room, self._room_for(length)
        for index, (prompt_keys, prompt_values, own_keys, own_values) in enumerate(self.layers):
            keys = own_keys.new_zeros(*own_keys.shape[:4], self._room)
            keys[..., :room] = own_keys
            values = own_values.new_zeros(*own_values.shape[:3], self._room, own_values.shape[4])
            values[:, :, :, :room] = own_values
            self.layers[index] = (prompt_keys, prompt_values, keys, values)
        self.arrangement += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: int) -> Tensor:
        """Write one position per row and attend to the prompt and the row's own positions.

        Args:
            layer: which.
            query: [R, H, D]; consecutive heads share a key/value head.
            key: [R, Hkv, D].
            value: [R, Hkv, D].
            scale: softmax scale.
            rows: N, at least R.

        Returns:
            [N, H * D], of which the last N - R rows mean nothing
        """
        position, *places = self.places(rows)
        scaling = decode_step.scalar(scale)
        return decode_step.attend(query, key, value, scaling, *self.layers[layer], position, *places)  # type: ignore[arg-type]

    def places(self, rows: int) -> tuple[int, list[Tensor], Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Where this step writes and reads, as `decode_step.attend` wants it; for `rows` rows of states."""
        whole = self._row_of_slot is None and rows == len(self._rows)
        slots = None if whole else self._slots(rows)
        places, own_mask = self._differences() if int(self._own_R.min()) != self._position else ([], None)
        return self._position, places, self._prompt_mask, own_mask, self._row_of_slot, slots

    def _differences(self) -> tuple[list[Tensor], Tensor]:
        """Cell, slot and position [R] of each row, and the mask [C, 1, S, 1, width] of what it sees of its own."""
        if self._differ is None:
            keys = self.layers[0][2]
            cell, slot, position = self._slots_R // self._size, self._slots_R % self._size, self._own_R
            width = aligned(self._position + 1)
            visible = torch.ones(len(self._cells), 1, self._size, 1, width, dtype=torch.bool)
            visible[cell, 0, slot, 0] = torch.arange(width)[None] <= position[:, None]
            mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf).to(keys)
            self._differ = [part.to(keys.device) for part in (cell, slot, position)], mask
        return self._differ

    def _slots(self, rows: int) -> Tensor:
        """[N] the slot of each row, and of the first row for those beyond them."""
        if self._padded_slots is None or self._padded_slots.shape[0] != rows:
            slots = [row.slot for row in self._rows]
            self._padded_slots = torch.tensor(slots + slots[:1] * (rows - len(slots)), device=self.layers[0][0].device)
        return self._padded_slots


class Prefill:
    """Attention of a packed stream of prompts, each to itself, which remembers keys and values.

    Args:
        spans: where each prompt lies in the stream.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.captured: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: int) -> Tensor:
        """See `PromptCache.attend`; [T, H, D] and [T, Hkv, D] in, [N, H * D] out."""
        assert layer == len(self.captured)
        self.captured.append((key.contiguous(), value.contiguous()))
        output = query.new_zeros(rows, *query.shape[1:])
        for span in self.spans:
            part = slice(span.start, span.stop)
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[part].transpose(0, 1)[None],
                key[part].transpose(0, 1)[None],
                value[part].transpose(0, 1)[None],
                is_causal=True,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            output[part] = attended[0].transpose(0, 1)
        return output.flatten(1)
