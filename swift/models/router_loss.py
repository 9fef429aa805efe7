"""The load-balancing loss of a mixture of experts, by transformers' `load_balancing_loss_func`.

    loss = E sum_e f_e P_e      f_e: number of a token's top-k choices that are expert e; P_e: its router probability

of E experts; f and P are means over the tokens of one forward pass and its layers (Switch Transformer,
arXiv:2101.03961, equations 4 to 6). f has no gradient. Equal use of all experts gives the top-k, the least value there
is. The router logits are those that transformers collects (`output_router_logits`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from swift.errors import ConfigError
from swift.models.attention.interface import transformers_model


def router_coefficient(given: float | None, model: nn.Module) -> float:
    """The weight that `--router_aux_loss_coef` gives the loss; None is that of the model's config, or 0 without one.

    Raises:
        ConfigError: a weight above 0, and the model has no such loss.
    """
    base = transformers_model(model)
    has_loss = _loss_function(base) is not None
    if given is None:
        return float(getattr(base.config.get_text_config(), "router_aux_loss_coef", 0.0)) if has_loss else 0.0
    if given and not has_loss:
        raise ConfigError(
            f"--router_aux_loss_coef: {given:g}: the model is no mixture of experts that gives the loss of its router; "
            "leave it out"
        )
    return given


def balancing_loss(base: Any, router_logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """The loss of one forward pass, fp32.

    Args:
        base: the causal language model of transformers.
        router_logits: [tokens, E] of each layer with experts; of a packed stream a shared prompt is there once.
        mask: [rows, steps] 1 for tokens and 0 for padding; None without padding.
    """
    compute = _loss_function(base)
    assert compute is not None and router_logits, "the model has given no router logits"
    config = base.config.get_text_config()
    if mask is None:
        mask = router_logits[0].new_ones(1, len(router_logits[0]))  # without one, each layer's count is awaited
    loss: Tensor = compute(router_logits, router_logits[0].shape[-1], config.num_experts_per_tok, mask)
    return loss


def _loss_function(base: Any) -> Callable[..., Tensor] | None:
    """The function of the model's own family; None if its decoder records no router logits, or it has no such loss."""
    decoder, config = base.base_model, base.config.get_text_config()
    if "router_logits" not in (getattr(decoder, "_can_record_outputs", None) or {}):
        return None
    if not hasattr(config, "num_experts_per_tok"):
        return None
    files = (sys.modules[kind.__module__] for kind in type(base).__mro__)  # FSDP2 makes a class of the model's
    return next((f.load_balancing_loss_func for f in files if hasattr(f, "load_balancing_loss_func")), None)
