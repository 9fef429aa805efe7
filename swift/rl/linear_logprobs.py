"""Log-probs and entropies of chosen tokens from hidden states and the output layer, without an [N, V] matrix.

N positions, H hidden size, V vocabulary, C columns of a block. The logits `hidden @ weight.T + bias` exist one block of
columns at a time, [N, C]. A running maximum and sum (as in online softmax, arXiv:1805.02867) join the blocks.

What the backward pass needs is kept in one of three ways (`choose_way`):

    keep        the whole [N, V], where it fits into a byte budget: no matrix product is done twice
    direction   else, where the output layer is frozen (LoRA): d logp / d hidden [N, H], made in the forward pass
    recompute   else, one number per row; the backward pass makes each block of logits again

Statistics are fp32 for bf16, fp16 and fp32 inputs and float64 for float64 inputs; matrix products are in the type of
the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Entropy = Literal["none", "value", "gradient"]
"""Whether to compute the entropy: not, its value, or its value with a gradient."""

Way = Literal["value", "direction", "keep", "recompute"]

KEEP_BYTES = 2**27
"""Logits up to this size are kept for the backward pass; beyond it, a second product costs less than the memory."""

CPU_BLOCK_ELEMENTS = 2**20
"""Elements of a block on the CPU (4 MiB in fp32, which a cache holds)."""

DEVICE_BLOCK_ELEMENTS = 2**26
"""Elements of a block elsewhere (256 MiB in fp32): kernel launches hardly count then."""

FEWEST_COLUMNS = 256
"""However many rows there are, so that matrix products stay efficient."""


@dataclass(frozen=True, slots=True)
class LogitMap:
    """The map from `hidden @ weight.T + bias` to the softmax: `cap * tanh(scale * z / cap) / temperature`.

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

    def tanh_derivative(self, mapped: Tensor) -> Tensor:
        """The derivative of tanh where the result is `mapped`; there must be a cap."""
        assert self.softcap is not None
        return (mapped * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


PLAIN = LogitMap()
"""No scale, no cap, temperature 1."""


def linear_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    logit_map: LogitMap = PLAIN,
    entropy: Entropy = "none",
    keep_bytes: int | None = None,
    columns: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(map(hidden @ weight.T + bias))` at the given ids, and the entropy of that distribution in nats.

    Args:
        hidden_NH: hidden states that predict the ids, any floating type.
        weight_VH: the output layer, of the same type; the parameter itself, whose data may be gathered for the forward
            and the backward pass alone (ZeRO-3, FSDP2).
        ids_N: token ids in [0, V), long.
        bias_V: the output layer's bias.
        logit_map: scale, cap and temperature.
        entropy: whether to compute it, and whether with a gradient.
        keep_bytes: logits up to this size may be kept for the backward pass; None means `KEEP_BYTES`.
        columns: of a block; None takes what suits the device.

    Returns:
        log-probs [N] and entropy [N] (or None), fp32 (float64 for float64 inputs).
    """
    vocabulary, learns = weight_VH.shape[0], torch.is_grad_enabled()
    way = choose_way(
        ids_N.numel() * vocabulary * hidden_NH.element_size(),
        hidden_learns=learns and hidden_NH.requires_grad,
        head_learns=learns and (weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad)),
        entropy=entropy,
        keep_bytes=KEEP_BYTES if keep_bytes is None else keep_bytes,
    )
    if columns is None:
        elements = CPU_BLOCK_ELEMENTS if hidden_NH.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
        columns = min(vocabulary, max(FEWEST_COLUMNS, elements // max(1, ids_N.numel())))
    blocks = [slice(start, min(start + columns, vocabulary)) for start in range(0, vocabulary, columns)]
    dtype = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
    settings = _Settings(logit_map, entropy, way, blocks, dtype)
    logprobs_N, entropy_N = _LinearLogprobs.apply(hidden_NH.contiguous(), weight_VH, bias_V, ids_N, settings)
    return logprobs_N, entropy_N if entropy != "none" else None


def choose_way(num_bytes: int, *, hidden_learns: bool, head_learns: bool, entropy: Entropy, keep_bytes: int) -> Way:
    """What to keep for the backward pass.

    An entropy with a gradient gains nothing from a direction: it would need a second product in the forward pass, as
    much as making the logits again.

    Args:
        num_bytes: of all logits.
        hidden_learns: the hidden states need a gradient.
        head_learns: weight or bias does.
        entropy: as in `linear_logprobs`.
        keep_bytes: the budget.
    """
    if not hidden_learns and not head_learns:
        return "value"
    if num_bytes <= keep_bytes:
        return "keep"
    return "recompute" if head_learns or entropy == "gradient" else "direction"


@dataclass(frozen=True, slots=True)
class _Settings:
    """blocks: the vocabulary, in slices of columns. dtype: of statistics."""

    logit_map: LogitMap
    entropy: Entropy
    way: Way
    blocks: list[slice]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Head:
    """The inputs without a gradient of their own, and their logits block by block."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    ids_N: Tensor
    settings: _Settings

    def product(self, columns: slice) -> Tensor:
        """`hidden @ weight.T + bias` of a block, [N, C]."""
        bias = None if self.bias_V is None else self.bias_V[columns]
        return torch.nn.functional.linear(self.hidden_NH, self.weight_VH[columns], bias)

    def mapped(self, product: Tensor, *, copy: bool) -> Tensor:
        """The logits of a block in the type of statistics, to be overwritten."""
        logits, logit_map = product.to(self.settings.dtype, copy=copy), self.settings.logit_map
        if logit_map.softcap is None:
            return logits.mul_(logit_map.slope) if logit_map.slope != 1.0 else logits
        return logits.mul_(logit_map.scale / logit_map.softcap).tanh_().mul_(logit_map.softcap / logit_map.temperature)

    def places(self, columns: slice) -> tuple[Tensor, Tensor]:
        """The column of each row's id within the block, [N, 1], 0 where it is elsewhere; whether it is in it, [N]."""
        local = self.ids_N - columns.start
        inside = (local >= 0) & (self.ids_N < columns.stop)
        return local.where(inside, 0).unsqueeze(1), inside


class _LinearLogprobs(torch.autograd.Function):
    """(hidden, weight, bias) -> (log-probs, entropy or an empty tensor)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, ids_N: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        head, keep = _Head(hidden_NH, weight_VH, bias_V, ids_N, settings), settings.way == "keep"
        softmax, kept = _Softmax(head), []
        for columns in settings.blocks:
            product = head.product(columns)
            if keep:
                kept.append(product)
            softmax.add(columns, head.mapped(product, copy=keep))
        log_total_N = softmax.total.log()
        logprobs_N = (softmax.selected - softmax.highest) - log_total_N
        entropy_N = logprobs_N.new_empty(0)
        if settings.entropy != "none":
            entropy_N = log_total_N - softmax.moment / softmax.total
        ctx.set_materialize_grads(False)
        if settings.entropy != "gradient":
            ctx.mark_non_differentiable(entropy_N)
        ctx.settings = settings
        if settings.way == "direction":
            ctx.save_for_backward(softmax.direction())
        elif settings.way != "value":  # the parameters themselves: their data may be gone now and back in the backward
            ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, softmax.highest, softmax.total, entropy_N, *kept)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        logprob_grad_N, entropy_grad_N = grads[0], grads[1] if settings.entropy == "gradient" else None
        if logprob_grad_N is None and entropy_grad_N is None:
            return None, None, None, None, None
        if settings.way == "direction":
            assert logprob_grad_N is not None
            (direction_NH,) = ctx.saved_tensors
            return direction_NH * logprob_grad_N.to(direction_NH.dtype).unsqueeze(1), None, None, None, None
        hidden_NH, weight_VH, bias_V, ids_N, highest_N, total_N, entropy_N, *kept = ctx.saved_tensors
        head, logit_map = _Head(hidden_NH, weight_VH, bias_V, ids_N, settings), settings.logit_map
        if logprob_grad_N is None:
            logprob_grad_N = torch.zeros_like(total_N)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        hidden_grad = torch.zeros_like(hidden_NH, dtype=settings.dtype) if needs_hidden else None
        weight_grad = torch.empty_like(weight_VH) if needs_weight else None
        bias_grad = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None
        for i, columns in enumerate(settings.blocks):
            logits = head.mapped(kept[i] if kept else head.product(columns), copy=bool(kept))
            derivative = logit_map.tanh_derivative(logits) if logit_map.softcap is not None else None
            logits.sub_(highest_N.unsqueeze(1))
            grad = _logit_gradient(head, columns, logits, total_N, entropy_N, logprob_grad_N, entropy_grad_N)
            if derivative is not None:
                grad.mul_(derivative)
            if logit_map.slope != 1.0:
                grad.mul_(logit_map.slope)
            grad = grad.to(hidden_NH.dtype)
            if hidden_grad is not None:
                _add_product(hidden_grad, grad, weight_VH[columns])
            if weight_grad is not None:
                torch.mm(grad.t(), hidden_NH, out=weight_grad[columns])
            if bias_grad is not None:
                bias_grad[columns] = grad.sum(dim=0, dtype=settings.dtype)
        return None if hidden_grad is None else hidden_grad.to(hidden_NH.dtype), weight_grad, bias_grad, None, None


class _Softmax:
    """Statistics of the rows, updated by each block of columns; sums are relative to `highest`.

    total: sum of e^(z - highest). moment: sum of e^(z - highest) (z - highest), for the entropy.
    others: `total` without the row's own id. mean: weight rows summed with the terms of `others` (times the
        derivative of the cap). Both are for the direction, where 1 - p has to be exact for p near 1.
    """

    def __init__(self, head: _Head) -> None:
        self.head = head
        num_rows = head.ids_N.numel()
        options: Any = {"dtype": head.settings.dtype, "device": head.hidden_NH.device}
        self.highest = torch.full((num_rows,), torch.finfo(head.settings.dtype).min, **options)
        self.selected, self.total, self.moment, self.others = (torch.zeros(num_rows, **options) for _ in range(4))
        self.with_entropy, self.with_direction = head.settings.entropy != "none", head.settings.way == "direction"
        self.mean = torch.zeros(num_rows, head.hidden_NH.shape[1] if self.with_direction else 0, **options)

    def add(self, columns: slice, logits: Tensor) -> None:
        """One block; `logits` is overwritten."""
        places, inside = self.head.places(columns)
        logit_map = self.head.settings.logit_map
        self.selected = logits.gather(1, places).squeeze(1).where(inside, self.selected)
        capped = self.with_direction and logit_map.softcap is not None
        derivative = logit_map.tanh_derivative(logits) if capped else None
        highest = torch.maximum(self.highest, logits.amax(dim=1))
        drop = self.highest - highest
        factor = drop.exp()
        self.moment.add_(self.total * drop).mul_(factor)  # z - new = (z - old) + drop
        self.total.mul_(factor)
        self.others.mul_(factor)
        self.mean.mul_(factor.unsqueeze(1))
        self.highest = highest
        shifted = logits.sub_(self.highest.unsqueeze(1))
        exponentials = shifted.exp() if self.with_entropy else shifted.exp_()
        self.total += exponentials.sum(dim=1)
        if self.with_entropy:
            self.moment += shifted.mul_(exponentials).sum(dim=1)
        if self.with_direction:
            exponentials.scatter_(1, places, exponentials.gather(1, places).masked_fill_(inside.unsqueeze(1), 0.0))
            self.others += exponentials.sum(dim=1)
            if derivative is not None:
                exponentials.mul_(derivative)
            weight = self.head.weight_VH[columns]
            _add_product(self.mean, exponentials.to(weight.dtype), weight)

    def direction(self) -> Tensor:
        """D logp / d hidden, [N, H], in the type of the weight."""
        head, weight_VH, logit_map = self.head, self.head.weight_VH, self.head.settings.logit_map
        total = self.others + (self.selected - self.highest).exp()
        factor = self.others / total
        if logit_map.softcap is not None:
            factor = factor * logit_map.tanh_derivative(self.selected)
        own_row = weight_VH[head.ids_N].to(head.settings.dtype).mul_(factor.unsqueeze(1))
        direction = own_row.sub_(self.mean.div_(total.unsqueeze(1))).mul_(logit_map.slope)
        return direction.to(weight_VH.dtype)


def _logit_gradient(
    head: _Head,
    columns: slice,
    shifted: Tensor,
    total_N: Tensor,
    entropy_N: Tensor,
    logprob_grad_N: Tensor,
    entropy_grad_N: Tensor | None,
) -> Tensor:
    """`(onehot - p) g - p (log p + H) g_H` of a block, [N, C], in place of its logits less the highest of their row."""
    upstream = logprob_grad_N.to(head.settings.dtype).unsqueeze(1)
    total = total_N.unsqueeze(1)
    if entropy_grad_N is None:
        grad = shifted.exp_().mul_(-upstream / total)
    else:
        entropy_upstream = entropy_grad_N.to(head.settings.dtype).unsqueeze(1) / total
        factor = (shifted + (entropy_N.unsqueeze(1) - total.log())).mul_(-entropy_upstream).sub_(upstream / total)
        grad = shifted.exp_().mul_(factor)
    places, inside = head.places(columns)
    return grad.scatter_add_(1, places, upstream.where(inside.unsqueeze(1), 0.0))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
