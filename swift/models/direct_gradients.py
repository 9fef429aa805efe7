"""Gradients of the vocabulary's tables, added where they are kept: no second [V, H] matrix in the backward pass.

V words, H hidden size. Autograd makes a gradient of every use of a parameter and adds it to `.grad` afterwards: an
embedding and an output layer that share a weight hold three [V, H] matrices at the peak, of which the embedding's is
zero nearly everywhere. Here the output layer's backward pass adds its products to `.grad` block by block
(`swift.rl.linear_logprobs`), and the embedding's adds the rows of the tokens that were read.

Autograd does not see these gradients, so nothing that waits for them may be there: no DDP, FSDP or DeepSpeed, no hooks
on the parameter. Whoever calls `accumulate_directly` says so. `torch.autograd.grad` finds none for the tables.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def accumulate_directly(model: nn.Module) -> list[str]:
    """Let the embedding and the output layer of `model` add to `.grad` themselves, where they hold float32 or float64.

    Args:
        model: a transformers model, also under PEFT, in no wrapper that waits for gradients; the output layer takes
            part when it scores itself (`swift.models.scoring.prepare_scoring`).

    Returns:
        the names of the layers that do.
    """
    from swift.models.forward import transformers_model
    from swift.models.scoring import scores_itself

    base = transformers_model(model)
    changed = []
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if _is_plain_table(table):
        table.forward = MethodType(_look_up, table)
        changed.append("embedding")
    if scores_itself(model) and type(head) is nn.Linear and _is_wide(head.weight):
        head.adds_to_grad = True  # type: ignore[assignment]
        changed.append("output layer")
    return changed


def target_of(module: nn.Module) -> nn.Parameter | None:
    """The parameter to whose `.grad` this layer adds its gradient; None where autograd does."""
    weight: Any = module.weight
    return weight if getattr(module, "adds_to_grad", False) and weight.requires_grad else None


def _is_plain_table(table: Any) -> bool:
    return (
        type(table) is nn.Embedding
        and "forward" not in vars(table)
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not table.sparse
        and _is_wide(table.weight)
    )


def _is_wide(weight: Tensor) -> bool:
    """Narrow types are summed in float32 first, which needs a matrix of its own."""
    return weight.dtype in (torch.float32, torch.float64) and weight.numel() > 0


def _look_up(self: Any, input: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and self.weight.requires_grad):
        return type(self).forward(self, input)  # type: ignore[no-any-return]
    result: Tensor = _Lookup.apply(self.weight, input, self.padding_idx)
    return result


class _Lookup(torch.autograd.Function):
    """weight [V, H], ids [...] -> [..., H]."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.padding_idx = padding_idx
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        weight, ids = ctx.saved_tensors
        rows, index = grad.reshape(-1, grad.shape[-1]), ids.flatten()
        if ctx.padding_idx is not None:  # its row learns nothing
            rows = rows.masked_fill((index == ctx.padding_idx).unsqueeze(1), 0.0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, index, rows)
        return None, None, None
