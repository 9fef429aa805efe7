"""Packed rows, and batches without padding, in which no row attends to another.

TRL packs and collates: positions begin at 0 with each row, and `seq_lengths` has the lengths of the rows. Attention is
that of packed rollouts (`swift.models.attention`), so scores between rows are not computed, on any device. A model that
reads a stream from left to right, such as one with linear attention, gets the rows of a packed row as padded ones.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from swift.errors import ConfigError
from swift.models.attention.choice import choose_attention
from swift.models.attention.layout import SegmentLayout
from swift.models.attention.spans import packed_rows
from swift.models.vision import Vision, vision_of
from swift.trainers.rows import IGNORED

logger = logging.getLogger(__name__)

DEFAULT_PACKED_TOKENS = 2048
"""Length of packed rows if no flag sets it and the model has a longer context."""


def packed_length(args: Any, context: int | None) -> int:
    """Tokens of a packed row, for a model with this context."""
    default = min(context or DEFAULT_PACKED_TOKENS, DEFAULT_PACKED_TOKENS)
    return args.packing_length or args.max_length or default  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Packing:
    """`--packing_strategy` into rows of `length` tokens."""

    strategy: str
    length: int

    def __call__(self, table: Any, options: Mapping[str, Any] | None = None) -> Any:
        """A table or stream of packed rows, with a column `seq_lengths`: the lengths of the parts of a row.

        options: further arguments of the table's method `map`.
        """
        if self.strategy == "wrapped":
            return table.map(self.wrap, batched=True, **(options or {}))
        from trl import pack_dataset

        return pack_dataset(table, self.length, self.strategy, dict(options or {}))

    def wrap(self, rows: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[list[int]]]:
        """A batch of rows, concatenated and cut every `length` tokens.

        >>> Packing("wrapped", 4).wrap({"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 2, 3], [4, 5, 6]]})
        {'input_ids': [[1, 2, 3, 4], [5, 6]], 'labels': [[1, 2, 3, 4], [5, 6]], 'seq_lengths': [[3, 1], [2]]}
        """
        ends = [0]
        for row in rows["input_ids"]:
            ends.append(ends[-1] + len(row))
        starts = range(0, ends[-1], self.length)
        packed = {}
        for name in ("input_ids", "labels"):
            tokens = list(chain.from_iterable(rows[name]))
            packed[name] = [tokens[start : start + self.length] for start in starts]
        packed["seq_lengths"] = [[] for _ in starts]
        for start, stop in pairwise(sorted({*ends, *starts})):
            packed["seq_lengths"][start // self.length].append(stop - start)
        return packed


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Numbers of rows of these sizes, packed by best-fit decreasing; a larger one has a pack of its own.

    >>> best_fit([3, 2, 2], 4)
    [[0], [1, 2]]
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # left in a pack, and its number
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        place = bisect_left(rooms, (sizes[index],))
        if place == len(rooms):
            rooms.append((length, len(packs)))
            packs.append([])
        room, number = rooms.pop(place)
        packs[number].append(index)
        insort(rooms, (room - sizes[index], number))
    return packs


def keeps_apart(model: nn.Module, args: Any, choose: Callable[[nn.Module], str | None] = choose_attention) -> bool:
    """Installs packed attention; False, with a note, if rows of a stream would see each other in the model.

    choose: installs it, or says why not.

    Raises:
        ConfigError: they would, and processes share rows.
    """
    if (obstacle := choose(model)) is None:
        return True
    flag = "packing" if args.packing else "padding_free"
    subject = f"--{flag}: true: rows of one stream cannot be kept apart in {type(model).__name__}: {obstacle}"
    if args.sequence_parallel_size > 1:
        raise ConfigError(f"{subject}, nor shared by processes; use --{flag} false and --sequence_parallel_size 1")
    logger.warning("note: %s; each batch is computed as padded rows, with the same loss but more memory", subject)
    return False


def layout_of(boundaries: Tensor, ids: Tensor, vision: Vision | None) -> SegmentLayout:
    """Rows of a stream as segments that attend only to themselves.

    Args:
        boundaries: [R + 1], where they begin, and the end.
        ids: [1, T], of the stream.
        vision: that of the model.
    """
    groups = packed_rows(boundaries.diff().tolist())
    if vision is not None and vision.see_themselves:  # else ids would be waited for
        stream = ids[0].tolist()
        spans = [group.prompt for group in groups]
        images = [vision.spans(stream[span.start : span.stop], span.start) for span in spans]
        groups = [replace(group, images=shown) for group, shown in zip(groups, images, strict=True)]
    return SegmentLayout(groups, ids.device)


OF_STREAMS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Inputs that say where the rows of a stream are."""


def as_rows(inputs: dict[str, Any], boundaries: Tensor) -> dict[str, Any]:
    """The rows of a stream, padded on the right. What is there for each token of it becomes [R, L]."""
    lengths = boundaries.diff().tolist()
    total, shape = sum(lengths), inputs["input_ids"].shape
    rows = {
        name: pad_sequence(value[0, :total].split(lengths), True, IGNORED if name == "labels" else 0)
        if isinstance(value, Tensor) and value.shape == shape
        else value
        for name, value in inputs.items()
        if name not in OF_STREAMS
    }
    rows["attention_mask"] = pad_sequence([boundaries.new_ones(length) for length in lengths], True)
    return rows


class PackedRows:
    """Mixin before a trainer of TRL: passes the layout of a batch without padding to the model.

    apart: whether the model keeps its rows apart; otherwise they are padded.
    """

    def __init__(self, *, args: Any, apart: bool = True, data_collator: Any = None, **arguments: Any) -> None:
        self._apart = apart
        streams = args.packing or args.padding_free  # for which TRL takes no collator
        super().__init__(args=args, data_collator=None if streams else data_collator, **arguments)  # type: ignore[call-arg]
        if streams and data_collator is not None:
            self.data_collator = replace(data_collator, collator=self.data_collator)  # type: ignore[has-type]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """As TRL's, with the layout among the inputs, or of padded rows."""
        boundaries = inputs.get("cu_seq_lens_q")
        if boundaries is not None and not self._apart:
            inputs = as_rows(inputs, boundaries)
            if (vision := vision_of(self.model)) is not None:  # type: ignore[attr-defined]
                inputs |= vision.kinds_of(inputs["input_ids"])
        elif boundaries is not None:
            layout = layout_of(boundaries, inputs["input_ids"], vision_of(self.model))  # type: ignore[attr-defined]
            inputs = {**inputs, "attention_layout": layout}
            positions = inputs["position_ids"]
            if positions.ndim == 3:  # three axes of images, by one of which TRL counts tokens
                inputs["position_ids"] = positions[0]
                whole = model

                def model(**given: Any) -> Any:
                    return whole(**{**given, "position_ids": positions})

        return super().compute_loss(model, inputs, *arguments, **named)  # type: ignore[misc]
