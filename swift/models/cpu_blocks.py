"""Decoder layers that are trained on a CPU: a norm is part of the products behind it, a sum of the one before it.

A decoder layer is x + A(n(x)) and then x + M(n(x)), with n the root-mean-square norm, A attention and M the gated MLP.
As modules these are passes over all states: scale them by the norm's weight, add what a part has given to what went
in, and the same again in the backward pass. In a narrow model they take as long as its products. With w the weight of
a norm, r = x / sqrt(mean(x^2) + eps) and W a matrix behind it::

    (r * w) W^T = r (W * w)^T           dW = (dy^T r) * w           dw = sum over rows of (dy^T r) * W

so w costs a pass over a matrix and not over the states, which is less where there are many rows
(`ROWS_PER_OUTPUT`); oneDNN adds while it multiplies. The sums are those of float32 in another order.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swift.models import cpu_layers, cpu_linear, cpu_norms, cpu_rows, cpu_training
from swift.models.cpu_layers import angles
from swift.models.cpu_norms import epsilon_of

KNOWN_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer")
"""Norm, attention, sum, norm, MLP, sum."""
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
ROWS_PER_OUTPUT = 2
"""Rows of states for each row of the matrices behind a norm, from which on a pass over these costs less."""


def use_fast_blocks(model: nn.Module) -> int:
    """Let the decoder layers of `model` take the short way where their attention, MLP and norms do.

    To be called after `use_fast_norms` and `use_fast_layers`. A layer qualifies by its class and by a trial.

    Returns:
        how many were changed.
    """
    changed = 0
    for module in model.modules():
        if type(module).__name__ not in KNOWN_LAYERS or "forward" in vars(module) or not _has_fast_parts(module):
            continue
        if _agrees(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
            changed += 1
    return changed


def _has_fast_parts(layer: nn.Module) -> bool:
    """Whether its parts are those of the modules beside this one, and nobody looks into them."""
    if set(layer._modules) != set(PARTS):
        return False
    functions = (cpu_norms._forward, cpu_layers._attend, cpu_norms._forward, cpu_layers._feed_forward)
    for name, function in zip(PARTS, functions, strict=True):
        part: Any = layer._modules[name]
        if getattr(vars(part).get("forward"), "__func__", None) is not function:
            return False
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return False
    return True


def _forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    kwargs |= {"position_ids": position_ids, "use_cache": use_cache}  # kinds of attention may ask for them
    if position_embeddings is None or not _is_plain(self, hidden_states):
        result: Tensor = type(self).forward(
            self,
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        return result
    return _block(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


def _is_plain(layer: Any, states: Tensor) -> bool:
    return (
        _has_fast_parts(layer)
        and cpu_layers.is_plain(layer.self_attn, states, cpu_layers.HEADS)
        and cpu_layers.is_plain(layer.mlp, states, cpu_layers.INNER)
    )


def _block(
    layer: Any,
    states: Tensor,
    positions: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    rows_per_output: int = ROWS_PER_OUTPUT,
    **kwargs: Any,
) -> Tensor:
    """The layer on the short way; a norm goes into the products behind it where that pays."""

    def pays(*weights: Tensor) -> bool:
        rows = states.numel() // states.shape[-1]
        return rows >= rows_per_output * sum(weight.shape[0] for weight in weights)

    attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    if not hasattr(attention, "q_norm") and pays(*weights):
        heads = normed_heads(states, norm.weight, epsilon_of(norm), *angles(positions), weights, biases)
    else:
        heads = cpu_layers.heads(attention, norm(states), positions)
    output, _ = cpu_layers.attended(attention, *heads, attention_mask, past_key_values, **kwargs)
    states = plus_product(states, output, attention.o_proj.weight, attention.o_proj.bias)
    norm, gate, up = layer.post_attention_layernorm, mlp.gate_proj.weight, mlp.up_proj.weight
    if pays(gate, up):
        return plus_mlp(states, norm.weight, epsilon_of(norm), gate, up, mlp.down_proj.weight)
    return states + cpu_layers.gated_mlp(norm(states), gate, up, mlp.down_proj.weight)


def normed_heads(
    x: Tensor,
    norm: Tensor,
    epsilon: float,
    cos: Tensor,
    sin: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned, and values [B, heads, T, D], with gradients.

    Args:
        x: [B, T, H], not normed.
        norm: [H], weight of the norm.
        epsilon: of the norm.
        cos: [B, T, 1, D].
        sin: [B, T, 1, D], negative in its first half.
        weights: [heads x D, H] for queries, keys and values.
        biases: [heads x D]; all or none.
    """
    given = [bias for bias in biases if bias is not None]
    query, key, value = _Heads.apply(x, norm, epsilon, cos, sin, *weights, *given)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


