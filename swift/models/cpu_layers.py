"""Attention and gated MLP of a plain decoder that is trained on a CPU: few large operations, not many small ones.

transformers' layers multiply the same states three times for queries, keys and values, turn two of them operation by
operation, and autograd comes back through each. Here those products are one, and each part has its own backward pass.
With x the input of the MLP, G and U its gate and up weights, D its down weight, s the sigmoid linear unit::

    g = x G^T        u = x U^T        h = s(g) * u        y = h D^T        (arXiv:2002.05202, eq. 6)

s(g) and h are computed again in the backward pass, so a layer keeps half as much of its MLP. The sums are those of
float32 in another order.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swift.models import cpu_linear, cpu_rows, cpu_training

KNOWN_ATTENTION = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention", "MistralAttention")
"""Rotary attention with grouped heads and nothing else, but for a norm of queries and keys."""
KNOWN_MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "MistralMLP")
TOLERANCE = 1e-4
"""Largest difference to the layer's own output in the trial, in its standard deviations."""

HEADS, INNER = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def use_fast_layers(model: nn.Module) -> int:
    """Let attention and MLP of the decoder layers of `model` take the short way wherever they hold float32 on a CPU.

    A layer qualifies by its class and by a trial. One with an adapter, or whose forward was replaced, keeps it.

    Returns:
        how many were changed; 0 where oneDNN is not available.
    """
    if not cpu_linear.available():
        return 0
    changed = 0
    for module in model.modules():
        name = type(module).__name__
        forward: Any = _attend if name in KNOWN_ATTENTION else _feed_forward if name in KNOWN_MLPS else None
        if forward is None or "forward" in vars(module) or not _holds_plain_layers(module, _parts(module)):
            continue
        if any(one.dtype != torch.float32 or one.device.type != "cpu" for one in module.parameters()):
            continue
        if _attention_agrees(module) if forward is _attend else _mlp_agrees(module):
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
            changed += 1
    return changed


def _parts(module: nn.Module) -> tuple[str, ...]:
    return HEADS if type(module).__name__ in KNOWN_ATTENTION else INNER


