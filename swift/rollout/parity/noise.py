"""Seeded noise on one tensor of each kind, so that weights which do not arrive cannot go unnoticed.

Kinds: embedding, head, query, key, value, fused q/k/v, attention output, gate, up, down, router, norms, biases; of a
LoRA adapter every B, which starts at zero. The tensors are taken from different depths. The noise is as large as the
tensor's own values, within a factor of a few, so that log-probs move by far more than rounding.

Parameters are exchanged, not added to: what comes back afterwards are the same bits. Under ZeRO-3 and FSDP2 they are
gathered, exchanged and put back by `swift.models.sharded`, on all ranks together.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swift.models.checkpoint_tensors import base_model
from swift.models.sharded import exchanged, gathered, whole_shape
from swift.rollout.seeds import sample_seed

RELATIVE = 0.5
"""Noise as a share of the tensor's root mean square."""

RELATIVE_OF = {"query": 4.0, "key": 4.0, "gate": 1.0, "up": 1.0, "down": 1.0}
"""The same for kinds that move log-probs less: measured, so that each moves them by about 0.05 nats or more."""

FLOOR = 0.05
"""Standard deviation where the tensor is zero, such as a fresh bias."""

LORA_B = 0.05
"""Standard deviation on LoRA's B, which is zero at first."""

_BLOCK = 1_000_003
"""Random numbers per tensor; longer ones repeat them. A prime, so that no two rows of a matrix get the same."""

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("query", r"\b(q_proj|q_a_proj|q_b_proj|query)$"),
        ("key", r"\b(k_proj|kv_a_proj_with_mqa|kv_b_proj|key)$"),
        ("value", r"\b(v_proj|value)$"),
        ("fused q/k/v", r"\b(qkv_proj|qkv|query_key_value|c_attn|Wqkv|in_proj_qkvz)$"),
        ("attention output", r"\b(o_proj|out_proj|attention\.dense|attn\.c_proj|self_attn\.dense)$"),
        ("gate", r"\b(gate_proj|gate_up_proj|w1)$"),
        ("up", r"\b(up_proj|w3|c_fc|fc1|dense_h_to_4h)$"),
        ("down", r"\b(down_proj|w2|mlp\.c_proj|fc2|dense_4h_to_h)$"),
        ("router", r"\b(router|mlp\.gate|block_sparse_moe\.gate)$"),
    )
)
_NORM = re.compile(r"(norm|\bln_)[^.]*$")
_OUTSIDE_LAYERS = re.compile(r"^\D*$")


@dataclass(frozen=True, slots=True)
class Noise:
    """Noisy values of some parameters of `model`: whole tensors by parameter name."""

    model: nn.Module
    values: Mapping[str, Tensor]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters hold the noise inside the block; a collective when they are sharded."""
        _reshard(self.model)
        try:
            with exchanged(dict(self.model.named_parameters()), dict(self.values)):
                yield
        finally:
            _reshard(self.model)


def make_noise(model: nn.Module, *, seed: int = 0, adapter_only: bool = False) -> Noise:
    """Choose the tensors and draw the noise; a collective when parameters are sharded.

    Args:
        model: the policy as the trainer holds it.
        seed: equal seeds give equal noise, on every rank.
        adapter_only: the engine gets nothing but the adapter, so only that may change.
    """
    kinds = choose(model, adapter_only=adapter_only)
    parameters = dict(model.named_parameters())
    values = {}
    with torch.no_grad():
        for name, kind in kinds.items():
            with gathered([parameters[name]]) as whole:
                values[name] = _with_noise(name, whole(parameters[name]), kind, seed)
    return Noise(model, values)


def choose(model: nn.Module, *, adapter_only: bool = False) -> dict[str, str]:
    """Parameter name -> kind, one per kind and every LoRA B."""
    found: dict[str, list[str]] = {}
    ends = {} if adapter_only else _embedding_and_head(model)
    for name, parameter in model.named_parameters():
        kind = ends.get(id(parameter)) or kind_of(name, len(whole_shape(parameter)))
        usable = parameter.dtype.is_floating_point and not hasattr(parameter, "quant_state")
        if kind is not None and usable and (kind == "LoRA B" or not adapter_only):
            found.setdefault(kind, []).append(name)
    chosen = dict.fromkeys(found.pop("LoRA B", []), "LoRA B")
    for place, (kind, names) in enumerate(found.items()):
        depth = (place * 0.618) % 1.0  # golden ratio: kinds spread evenly over the layers
        chosen[names[int(depth * len(names))]] = kind
    return chosen


def kind_of(name: str, dimensions: int) -> str | None:
    """What a parameter is, by its name; None when it is nothing of the list, or is not in use."""
    if re.search(r"\blora_(embedding_)?B\b", name):
        return "LoRA B"
    if "lora_" in name or ".original_module." in name:
        return None
    plain = re.sub(r"\.modules_to_save\.[^.]+", "", name.replace(".base_layer", ""))
    if plain.endswith(".bias"):
        return "bias"
    module = plain.removesuffix(".weight")
    if dimensions == 1 and _NORM.search(module):
        return "last norm" if _OUTSIDE_LAYERS.match(module) else "norm"
    if dimensions < 2:
        return None
    return next((kind for kind, pattern in _KINDS if pattern.search(module)), None)


def _reshard(model: nn.Module) -> None:
    """FSDP2 keeps the outermost parameters whole after a forward pass: copies that an exchange of shards would miss."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()


def _with_noise(name: str, tensor: Tensor, kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(sample_seed(seed, f"noise:{name}", 0, 0))
    count = tensor.numel()
    block = torch.randn(min(count, _BLOCK), generator=generator).to(tensor.device)
    noise = block.repeat(-(-count // block.numel()))[:count].view(tensor.shape)
    own = float(tensor.float().square().mean().sqrt())
    deviation = LORA_B if kind == "LoRA B" else RELATIVE_OF.get(kind, RELATIVE) * own if own > 1e-3 else FLOOR
    return (tensor.float() + deviation * noise).to(tensor.dtype)


def _embedding_and_head(model: nn.Module) -> dict[int, str]:
    base: Any = base_model(model)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    named = ((head, "head"), (embedding, "embedding"))  # a tied tensor is the embedding
    return {id(one): kind for module, kind in named if module is not None for one in _weights(module)}


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """The weight matrix in use, also below LoRA or a trained copy."""
    found = dict(module.named_parameters())
    saved = [one for name, one in found.items() if name.startswith("modules_to_save.") and name.endswith("weight")]
    return saved[:1] or [one for name, one in found.items() if "lora_" not in name and name.endswith("weight")][:1]