class _Heads(torch.autograd.Function):
    """Norm, products for queries, keys and values, and rotary positions: [B, T, H] -> [B, T, heads, D] each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, epsilon: float, cos: Tensor, sin: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:3], parameters[3:]
        normed, inverse = cpu_rows.normed(cpu_training.rows(x), epsilon)
        ctx.save_for_backward(normed, inverse, norm, cos, sin, *weights)
        ctx.shape, ctx.widths, ctx.num_biases = x.shape, [weight.shape[0] for weight in weights], len(biases)
        joint = cpu_linear.linear(normed, torch.cat(weights) * norm, torch.cat(biases) if biases else None)
        query, key, value = (part.view(*x.shape[:-1], -1, cos.shape[-1]) for part in joint.split(ctx.widths, 1))
        return (*(cpu_rows.turned(part, cos, sin) for part in (query, key)), value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse, norm, cos, sin, *weights = ctx.saved_tensors
        wants_x, wants_norm = ctx.needs_input_grad[:2]
        wants = ctx.needs_input_grad[5:]
        joint = normed.new_empty(normed.shape[0], sum(ctx.widths))
        for part, grad, turns in zip(joint.split(ctx.widths, 1), grads, (True, True, False), strict=True):
            target = part.view(grad.shape)
            if turns:
                cpu_rows.turned_back(grad, cos, sin, out=target)
            else:
                target.copy_(grad)
        weight = torch.cat(weights)
        dx = None
        if wants_x:
            pull = cpu_linear.linear(joint, (weight * norm).t())
            dx = cpu_rows.norm_gradient(pull, normed, inverse).view(ctx.shape)
        dnorm, dweights = None, [None] * 3
        if wants_norm or any(wants[:3]):
            pull = cpu_training.weight_gradient(joint, normed)
            dnorm = (pull * weight).sum(0) if wants_norm else None
            dweights = list((pull * norm).split(ctx.widths))
        dbiases = list(joint.sum(0).split(ctx.widths)) if any(wants[3:]) else [None] * ctx.num_biases
        found = [part if want else None for part, want in zip([*dweights, *dbiases], wants, strict=True)]
        return dx, dnorm, None, None, None, *found


def plus_product(sums: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`sums` [..., M] plus `nn.functional.linear(states, weight, bias)`, with gradients."""
    result: Tensor = _PlusProduct.apply(sums, states, weight, bias)
    return result


class _PlusProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        rows = cpu_training.rows
        return cpu_linear.added(rows(sums), rows(states), weight, bias).view(sums.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        return (grad, *cpu_training.product_gradients(grad, states, weight, ctx.needs_input_grad[1:]))


def plus_mlp(x: Tensor, norm: Tensor, epsilon: float, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`x` plus the gated MLP of its root-mean-square norm, with gradients.

    Args:
        x: [..., H].
        norm: [H], weight of the norm.
        epsilon: of the norm.
        gate: [I, H].
        up: [I, H].
        down: [H, I].
    """
    result: Tensor = _PlusMLP.apply(x, norm, epsilon, gate, up, down)
    return result


class _PlusMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, epsilon: float, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        normed, inverse = cpu_rows.normed(cpu_training.rows(x), epsilon)
        gates, ups = cpu_linear.linear(normed, gate * norm), cpu_linear.linear(normed, up * norm)
        ctx.save_for_backward(normed, inverse, norm, gates, ups, gate, up, down)
        return cpu_linear.added(cpu_training.rows(x), cpu_rows.gated(gates, ups), down).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse, norm, gates, ups, gate, up, down = ctx.saved_tensors
        wants_x, wants_norm, _, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        grads = cpu_training.rows(grad)
        dgates, dups, inner = cpu_rows.gated_gradients(cpu_linear.linear(grads, down.t()), gates, ups)
        ddown = cpu_training.weight_gradient(grads, inner) if wants_down else None
        dx = dnorm = dgate = dup = None
        if wants_x:
            pull = cpu_linear.linear(dgates, (gate * norm).t())
            pull = cpu_linear.added(pull, dups, (up * norm).t())
            dx = cpu_rows.norm_gradient(pull, normed, inverse, plus=grads).view(grad.shape)
        if wants_norm or wants_gate:
            dgate = cpu_training.weight_gradient(dgates, normed)
        if wants_norm or wants_up:
            dup = cpu_training.weight_gradient(dups, normed)
        if wants_norm:
            assert dgate is not None and dup is not None
            dnorm = (dgate * gate).sum(0) + (dup * up).sum(0)
        dgate = dgate * norm if wants_gate and dgate is not None else None
        dup = dup * norm if wants_up and dup is not None else None
        return dx, dnorm, None, dgate, dup, ddown


def _agrees(layer: Any) -> bool:
    """Whether a layer says the same on the short way, with norms that are part of products."""
    attention = cpu_layers.with_plain_attention(layer.self_attn)
    alike = copy.copy(layer)
    alike._modules = {**layer._modules, "self_attn": attention}
    x, positions = cpu_layers.trial_states(attention)
    with torch.no_grad():
        own = type(layer).forward(alike, x, position_embeddings=positions)
        return cpu_layers.near(own, _block(alike, x, positions, rows_per_output=0))
