"""Norms, gates and rotary positions of rows on a CPU, with their gradients, as the layers that are trained need them.

Each is one pass by the kernels of `swift.native` where these are there and the tensors are what they take (float32,
without gaps, widths that are multiples of 16), else a chain of PyTorch's operations that gives the same up to rounding.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from swift.native import LANES, Kernels, kernels, threads_for


def _compiled(*tensors: Tensor) -> Kernels | None:
    """The kernels, if they take all of these."""
    found = kernels()
    if found is None or not all(_is_plain(one) and one.is_contiguous() for one in tensors):
        return None
    return found if all(one.shape[-1] % LANES == 0 for one in tensors) else None


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.numel() > 0


# --- gates -------------------------------------------------------------------------------------------------------


def gated(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) * ups, [N, I] each (arXiv:2002.05202, eq. 5)."""
    found = _compiled(gates, ups)
    if found is None:
        return torch.nn.functional.silu(gates).mul_(ups)
    output = torch.empty_like(gates)
    count, width = gates.shape
    found.gate(gates.data_ptr(), ups.data_ptr(), output.data_ptr(), count, width, width, threads_for(gates.numel()))
    return output


def gated_gradients(grads: Tensor, gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gates and ups, and what `gated` gave, from its gradients `grads` [N, I], which are lost."""
    found = _compiled(grads, gates, ups)
    if found is None:
        active = torch.nn.functional.silu(gates)
        dups = grads * active
        return torch.ops.aten.silu_backward(grads.mul_(ups), gates), dups, active.mul_(ups)
    dups, output = torch.empty_like(gates), torch.empty_like(gates)
    pointers = (one.data_ptr() for one in (grads, gates, ups, grads, dups, output))
    found.gate_back(*pointers, *gates.shape, threads_for(gates.numel()))
    return grads, dups, output


# --- norms -------------------------------------------------------------------------------------------------------


def inverse_rms(states: Tensor, epsilon: Tensor) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) over the last dimension, [..., 1], without gradients; epsilon is [1]."""
    norm = torch.ops.aten.linalg_vector_norm(states, 2.0, [-1], True)  # TorchScript knows it by this name only
    return torch.addcmul(epsilon, norm, norm, value=1.0 / states.shape[-1]).rsqrt_()


@lru_cache(maxsize=16)
def constant(value: float, dtype: torch.dtype) -> Tensor:
    """[1], on the CPU."""
    with torch.inference_mode(False):  # it may be used in training, too
        return torch.full((1,), value, dtype=dtype)


def normed(states: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """States [..., D] divided by their root mean square, and one over that [..., 1]."""
    found = _compiled(states)
    if found is None:
        inverse = inverse_rms(states, constant(epsilon, states.dtype))
        return states * inverse, inverse
    result, inverse = torch.empty_like(states), states.new_empty(*states.shape[:-1], 1)
    width = states.shape[-1]
    pointers = states.data_ptr(), None, epsilon, result.data_ptr(), inverse.data_ptr(), None
    found.norm(*pointers, states.numel() // width, width, threads_for(states.numel()))
    return result, inverse


def weighted_norm(states: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """`normed` times `weight` [D], and what `normed` gives."""
    found = _compiled(states, weight) if weight.shape == states.shape[-1:] else None
    if found is None:
        result, inverse = normed(states, epsilon)
        return result * weight, result, inverse
    output, result = torch.empty_like(states), torch.empty_like(states)
    inverse = states.new_empty(*states.shape[:-1], 1)
    width = states.shape[-1]
    pointers = states.data_ptr(), weight.data_ptr(), epsilon, result.data_ptr(), inverse.data_ptr(), output.data_ptr()
    found.norm(*pointers, states.numel() // width, width, threads_for(states.numel()))
    return output, result, inverse


def norm_gradient(
    grads: Tensor, result: Tensor, inverse: Tensor, *, weight: Tensor | None = None, plus: Tensor | None = None
) -> Tensor:
    """The gradient of the states from `grads` [..., D] of their norm, plus `plus`.

    Args:
        grads: of `normed`, or of `weighted_norm` if there is a weight.
        result: as `normed` gave it.
        inverse: as `normed` gave it.
        weight: [D].
        plus: [..., D].
    """
    given = [one for one in (weight, plus) if one is not None]
    found = _compiled(grads, result, *given) if inverse.is_contiguous() else None
    if found is None:
        pull = grads if weight is None else grads * weight
        width = result.shape[-1]
        mean = torch.mv((pull * result).view(-1, width), result.new_ones(width)).view(inverse.shape).div_(-width)
        pull = torch.addcmul(pull, result, mean)
        return pull.mul_(inverse) if plus is None else torch.addcmul(plus, pull, inverse)
    output = torch.empty_like(result)
    width = result.shape[-1]
    first, last = (None if one is None else one.data_ptr() for one in (weight, plus))
    pointers = grads.data_ptr(), first, result.data_ptr(), inverse.data_ptr(), last, output.data_ptr()
    found.norm_back(*pointers, result.numel() // width, width, threads_for(result.numel()))
    return output


# --- rotary positions --------------------------------------------------------------------------------------------


def turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of heads [..., H, D] (arXiv:2104.09864), without gradients.

    Args:
        states: [..., H, D].
        cos: [..., 1, D].
        sin: [..., 1, D], negative in its first half.
    """
    if (found := _takes_heads(states, cos, sin)) is not None:
        output = states.new_empty(states.shape)
        _turn(found, states, cos, sin, output, back=False)
        return output
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


def turned_back(grad: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient of what `turned` was given [..., H, D], written into `out` if there is one."""
    if (found := _takes_heads(grad, cos, sin)) is not None and (out is None or _row_strides(out) is not None):
        output = grad.new_empty(grad.shape) if out is None else out
        if output.stride(-2) == output.shape[-1]:
            _turn(found, grad, cos, sin, output, back=True)
            return output
    rolled = (grad * sin).roll(grad.shape[-1] // 2, -1)
    return torch.addcmul(rolled, grad, cos, out=rolled if out is None else out)


def _row_strides(states: Tensor) -> int | None:
    """How far the rows of heads [..., H, D] lie apart, if all lie equally far and heads have no gaps."""
    *outer, _, _ = states.shape
    strides = states.stride()
    for i in range(len(outer) - 1):
        if outer[i] != 1 and strides[i] != strides[i + 1] * outer[i + 1]:
            return None
    return strides[-3] if outer and strides[-1] == 1 else None


def _takes_heads(states: Tensor, cos: Tensor, sin: Tensor) -> Kernels | None:
    found = kernels()
    shape = (*states.shape[:-2], 1, states.shape[-1])
    if found is None or states.dim() < 3 or states.shape[-1] % 2 or cos.shape != shape or sin.shape != shape:
        return None
    if not all(_is_plain(one) for one in (states, cos, sin)) or _row_strides(states) is None:
        return None
    return found if cos.is_contiguous() and sin.is_contiguous() else None


def _turn(found: Kernels, states: Tensor, cos: Tensor, sin: Tensor, output: Tensor, *, back: bool) -> None:
    heads, depth = states.shape[-2:]
    pointers = (one.data_ptr() for one in (states, cos, sin, output))
    strides = _row_strides(states), states.stride(-2), _row_strides(output)
    found.turn(*pointers, cos.numel() // depth, heads, depth, *strides, back, threads_for(states.numel()))
