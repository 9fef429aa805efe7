"""A constant loss scale, for policies in float16.

float16 has three bits more than bfloat16, so that sampler and trainer agree better (arXiv:2510.26788). But a token has
1/N of a loss over N tokens, and much of a gradient would be below float16's smallest numbers. The loss is multiplied by
a power of two, which changes no digit. It leaves the gradients where they are float32: in the norm, in the masters of
16-bit weights (`swift.trainers.optimizers.master_weights`), and in place where weights are float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swift.trainers.optimizers.master_weights import GRADIENT_FACTOR

LOSS_SCALE = 65536.0
"""At 65,536 tokens a step a token's gradient has the size that it has in a step of one token."""


def loss_scale_of(model: nn.Module) -> float:
    """The factor of the loss: `LOSS_SCALE` for a model that has weights in float16 or computes in it, else 1."""
    half = any(parameter.dtype == torch.float16 for parameter in model.parameters())
    half = half or any(getattr(module, "compute_dtype", None) == torch.float16 for module in model.modules())
    return LOSS_SCALE if half else 1.0  # quantised layers have a type that they compute in


def clip_scaled(parameters: Iterable[nn.Parameter], optimizer: Optimizer, *, scale: float, max_norm: float) -> Tensor:
    """Take the scale out of gradients, and clip them; their norm before, without the scale, as a tensor.

    Gradients in 16 bits stay scaled: their masters are told (`GRADIENT_FACTOR`).

    Args:
        parameters: with gradients.
        optimizer: that steps next.
        scale: of the loss.
        max_norm: 0 does not clip.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms])) / scale
    factor = torch.full_like(norm, 1.0 / scale)
    if max_norm > 0:
        factor *= (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's clip_grad_norm_
    setattr(optimizer, GRADIENT_FACTOR, factor)
    for gradient in gradients:
        if gradient.dtype == torch.float32:
            gradient.mul_(factor.to(gradient.device))
    return norm
