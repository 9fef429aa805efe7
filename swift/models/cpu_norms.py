"""Root-mean-square norms of a model that is trained on a CPU: one pass (`cpu_rows`) instead of a chain of operations.

The layers of transformers compute w * x / sqrt(mean(x^2) + eps) (arXiv:1910.07467, eq. 4) operation by operation, and
autograd goes back through each of them. With n = x / sqrt(mean(x^2) + eps), g the gradient of the output and D the
width::

    dw = sum over rows of g * n
    dx = (g * w - n * mean(g * w * n)) / sqrt(mean(x^2) + eps)

The sums are those of float32 in another order.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swift.models import cpu_rows

TOLERANCE = 1e-5
"""Largest difference to the layer's own output in the trial, whose values are about 1."""


def use_fast_norms(model: nn.Module) -> int:
    """Let the root-mean-square norms of `model` take the short way wherever they hold float32 on a CPU.

    A layer is such a norm when its class is called so and a trial agrees. One whose forward was replaced keeps it.

    Returns:
        how many layers were changed.
    """
    layers = [module for module in model.modules() if _epsilon(module) is not None and _agrees(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm with one weight per column; None for anything else."""
    if not type(module).__name__.endswith("RMSNorm") or "forward" in vars(module):
        return None
    if [name for name, _ in module.named_parameters()] != ["weight"] or module.weight.dim() != 1:  # type: ignore[operator]
        return None
    epsilon = epsilon_of(module)
    return float(epsilon) if isinstance(epsilon, (int, float)) else None


def epsilon_of(module: nn.Module) -> Any:
    """What a norm adds to the mean of squares."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _agrees(module: nn.Module) -> bool:
    weight: Any = module.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.numel():  # spread over processes
        return False
    width, epsilon = weight.shape[0], _epsilon(module)
    assert epsilon is not None
    rows = torch.linspace(-2, 2, 3 * width).view(1, 3, width).sin()
    with torch.no_grad():
        own, found = module(rows), rms_norm(rows, weight, epsilon)
    return own.shape == found.shape and bool((own - found).abs().max() <= TOLERANCE * own.abs().max().clamp(min=1))


def _forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    weight: Any = self.weight
    plain = hidden_states.device.type == "cpu" and hidden_states.dtype == weight.dtype == torch.float32
    if not plain or torch.is_autocast_enabled("cpu"):
        result: Tensor = type(self).forward(self, hidden_states)
        return result
    return rms_norm(hidden_states, weight, epsilon_of(self))


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, with gradients.

    Args:
        states: [..., D].
        weight: [D].
        epsilon: added to the mean of squares.
    """
    result: Tensor = _Norm.apply(states, weight, epsilon)
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        output, normed, inverse = cpu_rows.weighted_norm(states, weight, epsilon)
        ctx.save_for_backward(normed, inverse, weight)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        normed, inverse, weight = ctx.saved_tensors
        dweight = (grad * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        return cpu_rows.norm_gradient(grad.contiguous(), normed, inverse, weight=weight), dweight, None
