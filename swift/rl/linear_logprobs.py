"""Log-probs and entropies of chosen tokens straight from hidden states and the output layer, without an [N, V] matrix.

N positions, H hidden size, V vocabulary. The logits `hidden @ weight.T + bias` exist one block at a time: R rows by C
columns in one buffer that is used again. A running maximum and sum (as in online softmax, arXiv:1805.02867) join the
column blocks, so a block stays small however large the vocabulary is, and the weight is read once per R rows. As R is
thousands, nearly every gradient of a weight row comes from one matrix product, with no sum over blocks to be rounded.

What the backward pass needs is kept in one of three ways (`choose_way`):

    keep        the whole [N, V], where it fits into a byte budget: no matrix product is done twice
    direction   else, where the output layer is frozen (LoRA): d logp / d hidden [N, H], made in the forward pass
    recompute   else, one number per row; the backward pass makes each block of logits again

Statistics are fp32 for bf16, fp16 and fp32 inputs and float64 for float64 inputs, as in `swift.rl.logprobs`; matrix
products are in the type of the inputs, by torch's own `mm` or what the caller knows to be faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swift.rl.logit_blocks import PLAIN, Buffers, Head, LogitMap, block_shape, view

Entropy = Literal["none", "value", "gradient"]
"""What is wanted of the entropy: nothing, its value, or its value with a gradient."""

Way = Literal["value", "direction", "keep", "recompute"]

KEEP_BYTES = 2**27
"""Logits up to this size are kept for the backward pass; beyond it, a second product costs less than the memory."""


def linear_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    logit_map: LogitMap = PLAIN,
    entropy: Entropy = "none",
    keep_bytes: int | None = None,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(map(hidden @ weight.T + bias))` at the given ids, and the entropy of that distribution in nats.

    Args:
        hidden_NH: hidden states that predict the ids, any floating type.
        weight_VH: the output layer, of the same type; the parameter itself, whose data may be gathered for the forward
            and the backward pass alone (ZeRO-3, FSDP2).
        ids_N: token ids in [0, V), long.
        bias_V: the output layer's bias.
        logit_map: scale, cap and temperature.
        entropy: whether it is wanted, and whether it shall carry a gradient.
        keep_bytes: logits up to this size may be kept for the backward pass; None means `KEEP_BYTES`.
        block: rows and columns of a block; None takes what suits the device.

    Returns:
        log-probs [N] and entropy [N] (or None), fp32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or types disagree, or the temperature is not positive.
    """
    _check(hidden_NH, weight_VH, ids_N, bias_V, logit_map)
    learns = torch.is_grad_enabled()
    way = choose_way(
        ids_N.numel() * weight_VH.shape[0] * hidden_NH.element_size(),
        hidden_learns=learns and hidden_NH.requires_grad,
        head_learns=learns and (weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad)),
        entropy=entropy,
        keep_bytes=KEEP_BYTES if keep_bytes is None else keep_bytes,
    )
    shape = block or block_shape(ids_N.numel(), weight_VH.shape[0], on_cpu=hidden_NH.device.type == "cpu")
    hidden_NH = hidden_NH.contiguous()
    if way == "value":
        head = Head(hidden_NH.detach(), weight_VH.detach(), _detached(bias_V), ids_N, logit_map, shape)
        found = _statistics(head, way, entropy)
        return found.logprobs_N, found.entropy_N
    logprobs_N, entropy_N = _LinearLogprobs.apply(
        hidden_NH, weight_VH, bias_V, ids_N, _Settings(logit_map, entropy, way, shape)
    )
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
    logit_map: LogitMap
    entropy: Entropy
    way: Way
    shape: tuple[int, int]


@dataclass(slots=True)
class _Found:
    """What the forward pass learns of each row.

    normaliser_N: log of the sum of exponentials. kept: blocks of logits as the product gave them; where `exponential`,
    their exponentials relative to the row's highest, and `normaliser_N` is the sum of these. direction_NH: d logp / d
    hidden.
    """

    logprobs_N: Tensor
    normaliser_N: Tensor
    entropy_N: Tensor | None
    kept: list[Tensor] | None = None
    exponential: bool = False
    direction_NH: Tensor | None = None


