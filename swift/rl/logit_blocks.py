"""The logits of an output layer, block by block: their shape, their memory, and what maps them before the softmax.

N positions, H hidden size, V vocabulary; a block has R rows and C columns of the [N, V] logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CPU_BLOCK_ELEMENTS = 2**20
"""Elements of a block on the CPU (4 MiB in fp32, which a cache holds)."""

DEVICE_BLOCK_ELEMENTS = 2**26
"""Elements of a block elsewhere (256 MiB in fp32): kernel launches hardly count then."""

CPU_BLOCK_ROWS = 2048
"""Most rows of a block on the CPU: matrix products are at full speed, and the weight is read seldom."""

DEVICE_BLOCK_ROWS = 16384
"""Most rows of a block elsewhere."""


@dataclass(frozen=True, slots=True)
class LogitMap:
    """What happens to `hidden @ weight.T + bias` before the softmax: `cap * tanh(scale * z / cap) / temperature`.

    scale: Cohere's `logit_scale`, or 1 over Granite's `logits_scaling`. softcap: Gemma's `final_logit_softcapping`;
    None is off. temperature: the sampler's, > 0.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def slope(self) -> float:
        """The derivative, up to that of tanh."""
        return self.scale / self.temperature

    def apply_(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.softcap is not None:
            return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits

    def derivative(self, mapped: Tensor) -> Tensor | None:
        """The derivative of tanh where the result is `mapped`; None without a cap."""
        if self.softcap is None:
            return None
        return (mapped * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


PLAIN = LogitMap()
"""No scale, no cap, temperature 1."""


def block_shape(num_rows: int, vocabulary: int, *, on_cpu: bool) -> tuple[int, int]:
    """Rows and columns of a block: as many rows as help, and columns for the rest of the buffer."""
    elements, most_rows = (CPU_BLOCK_ELEMENTS, CPU_BLOCK_ROWS) if on_cpu else (DEVICE_BLOCK_ELEMENTS, DEVICE_BLOCK_ROWS)
    rows = max(1, min(num_rows, most_rows))
    return rows, max(1, min(vocabulary, elements // rows))


@dataclass(slots=True)
class Head:
    """The inputs, with no gradient of their own, and how they are cut."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    ids_N: Tensor
    logit_map: LogitMap
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """Of statistics."""
        return torch.float64 if self.hidden_NH.dtype == torch.float64 else torch.float32

    @property
    def narrow(self) -> bool:
        """Whether matrix products have another type than statistics."""
        return self.hidden_NH.dtype != self.dtype

    @property
    def one_column(self) -> bool:
        """Whether a block holds whole rows."""
        return self.shape[1] >= self.weight_VH.shape[0]

    def row_spans(self) -> list[slice]:
        """The rows, cut."""
        return cut(self.ids_N.numel(), self.shape[0])

    def column_spans(self) -> list[slice]:
        """The vocabulary, cut."""
        return cut(self.weight_VH.shape[0], self.shape[1])

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """Memory of one block."""
        rows, columns = min(self.shape[0], self.ids_N.numel()), min(self.shape[1], self.weight_VH.shape[0])
        return torch.empty(rows * columns, dtype=dtype, device=self.hidden_NH.device)

    def product(self, rows: slice, columns: slice, out: Tensor | None) -> Tensor:
        """`hidden @ weight.T + bias` of a block: a new tensor, or `out` where it is given and torch multiplies."""
        hidden, weight = self.hidden_NH[rows], self.weight_VH[columns]
        bias = None if self.bias_V is None else self.bias_V[columns]
        return torch.mm(hidden, weight.t(), out=out) if bias is None else torch.addmm(bias, hidden, weight.t(), out=out)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """`left @ right`, a new tensor."""
        return left @ right

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
        """`total += left @ right`, or `=` for the first."""
        if total.dtype != left.dtype:
            product = self.matmul(left, right)
            total.copy_(product) if first else total.add_(product)
        elif first:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)

    def places(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """The column of each row's id within the block, [R, 1], 0 where it is elsewhere; and whether it is in it.

        None where a block holds whole rows, so that all are.
        """
        if self.one_column:
            return self.ids_N[rows].unsqueeze(1), None
        local = self.ids_N[rows] - columns.start
        inside = (local >= 0) & (local < columns.stop - columns.start)
        return local.where(inside, 0).unsqueeze(1), inside


class Buffers:
    """The memory of one block of logits: as the product gives it, and in the type of statistics.

    Args:
        head: the inputs.
        keep: blocks are kept as the product gives them.
        in_place: they are kept as what the statistics make of them.
        spare: another block is needed, for what must not overwrite the logits.
    """

    def __init__(self, head: Head, *, keep: bool, in_place: bool, spare: bool) -> None:
        self.head = head
        self.copies = head.narrow or (keep and not in_place)
        self.product = head.buffer(head.hidden_NH.dtype) if not keep else None
        self.statistics = head.buffer(head.dtype) if self.copies else None
        self.spare = head.buffer(head.dtype) if spare else None

    def logits(self, rows: slice, columns: slice, kept: list[Tensor] | None) -> Tensor:
        """The mapped logits of a block, to be overwritten; what is to be kept goes to `kept`."""
        size = (rows.stop - rows.start, columns.stop - columns.start)
        product = self.head.product(rows, columns, None if self.product is None else view(self.product, size))
        if kept is not None:
            kept.append(product)
        return self.head.logit_map.apply_(self.own(product) if self.copies else product)

    def own(self, block: Tensor) -> Tensor:
        """A copy in the type of statistics."""
        assert self.statistics is not None
        return view(self.statistics, tuple(block.shape)).copy_(block)


def cut(length: int, step: int) -> list[slice]:
    """`length` in parts of `step`."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def view(buffer: Tensor, size: tuple[int, ...]) -> Tensor:
    """The beginning of a buffer as a matrix."""
    return buffer[: size[0] * size[1]].view(size)
