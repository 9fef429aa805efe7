"""Products of few rows with a matrix that is packed once and used many times, by the kernels of `swift.native`.

The matrix lies in panels of 32 columns, and a few rows times a panel are summed in registers. A call is arithmetic and
nothing else: nothing is compiled per shape, chosen or allocated inside, which is a large part of the time of MKL's and
oneDNN's products when a few dozen rows meet a small matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swift.native import LANES, PANEL, Kernels, threads_for


class Panels:
    """A linear layer of float32 on the CPU, copied.

    Args:
        kernels: compiled.
        weight: [M, K].
        bias: [M].
    """

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.detach().contiguous()
        self.width, self.depth = weight.shape
        count = -(-self.width // PANEL)
        self._kernels = kernels
        self._panels = weight.new_empty(count, self.depth, PANEL)
        kernels.pack(weight.data_ptr(), self._panels.data_ptr(), *weight.shape, threads_for(weight.numel()))
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = weight.new_zeros(count * PANEL)
            self._bias[: self.width] = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """[N, K] without gaps -> [N, M]; a row has the same bits whatever rows are beside it."""
        if not rows.is_contiguous() or rows.shape[1:] != (self.depth,) or rows.dtype != torch.float32:
            raise ValueError(
                f"rows are {rows.dtype} {list(rows.shape)}; float32 [N, {self.depth}] without gaps is taken"
            )
        output = rows.new_empty(rows.shape[0], self.width)
        bias = None if self._bias is None else self._bias.data_ptr()
        pointers = rows.data_ptr(), self._panels.data_ptr(), bias, output.data_ptr()
        work = rows.shape[0] * self.depth * self.width // LANES  # 16 of them at once, as long as to read a float
        self._kernels.product(*pointers, rows.shape[0], self.depth, self.width, threads_for(work))
        return output