class _LinearLogprobs(torch.autograd.Function):
    """(hidden, weight, bias) -> (log-probs, entropy or an empty tensor)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, ids_N: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        head = Head(hidden_NH, weight_VH, bias_V, ids_N, settings.logit_map, settings.shape)
        found = _statistics(head, settings.way, settings.entropy)
        empty = found.logprobs_N.new_empty(0)
        entropy_N = empty if found.entropy_N is None else found.entropy_N
        ctx.set_materialize_grads(False)
        if settings.entropy != "gradient":
            ctx.mark_non_differentiable(entropy_N)
        ctx.settings, ctx.exponential = settings, found.exponential
        if settings.way == "direction":
            ctx.save_for_backward(found.direction_NH)
        else:  # the parameters themselves: their data may be gone now and back in the backward pass
            ctx.save_for_backward(
                hidden_NH, weight_VH, bias_V, ids_N, found.normaliser_N, entropy_N, *(found.kept or ())
            )
        return found.logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logprob_grad_N, entropy_grad_N = grads[0], grads[1] if ctx.settings.entropy == "gradient" else None
        if logprob_grad_N is None and entropy_grad_N is None:
            return None, None, None, None, None
        if ctx.settings.way == "direction":
            assert logprob_grad_N is not None
            (direction_NH,) = ctx.saved_tensors
            return direction_NH * logprob_grad_N.to(direction_NH.dtype).unsqueeze(1), None, None, None, None
        settings: _Settings = ctx.settings
        hidden_NH, weight_VH, bias_V, ids_N, normaliser_N, entropy_N, *blocks = ctx.saved_tensors
        kept = blocks if settings.way == "keep" else None
        head = Head(hidden_NH, weight_VH, bias_V, ids_N, settings.logit_map, settings.shape)
        if logprob_grad_N is None:
            logprob_grad_N = torch.zeros_like(normaliser_N)
        found = _Found(logprob_grad_N, normaliser_N, entropy_N, kept, ctx.exponential)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sums = _GradientSums(head, needs_hidden, needs_weight, needs_bias and bias_V is not None)
        for rows, columns, grad in _logit_gradients(head, found, logprob_grad_N, entropy_grad_N):
            sums.add(rows, columns, grad)
        return (*sums.results(), None, None)


# --- forward -----------------------------------------------------------------------------------------------------


def _statistics(head: Head, way: Way, entropy: Entropy) -> _Found:
    num_rows = head.ids_N.numel()
    options: Any = {"dtype": head.dtype, "device": head.hidden_NH.device}
    found = _Found(
        logprobs_N=torch.empty(num_rows, **options),
        normaliser_N=torch.empty(num_rows, **options),
        entropy_N=torch.empty(num_rows, **options) if entropy != "none" else None,
    )
    if way == "keep":
        found.kept = []
        found.exponential = (
            head.one_column and not head.narrow and entropy != "gradient" and head.logit_map.softcap is None
        )
    if way == "direction":
        found.direction_NH = torch.empty_like(head.hidden_NH)
    buffers = Buffers(head, keep=way == "keep", in_place=found.exponential, spare=entropy != "none")
    for rows in head.row_spans():
        running = _Running(head, rows, entropy != "none", way == "direction")
        for columns in head.column_spans():
            running.add(columns, buffers.logits(rows, columns, found.kept), buffers)
        running.finish(found)
    return found


class _Running:
    """Softmax statistics of some rows while the blocks of their columns arrive; sums are relative to `highest`.

    total: sum of e^(z - highest). moment: sum of e^(z - highest) (z - highest), for the entropy.
    others: `total` without the row's own id. mean: weight rows summed with the terms of `others` (times the
        derivative of the cap).
    """

    total: Tensor
    highest: Tensor
    selected: Tensor

    def __init__(self, head: Head, rows: slice, with_entropy: bool, with_direction: bool) -> None:
        self.head, self.rows = head, rows
        self.with_entropy, self.with_direction = with_entropy, with_direction
        self.moment: Tensor | None = None
        self.others: Tensor | None = None
        self.mean: Tensor | None = None

    def add(self, columns: slice, logits: Tensor, buffers: Buffers) -> None:
        """One block; `logits` is overwritten by exponentials."""
        first = columns.start == 0
        places, inside = self.head.places(self.rows, columns)
        selected, highest = logits.gather(1, places).squeeze(1), logits.amax(dim=1)
        derivative = self.head.logit_map.derivative(logits) if self.with_direction else None
        if first:
            self.highest = highest
        else:
            self._raise_highest(torch.maximum(self.highest, highest))
        self.selected = selected if first or inside is None else selected.where(inside, self.selected)
        logits.sub_(self.highest.unsqueeze(1))
        if self.with_entropy:
            assert buffers.spare is not None
            shifted = view(buffers.spare, tuple(logits.shape)).copy_(logits)
            exponentials = logits.exp_()
            self.moment = _sum(self.moment, shifted.mul_(exponentials).sum(dim=1))
        else:
            exponentials = logits.exp_()
        self.total = _sum(None if first else self.total, exponentials.sum(dim=1))
        if self.with_direction:
            self._add_direction(columns, exponentials, derivative, places, inside)

    def _raise_highest(self, highest: Tensor) -> None:
        drop = self.highest - highest
        factor = drop.exp()
        if self.moment is not None:  # z - new = (z - old) + drop
            self.moment.add_(self.total * drop).mul_(factor)
        self.total.mul_(factor)
        if self.others is not None and self.mean is not None:
            self.others.mul_(factor)
            self.mean.mul_(factor.unsqueeze(1))
        self.highest = highest

    def _add_direction(
        self, columns: slice, exponentials: Tensor, derivative: Tensor | None, places: Tensor, inside: Tensor | None
    ) -> None:
        """The row's own id stays out, so that 1 - p is exact where p is nearly 1."""
        own = exponentials.gather(1, places)
        own = torch.zeros_like(own) if inside is None else own.masked_fill_(inside.unsqueeze(1), 0.0)
        exponentials.scatter_(1, places, own)
        self.others = _sum(self.others, exponentials.sum(dim=1))
        if derivative is not None:
            exponentials.mul_(derivative)
        weight = self.head.weight_VH[columns]
        first = self.mean is None
        if self.mean is None:
            self.mean = exponentials.new_empty(exponentials.shape[0], weight.shape[1])
        self.head.add_product(self.mean, exponentials.to(weight.dtype), weight, first=first)

    def finish(self, found: _Found) -> None:
        """Write what was asked for."""
        rows, log_total = self.rows, self.total.log()
        centred = self.selected - self.highest
        found.normaliser_N[rows] = self.total if found.exponential else self.highest + log_total
        found.logprobs_N[rows] = centred - log_total
        if found.entropy_N is not None and self.moment is not None:
            found.entropy_N[rows] = log_total - self.moment / self.total
        if found.direction_NH is not None:
            found.direction_NH[rows] = self._direction(centred.exp())

    def _direction(self, own: Tensor) -> Tensor:
        assert self.others is not None and self.mean is not None
        total = self.others + own
        factor = self.others / total
        derivative = self.head.logit_map.derivative(self.selected)
        if derivative is not None:
            factor = factor * derivative
        own_row = self.head.weight_VH[self.head.ids_N[self.rows]].to(factor.dtype).mul_(factor.unsqueeze(1))
        return own_row.sub_(self.mean.div_(total.unsqueeze(1))).mul_(self.head.logit_map.slope)


