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

Entropy = Literal["none", "value", "gradient"]
"""What is wanted of the entropy: nothing, its value, or its value with a gradient."""

Way = Literal["value", "direction", "keep", "recompute"]

CPU_BLOCK_ELEMENTS = 2**20
"""Elements of a block on the CPU (4 MiB in fp32, which a cache holds)."""

DEVICE_BLOCK_ELEMENTS = 2**26
"""Elements of a block elsewhere (256 MiB in fp32): kernel launches hardly count then."""

CPU_BLOCK_ROWS = 2048
"""Most rows of a block on the CPU: matrix products are at full speed, and the weight is read seldom."""

DEVICE_BLOCK_ROWS = 16384
"""Most rows of a block elsewhere."""

KEEP_BYTES = 2**27
"""Logits up to this size are kept for the backward pass; beyond it, a second product costs less than the memory."""


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

    def bend(self, mapped: Tensor) -> Tensor | None:
        """The derivative of tanh where the result is `mapped`; None without a cap."""
        if self.softcap is None:
            return None
        return (mapped * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


def linear_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    logit_map: LogitMap = LogitMap(),
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
        head = _Head(hidden_NH.detach(), weight_VH.detach(), _detached(bias_V), ids_N, logit_map, shape)
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


def block_shape(num_rows: int, vocabulary: int, *, on_cpu: bool) -> tuple[int, int]:
    """Rows and columns of a block: as many rows as help, and columns for the rest of the buffer."""
    elements, most_rows = (CPU_BLOCK_ELEMENTS, CPU_BLOCK_ROWS) if on_cpu else (DEVICE_BLOCK_ELEMENTS, DEVICE_BLOCK_ROWS)
    rows = max(1, min(num_rows, most_rows))
    return rows, max(1, min(vocabulary, elements // rows))


@dataclass(frozen=True, slots=True)
class _Settings:
    logit_map: LogitMap
    entropy: Entropy
    way: Way
    shape: tuple[int, int]


@dataclass(slots=True)
class _Head:
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
        return _cut(self.ids_N.numel(), self.shape[0])

    def column_spans(self) -> list[slice]:
        """The vocabulary, cut."""
        return _cut(self.weight_VH.shape[0], self.shape[1])

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
        head = _Head(hidden_NH, weight_VH, bias_V, ids_N, settings.logit_map, settings.shape)
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
        head = _Head(hidden_NH, weight_VH, bias_V, ids_N, settings.logit_map, settings.shape)
        if logprob_grad_N is None:
            logprob_grad_N = torch.zeros_like(normaliser_N)
        found = _Found(logprob_grad_N, normaliser_N, entropy_N, kept, ctx.exponential)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sums = _GradientSums(head, needs_hidden, needs_weight, needs_bias and bias_V is not None)
        for rows, columns, grad in _logit_gradients(head, found, logprob_grad_N, entropy_grad_N):
            sums.add(rows, columns, grad)
        return (*sums.results(), None, None)


# --- forward -----------------------------------------------------------------------------------------------------


def _statistics(head: _Head, way: Way, entropy: Entropy) -> _Found:
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
    buffers = _Buffers(head, keep=way == "keep", in_place=found.exponential, spare=entropy != "none")
    for rows in head.row_spans():
        running = _Running(head, rows, entropy != "none", way == "direction")
        for columns in head.column_spans():
            running.add(columns, buffers.logits(rows, columns, found.kept), buffers)
        running.finish(found)
    return found


class _Buffers:
    """The memory of one block of logits: as the product gives it, and in the type of statistics.

    Args:
        head: the inputs.
        keep: blocks are kept as the product gives them.
        in_place: they are kept as what the statistics make of them.
        spare: another block is needed, for what must not overwrite the logits.
    """

    def __init__(self, head: _Head, *, keep: bool, in_place: bool, spare: bool) -> None:
        self.head = head
        self.copies = head.narrow or (keep and not in_place)
        self.product = head.buffer(head.hidden_NH.dtype) if not keep else None
        self.statistics = head.buffer(head.dtype) if self.copies else None
        self.spare = head.buffer(head.dtype) if spare else None

    def logits(self, rows: slice, columns: slice, kept: list[Tensor] | None) -> Tensor:
        """The mapped logits of a block, to be overwritten; what is to be kept goes to `kept`."""
        size = (rows.stop - rows.start, columns.stop - columns.start)
        product = self.head.product(rows, columns, None if self.product is None else _view(self.product, size))
        if kept is not None:
            kept.append(product)
        return self.head.logit_map.apply_(self.own(product) if self.copies else product)

    def own(self, block: Tensor) -> Tensor:
        """A copy in the type of statistics."""
        assert self.statistics is not None
        return _view(self.statistics, tuple(block.shape)).copy_(block)


class _Running:
    """Softmax statistics of some rows while the blocks of their columns arrive; sums are relative to `highest`.

    total: sum of e^(z - highest). moment: sum of e^(z - highest) (z - highest), for the entropy.
    others: `total` without the row's own id. mean: weight rows summed with the terms of `others` (and the bend).
    """

    total: Tensor
    highest: Tensor
    selected: Tensor

    def __init__(self, head: _Head, rows: slice, with_entropy: bool, with_direction: bool) -> None:
        self.head, self.rows = head, rows
        self.with_entropy, self.with_direction = with_entropy, with_direction
        self.moment: Tensor | None = None
        self.others: Tensor | None = None
        self.mean: Tensor | None = None

    def add(self, columns: slice, logits: Tensor, buffers: _Buffers) -> None:
        """One block; `logits` is overwritten by exponentials."""
        first = columns.start == 0
        places, inside = self.head.places(self.rows, columns)
        selected, highest = logits.gather(1, places).squeeze(1), logits.amax(dim=1)
        bend = self.head.logit_map.bend(logits) if self.with_direction else None
        if first:
            self.highest = highest
        else:
            self._raise_highest(torch.maximum(self.highest, highest))
        self.selected = selected if first or inside is None else selected.where(inside, self.selected)
        logits.sub_(self.highest.unsqueeze(1))
        if self.with_entropy:
            assert buffers.spare is not None
            shifted = _view(buffers.spare, tuple(logits.shape)).copy_(logits)
            exponentials = logits.exp_()
            self.moment = _sum(self.moment, shifted.mul_(exponentials).sum(dim=1))
        else:
            exponentials = logits.exp_()
        self.total = _sum(None if first else self.total, exponentials.sum(dim=1))
        if self.with_direction:
            self._add_direction(columns, exponentials, bend, places, inside)

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
        self, columns: slice, exponentials: Tensor, bend: Tensor | None, places: Tensor, inside: Tensor | None
    ) -> None:
        """The row's own id stays out, so that 1 - p is exact where p is nearly 1."""
        own = exponentials.gather(1, places)
        own = torch.zeros_like(own) if inside is None else own.masked_fill_(inside.unsqueeze(1), 0.0)
        exponentials.scatter_(1, places, own)
        self.others = _sum(self.others, exponentials.sum(dim=1))
        if bend is not None:
            exponentials.mul_(bend)
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
        bend = self.head.logit_map.bend(self.selected)
        if bend is not None:
            factor = factor * bend
        pull = self.head.weight_VH[self.head.ids_N[self.rows]].to(factor.dtype).mul_(factor.unsqueeze(1))
        return pull.sub_(self.mean.div_(total.unsqueeze(1))).mul_(self.head.logit_map.slope)


# --- backward ----------------------------------------------------------------------------------------------------


def _logit_gradients(
    head: _Head, found: _Found, logprob_grad_N: Tensor, entropy_grad_N: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The gradient of `hidden @ weight.T + bias`, block by block, in the type of the inputs; void at the next."""
    kept = found.kept
    buffers = _Buffers(head, keep=kept is not None, in_place=False, spare=entropy_grad_N is not None)
    narrow = head.buffer(head.hidden_NH.dtype) if head.narrow else None
    blocks = iter(kept or ())
    for rows in head.row_spans():
        pull = logprob_grad_N[rows].to(head.dtype) * head.logit_map.slope
        push = None if entropy_grad_N is None else entropy_grad_N[rows].to(head.dtype) * head.logit_map.slope
        for columns in head.column_spans():
            bend = None
            if found.exponential:
                factor = (pull / found.normaliser_N[rows]).neg_().unsqueeze(1)
                grad = buffers.own(next(blocks)).mul_(factor)
            else:
                if kept is None:
                    logits = buffers.logits(rows, columns, None)
                else:
                    logits = head.logit_map.apply_(buffers.own(next(blocks)))
                bend = head.logit_map.bend(logits)
                grad = _softmax_gradient(logits, found, rows, pull, push, buffers.spare)
            places, inside = head.places(rows, columns)
            own = pull if inside is None else pull.where(inside, 0.0)
            grad.scatter_add_(1, places, own.unsqueeze(1))
            if bend is not None:
                grad.mul_(bend)
            yield rows, columns, grad if narrow is None else _view(narrow, tuple(grad.shape)).copy_(grad)


def _softmax_gradient(
    logits: Tensor, found: _Found, rows: slice, pull: Tensor, push: Tensor | None, spare: Tensor | None
) -> Tensor:
    """`-p (pull + push (log p + H))` in place of the logits: all but the part of the row's own id."""
    logprobs = logits.sub_(found.normaliser_N[rows].unsqueeze(1))
    if push is None:
        return logprobs.exp_().mul_(-pull.unsqueeze(1))
    assert spare is not None and found.entropy_N is not None
    factor = _view(spare, tuple(logits.shape)).copy_(logprobs).add_(found.entropy_N[rows].unsqueeze(1))
    factor.mul_(-push.unsqueeze(1)).sub_(pull.unsqueeze(1))
    return logprobs.exp_().mul_(factor)


class _GradientSums:
    """Gradients of hidden states, weight and bias from those of the blocks.

    A sum over blocks is in the type of statistics; what one product gives at once is not copied.
    """

    def __init__(self, head: _Head, hidden: bool, weight: bool, bias: bool) -> None:
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


def _cut(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def _view(buffer: Tensor, size: tuple[int, ...]) -> Tensor:
    return buffer[: size[0] * size[1]].view(size)


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
