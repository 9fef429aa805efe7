"""Products of linear layers on a CPU through oneDNN, with weights that are packed once and used many times.

PyTorch sends float32 products to MKL, which runs without its best kernels on processors that are not Intel's. oneDNN
chooses by what the processor can do. One thread of an AMD EPYC (Zen 5), 64 rows, 512 x 1536: 78 GFLOP/s by MKL, 160 by
oneDNN, 180 with packed weights. A packed weight is a copy, so whoever packs must pack again when the weight changes.

A call of it takes 20 microseconds before the first multiplication, ten times as long as one of MKL, so matrices of up
to `SMALL` weights are MKL's (`is_small`).

oneDNN compiles a kernel per shape, which takes 2 to 3 ms: callers should round the number of rows (`rounded_rows`).
What a row gives does not depend on the rows beside it, as far as oneDNN's kernels go; a single row would be multiplied
by another kernel, so it is doubled.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
from torch import Tensor, nn

FEW_ROWS, SOME_ROWS = 64, 512
"""Up to these, rows are rounded to multiples of 8 and of 64; to multiples of 256 above."""

SMALL = 40_000
"""Weights of a matrix; with more, 64 rows take longer than the calls."""


def available() -> bool:
    """Whether this build of PyTorch has oneDNN's linear layer, on a processor that it is written for."""
    usual = platform.machine().lower() in ("x86_64", "amd64")
    return usual and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def rounded_rows(rows: int) -> int:
    """The number of rows to compute for `rows` rows, so that few different numbers occur.

    >>> [rounded_rows(n) for n in (1, 8, 9, 64, 65, 600)]
    [8, 8, 16, 64, 128, 768]
    """
    step = 8 if rows <= FEW_ROWS else 64 if rows <= SOME_ROWS else 256
    return -(-rows // step) * step


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows` [N, K] times `weight` [M, K] (packed or not) transposed, plus `bias` [M], without gradients.

    float32 on the CPU only.
    """
    if rows.shape[0] == 1:
        return linear(rows.expand(2, -1).contiguous(), weight, bias)[:1]
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return product


def added(sums: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`sums` [N, M] plus `linear(rows, weight, bias)`, at once."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, sums, weight, bias, "add")
    return product


def pack(weight: Tensor) -> Tensor:
    """A copy of `weight` [M, K] in the order that oneDNN's kernels read; for `linear` only."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def is_small(weight: Tensor) -> bool:
    """Whether few rows are multiplied sooner by MKL, which must be as good in every other respect."""
    return weight.numel() <= SMALL and _is_steady(torch.get_num_threads())


@functools.cache
def _is_steady(threads: int) -> bool:
    """Whether MKL gives a row the same bits whatever rows are beside it, with so many threads; tries it."""
    generator = torch.Generator().manual_seed(0)
    for depth, width in ((32, 64), (64, 96), (128, 128), (128, 263), (256, 128)):
        rows, weight = (torch.randn(shape, generator=generator) for shape in ((128, depth), (depth, width)))
        whole = torch.mm(rows, weight)
        if any(not torch.equal(torch.mm(rows[:few], weight), whole[:few]) for few in (8, 16, 24, 40, 64, 96)):
            return False
    return True


def lora_obstacle(module: nn.Module) -> str | None:
    """Why `lora_weight` does not say what this module computes; None when it does, or is a plain linear layer."""
    if type(module) is nn.Linear:
        return None
    from peft.tuners.lora import Linear as LoraLinear

    if type(module) is not LoraLinear or type(module.base_layer) is not nn.Linear:
        return f"a layer of type {type(module).__name__}"
    layer: Any = module
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.merged or layer.fan_in_fan_out or any(name in layer.lora_variant for name in names):
        return "a LoRA layer that does more than add a product"
    if any(layer.lora_bias.get(name, False) for name in names):
        return "a LoRA layer with a bias"
    return None


def lora_weight(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer, its active LoRA adapters added in; see `lora_obstacle`."""
    layer: Any = module
    base = getattr(layer, "base_layer", layer)
    weight, bias = base.weight.detach(), base.bias
    if base is not layer and not layer.disable_adapters:
        for name in layer.active_adapters:
            if name in layer.lora_A:
                weight = weight + layer.get_delta_weight(name).detach().to(weight.dtype)
    return weight, None if bias is None else bias.detach()