# --- backward ----------------------------------------------------------------------------------------------------


def _logit_gradients(
    head: Head, found: _Found, logprob_grad_N: Tensor, entropy_grad_N: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The gradient of `hidden @ weight.T + bias`, block by block, in the type of the inputs; void at the next."""
    kept = found.kept
    buffers = Buffers(head, keep=kept is not None, in_place=False, spare=entropy_grad_N is not None)
    narrow = head.buffer(head.hidden_NH.dtype) if head.narrow else None
    blocks = iter(kept or ())
    for rows in head.row_spans():
        upstream = logprob_grad_N[rows].to(head.dtype) * head.logit_map.slope
        entropy_upstream = (
            None if entropy_grad_N is None else entropy_grad_N[rows].to(head.dtype) * head.logit_map.slope
        )
        for columns in head.column_spans():
            derivative = None
            if found.exponential:
                factor = (upstream / found.normaliser_N[rows]).neg_().unsqueeze(1)
                grad = buffers.own(next(blocks)).mul_(factor)
            else:
                if kept is None:
                    logits = buffers.logits(rows, columns, None)
                else:
                    logits = head.logit_map.apply_(buffers.own(next(blocks)))
                derivative = head.logit_map.derivative(logits)
                grad = _softmax_gradient(logits, found, rows, upstream, entropy_upstream, buffers.spare)
            places, inside = head.places(rows, columns)
            own = upstream if inside is None else upstream.where(inside, 0.0)
            grad.scatter_add_(1, places, own.unsqueeze(1))
            if derivative is not None:
                grad.mul_(derivative)
            yield rows, columns, grad if narrow is None else view(narrow, tuple(grad.shape)).copy_(grad)


def _softmax_gradient(
    logits: Tensor, found: _Found, rows: slice, upstream: Tensor, entropy_upstream: Tensor | None, spare: Tensor | None
) -> Tensor:
    """`-p (upstream + entropy_upstream (log p + H))` in place of the logits: all but the part of the row's own id."""
    logprobs = logits.sub_(found.normaliser_N[rows].unsqueeze(1))
    if entropy_upstream is None:
        return logprobs.exp_().mul_(-upstream.unsqueeze(1))
    assert spare is not None and found.entropy_N is not None
    factor = view(spare, tuple(logits.shape)).copy_(logprobs).add_(found.entropy_N[rows].unsqueeze(1))
    factor.mul_(-entropy_upstream.unsqueeze(1)).sub_(upstream.unsqueeze(1))
    return logprobs.exp_().mul_(factor)


class _GradientSums:
    """Gradients of hidden states, weight and bias from those of the blocks.

    A sum over blocks is in the type of statistics; what one product gives at once is not copied.
    """

    def __init__(self, head: Head, hidden: bool, weight: bool, bias: bool) -> None:
        self.head, self.needs_hidden, self.needs_weight = head, hidden, weight
        row_spans = head.row_spans()
        self.one_block = head.one_column and len(row_spans) == 1
        hidden_dtype = head.hidden_NH.dtype if head.one_column else head.dtype
        weight_dtype = head.weight_VH.dtype if len(row_spans) <= 1 else head.dtype
        summed = not self.one_block
        self.hidden = torch.empty_like(head.hidden_NH, dtype=hidden_dtype) if hidden and summed else None
        self.weight = torch.empty_like(head.weight_VH, dtype=weight_dtype) if weight and summed else None
        self.bias = head.weight_VH.new_zeros(head.weight_VH.shape[0], dtype=head.dtype) if bias else None
        if self.weight is not None and not row_spans:
            self.weight.zero_()

    def add(self, rows: slice, columns: slice, grad: Tensor) -> None:
        """One block."""
        head = self.head
        if self.one_block:
            self.hidden = head.matmul(grad, head.weight_VH) if self.needs_hidden else None
            if self.needs_weight:
                self.weight = head.matmul(grad.t(), head.hidden_NH)
        if self.hidden is not None and not self.one_block:
            head.add_product(self.hidden[rows], grad, head.weight_VH[columns], first=columns.start == 0)
        if self.weight is not None and not self.one_block:
            head.add_product(self.weight[columns], grad.t(), head.hidden_NH[rows], first=rows.start == 0)
        if self.bias is not None:
            self.bias[columns] += grad.sum(dim=0, dtype=self.bias.dtype)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the types of the inputs."""
        head = self.head
        return (
            None if self.hidden is None else self.hidden.to(head.hidden_NH.dtype),
            None if self.weight is None else self.weight.to(head.weight_VH.dtype),
            None if self.bias is None or head.bias_V is None else self.bias.to(head.bias_V.dtype),
        )


# --- small parts -------------------------------------------------------------------------------------------------


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _check(hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, bias_V: Tensor | None, logit_map: LogitMap) -> None:
    fits = (
        hidden_NH.dim() == weight_VH.dim() == 2
        and ids_N.shape == hidden_NH.shape[:1]
        and hidden_NH.shape[1] == weight_VH.shape[1]
        and (bias_V is None or bias_V.shape == weight_VH.shape[:1])
    )
    if not fits:
        bias = "" if bias_V is None else f", bias {tuple(bias_V.shape)}"
        raise ValueError(
            f"hidden {tuple(hidden_NH.shape)}, weight {tuple(weight_VH.shape)}{bias} and ids {tuple(ids_N.shape)} "
            "are not [N, H], [V, H] and [N]"
        )
    if hidden_NH.dtype != weight_VH.dtype:
        raise ValueError(f"hidden {hidden_NH.dtype} and weight {weight_VH.dtype} are not of one type")
    if not logit_map.temperature > 0:
        raise ValueError(f"temperature: {logit_map.temperature}: must be positive; 0 is greedy and has no log-probs")
