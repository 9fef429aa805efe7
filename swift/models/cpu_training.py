"""Linear layers of a model that is trained on a CPU: forward and both products of the backward through oneDNN.

PyTorch sends float32 products to MKL, which does without its best kernels on processors that are not Intel's
(`swift.models.cpu_linear`). One thread of an AMD EPYC (Zen 5), 1048 rows, 512 x 1536, GFLOP/s by MKL and by oneDNN:
90 and 183 in the forward, 88 and 172 for the gradient of the input, 86 and 161 for that of the weight. The sums are
those of float32 in another order.

oneDNN compiles a kernel per shape (about a millisecond) and remembers about a thousand, so streams are filled up to few
different lengths (`filled_length`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swift.models import cpu_linear

FEWEST_ROWS, NARROWEST = 64, 32
"""Below these a product is over before a kernel would be compiled."""

LENGTHS_PER_OCTAVE, SHORTEST_STEP = 32, 64
"""Streams have one of 32 lengths between a power of two and the next, 64 tokens apart at least."""

WIDEST_CONVOLVED, ROWS_OF_IMAGES = 512, 4
"""See `weight_gradient`."""


def filled_length(num_tokens: int) -> int:
    """The length to which a stream is filled up: 1 or 2 % more on average, short streams stay as they are.

    >>> [filled_length(n) for n in (100, 600, 1000, 1049, 3000, 4200)]
    [100, 640, 1024, 1088, 3008, 4224]
    """
    if num_tokens < 4 * SHORTEST_STEP:
        return num_tokens
    step = max(SHORTEST_STEP, (1 << (num_tokens - 1).bit_length()) // (2 * LENGTHS_PER_OCTAVE))
    return -(-num_tokens // step) * step


def use_fast_products(model: nn.Module) -> int:
    """Let the plain linear layers of `model` multiply through oneDNN wherever they hold float32 on a CPU.

    A layer whose forward was replaced keeps it.

    Returns:
        how many layers were changed; 0 where oneDNN is not available.
    """
    if not cpu_linear.available():
        return 0
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and min(module.in_features, module.out_features) >= NARROWEST
    ]
    for layer in layers:
        layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]
    return len(layers)


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """In the place of a linear layer's own."""
    if not is_plain(input, self.weight):
        return nn.functional.linear(input, self.weight, self.bias)
    return product(input, self.weight, self.bias)


def is_plain(states: Tensor, weight: Tensor) -> bool:
    """Whether this product is one for oneDNN: float32 on the CPU, ordinary tensors, enough rows."""
    return (
        states.device.type == "cpu"
        and states.dtype == weight.dtype == torch.float32
        and type(weight) in (nn.Parameter, Tensor)
        and weight.is_contiguous()
        and states.numel() >= FEWEST_ROWS * states.shape[-1]
        and not torch.is_autocast_enabled("cpu")
    )


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear` for float32 on the CPU, with gradients: [..., K] and [M, K] give [..., M]."""
    result: Tensor = _Product.apply(states, weight, bias)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return cpu_linear.linear(rows(states), weight, bias).view(*states.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        return product_gradients(grad, states, weight, ctx.needs_input_grad)


def product_gradients(
    grad: Tensor, states: Tensor, weight: Tensor, wants: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of `product`: the gradients of states, weight and bias that are wanted, from that of the output."""
    grads = rows(grad)
    dstates = dweight = None
    if wants[0]:
        dstates = cpu_linear.linear(grads, weight.t()).view(states.shape)
    if wants[1]:
        dweight = weight_gradient(grads, rows(states))
    return dstates, dweight, grads.sum(0) if wants[2] else None


def weight_gradient(grads: Tensor, states: Tensor) -> Tensor:
    """[M, K]: what gradients [N, M] of the outputs for inputs [N, K] say about the weight.

    The narrower one is turned around, which takes as long as a fifth of a wide product and two thirds of a narrow one.
    So narrow ones are asked for as what they are, too: the gradient of a convolution by pixels, whose kernels turn
    what they need on the way. Both given without gaps.
    """
    if max(grads.shape[1], states.shape[1]) <= WIDEST_CONVOLVED and grads.shape[0] % ROWS_OF_IMAGES == 0:
        return _of_pixels(grads, states)
    if grads.shape[1] > states.shape[1]:
        return cpu_linear.linear(states.t().contiguous(), grads.t()).t().contiguous()
    return cpu_linear.linear(grads.t().contiguous(), states.t())


def _of_pixels(grads: Tensor, states: Tensor) -> Tensor:
    """The same for rows that are the pixels of images with K channels in and M out."""

    def images(rows: Tensor) -> Tensor:
        return rows.view(ROWS_OF_IMAGES, 1, -1, rows.shape[1]).permute(0, 3, 1, 2)

    filters = grads.new_empty(grads.shape[1], states.shape[1], 1, 1)
    one, none = [1, 1], [0, 0]
    found: Tensor = torch.ops.aten.convolution_backward(
        images(grads), images(states), filters, None, one, none, one, False, none, 1, [False, True, False]
    )[1]
    return found.view(filters.shape[:2])


def rows(states: Tensor) -> Tensor:
    """[..., K] -> [N, K] without gaps: with others oneDNN falls back to loops that take a hundred times as long."""
    return states.reshape(-1, states.shape[-1]).contiguous()