def _holds_plain_layers(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether these are linear layers into which nobody looks, whose weights are here."""
    parts = module._modules
    for name in names:
        layer: Any = parts.get(name)
        if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            return False
        forward = vars(layer).get("forward")
        if forward is not None and getattr(forward, "__func__", None) is not cpu_training.forward:
            return False
        if type(layer.weight) is not nn.Parameter or layer.weight.dim() != 2:  # spread over processes
            return False
        if min(layer.weight.shape) < cpu_training.NARROWEST:
            return False
    return True


def is_plain(module: nn.Module, states: Tensor, names: tuple[str, ...]) -> bool:
    """Whether the short way is right for these states, which may not be those of the call before."""
    return _holds_plain_layers(module, names) and all(
        cpu_training.is_plain(states, module._modules[name].weight)  # type: ignore[union-attr, arg-type]
        for name in names
    )


# --- MLP ---------------------------------------------------------------------------------------------------------


def _feed_forward(self: Any, x: Tensor) -> Tensor:
    if not is_plain(self, x, INNER):
        result: Tensor = type(self).forward(self, x)
        return result
    return gated_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


def _mlp_agrees(module: Any) -> bool:
    if any(getattr(module, name).bias is not None for name in INNER):
        return False
    if type(module.act_fn).__name__ not in ("SiLUActivation", "SiLU"):  # weights of zero would agree with any
        return False
    width = module.gate_proj.in_features
    x = torch.linspace(-2, 2, 3 * width).view(1, 3, width).sin()
    with torch.no_grad():
        own = type(module).forward(module, x)
        found = gated_mlp(x, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)
    return near(own, found)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The MLP above, with gradients: [..., H], [I, H], [I, H], [H, I] give [..., H]."""
    result: Tensor = _GatedMLP.apply(x, gate, up, down)
    return result


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = cpu_training.rows(x)
        gates, ups = cpu_linear.linear(rows, gate), cpu_linear.linear(rows, up)
        ctx.save_for_backward(rows, gates, ups, gate, up, down)
        ctx.shape = x.shape
        return cpu_linear.linear(cpu_rows.gated(gates, ups), down).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gates, ups, gate, up, down = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        grads = cpu_training.rows(grad)
        dx = dgate = dup = None
        if not (wants_x or wants_gate or wants_up):
            return None, None, None, cpu_training.weight_gradient(grads, cpu_rows.gated(gates, ups))
        dgates, dups, inner = cpu_rows.gated_gradients(cpu_linear.linear(grads, down.t()), gates, ups)
        ddown = cpu_training.weight_gradient(grads, inner) if wants_down else None
        if wants_x:
            dx = cpu_linear.linear(dgates, gate.t())
            dx = cpu_linear.added(dx, dups, up.t()).view(ctx.shape)
        if wants_gate and wants_up and gate.shape[0] > cpu_training.WIDEST_CONVOLVED:
            turned = rows.t().contiguous()
            dgate, dup = (cpu_linear.linear(turned, part.t()).t().contiguous() for part in (dgates, dups))
            return dx, dgate, dup, ddown
        if wants_gate:
            dgate = cpu_training.weight_gradient(dgates, rows)
        if wants_up:
            dup = cpu_training.weight_gradient(dups, rows)
        return dx, dgate, dup, ddown


# --- attention ---------------------------------------------------------------------------------------------------


def _attend(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if position_embeddings is None or not is_plain(self, hidden_states, HEADS):
        result: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )
        return result
    query, key, value = heads(self, hidden_states, position_embeddings)
    output, weights = attended(self, query, key, value, attention_mask, past_key_values, **kwargs)
    return self.o_proj(output), weights


def heads(attention: Any, states: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned, and values [B, heads, T, D] of normed states [B, T, H]."""
    shape = (*states.shape[:-1], -1, attention.head_dim)
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    joint = joint_product(states, [layer.weight for layer in layers], [layer.bias for layer in layers])
    query, key, value = (part.view(shape) for part in joint)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    cos, sin = angles(positions)
    query, key = (rotated(part, cos, sin).transpose(1, 2) for part in (query, key))
    return query, key, value.transpose(1, 2)


def attended(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a module's kind of attention gives [B, T, heads x D], and its weights if it shows them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if past_key_values is not None:
        key, value = past_key_values.update(key, value, attention.layer_idx)
    kind = attention.config._attn_implementation
    function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(kind, _eager(attention))
    output, weights = function(
        attention,
        query,
        key,
        value,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
        **kwargs,
    )
    return output.flatten(2), weights


def _eager(module: nn.Module) -> Any:
    """The function of the module's own file for `attn_implementation="eager"`."""
    return type(module).forward.__globals__["eager_attention_forward"]


def angles(positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, T, D] as `rotated` takes them, [B, T, 1, D]."""
    cos, sin = positions
    signs = torch.ones(sin.shape[-1])
    signs[: sin.shape[-1] // 2] = -1.0
    return cos[:, :, None], (sin * signs)[:, :, None]


def _attention_agrees(module: Any) -> bool:
    if module.head_dim % 2:
        return False
    alike = with_plain_attention(module)
    x, positions = trial_states(module)
    with torch.no_grad():
        own = type(module).forward(alike, x, positions, None)[0]
        return near(own, _attend(alike, x, positions)[0])


def with_plain_attention(module: Any) -> Any:
    """An attention module with the same weights and its own forward that needs nothing but states and positions."""
    alike = copy.copy(module)
    vars(alike).pop("forward", None)  # bound to `module`
    alike.config = copy.copy(module.config)
    alike.config._attn_implementation = "sdpa"
    return alike


def trial_states(attention: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """States [1, T, H] and the cosines and sines [1, T, D] of their positions, to try a module with."""
    depth, width, steps = attention.head_dim, attention.q_proj.in_features, cpu_training.FEWEST_ROWS
    x = torch.linspace(-2, 2, steps * width).view(1, steps, width).sin()
    turns = torch.linspace(0, 3, steps * depth // 2).view(1, steps, depth // 2).repeat(1, 1, 2)
    return x, (turns.cos(), turns.sin())


def joint_product(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, ...]:
    """`nn.functional.linear` of [..., K] with each of `weights` [M, K] and `biases` [M], as one product.

    Either all have a bias or none has.
    """
    given = [bias for bias in biases if bias is not None]
    assert len(given) in (0, len(weights))
    result: tuple[Tensor, ...] = _JointProduct.apply(x, len(weights), *weights, *given)
    return result


class _JointProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        rows = cpu_training.rows(x)
        ctx.save_for_backward(rows, *weights)
        ctx.shape, ctx.widths, ctx.num_biases = x.shape, [weight.shape[0] for weight in weights], len(biases)
        product = cpu_linear.linear(rows, torch.cat(weights), torch.cat(biases) if biases else None)
        return product.view(*x.shape[:-1], -1).split(ctx.widths, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        count, wants = len(weights), ctx.needs_input_grad
        joint = torch.cat([grad.reshape(rows.shape[0], -1) for grad in grads], 1)
        dx = cpu_linear.linear(joint, torch.cat(weights).t()).view(ctx.shape) if wants[0] else None
        dweights: list[Tensor | None] = [None] * count
        dbiases: list[Tensor | None] = [None] * ctx.num_biases
        if any(wants[2 : 2 + count]):
            dweights = list(cpu_training.weight_gradient(joint, rows).split(ctx.widths))
        if any(wants[2 + count :]):
            dbiases = list(joint.sum(0).split(ctx.widths))
        found = [*dweights, *dbiases]
        return dx, None, *(part if want else None for part, want in zip(found, wants[2:], strict=True))


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864), with gradients for `states`.

    Args:
        states: [..., H, D].
        cos: [..., 1, D].
        sin: [..., 1, D], negative in its first half.
    """
    result: Tensor = _Rotated.apply(states, cos, sin)
    return result


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return cpu_rows.turned(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return cpu_rows.turned_back(grad, cos, sin), None, None


def near(own: Tensor, found: Tensor) -> bool:
    """Whether a trial has found what a layer says itself."""
    return own.shape == found.shape and bool((own - found).abs().max() <= TOLERANCE * own.std().clamp(min=1e-6))
