"""Packed rows, and batches without padding, in which no row attends to another.

TRL packs and collates: positions begin at 0 with each row, and `seq_lengths` has the lengths of the rows. Attention is
that of packed rollouts (`swift.models.attention`), so scores between rows are not computed, on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, nn

from swift.errors import ConfigError
from swift.models.attention.choice import choose_attention
from swift.models.attention.layout import SegmentLayout
from swift.models.attention.spans import packed_rows


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


def require_packed(model: nn.Module, args: Any) -> None:
    """Installs packed attention; raises ConfigError if rows of a stream would attend to each other in the model."""
    if (obstacle := choose_attention(model)) is not None:
        flag = "packing" if args.packing else "padding_free"
        raise ConfigError(
            f"--{flag}: true: rows of one stream cannot be kept apart in {type(model).__name__}: {obstacle}; "
            f"use --{flag} false"
        )


def layout_of(boundaries: Tensor, device: Any) -> SegmentLayout:
    """Rows of a stream as segments that attend only to themselves; boundaries: [R + 1], their starts and the end."""
    return SegmentLayout(packed_rows(boundaries.diff().tolist()), device)


class PackedRows:
    """Mixin before a trainer of TRL: passes the layout of a batch without padding to the model."""

    def __init__(self, *, args: Any, data_collator: Any = None, **arguments: Any) -> None:
        streams = args.packing or args.padding_free  # for which TRL takes no collator
        super().__init__(args=args, data_collator=None if streams else data_collator, **arguments)  # type: ignore[call-arg]
        if streams and data_collator is not None:
            self.data_collator = replace(data_collator, collator=self.data_collator)  # type: ignore[has-type]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """As TRL's, with the layout among the inputs."""
        if (boundaries := inputs.get("cu_seq_lens_q")) is not None:
            inputs = {**inputs, "attention_layout": layout_of(boundaries, inputs["input_ids"].device)}
            positions = inputs["position_ids"]
            if positions.ndim == 3:  # three axes of images, by one of which TRL counts tokens
                inputs["position_ids"] = positions[0]
                whole = model

                def model(**given: Any) -> Any:
                    return whole(**{**given, "position_ids": positions})

        return super().compute_loss(model, inputs, *arguments, **named)  # type: ignore[misc]
