"""Seeded noise on one tensor of each place in a layer, so that weights which do not arrive cannot go unnoticed.

A place is a parameter's name without the numbers in it; of a LoRA adapter every B gets noise, which starts at zero. The
tensors are taken from different depths. The noise is as large as the tensor's own values, within a factor of a few, so
that log-probs move by far more than rounding.

Parameters are exchanged, not added to: what comes back afterwards are the same bits. Under ZeRO-3 and FSDP2 they are
gathered, exchanged and put back by `swift.models.sharded`, on all ranks together.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from swift.models.sharded import gathered, whole_shape
from swift.rollout.seeds import sample_seed

RELATIVE = 0.5
"""Noise as a share of the tensor's root mean square."""

_ROUTED = re.compile(r"\bexperts\.|\b(mlp\.gate|router)\b")
"""Parts of a mixture of experts, of which a token computes few and adds their outputs at a fraction."""

RELATIVE_OF = (
    (_ROUTED, 4.0),
    (re.compile(r"\b(q|k|kv)(_[ab])?_proj|\.(query|key)\."), 4.0),
    (re.compile(r"\b(gate|up|gate_up|down)_proj|\.(w[123]|fc[12]|c_fc)\."), 1.0),
)
"""The same where it moves log-probs less: measured, so that each tensor moves them by about 0.05 nats or more."""

FLOOR, FLOOR_ROUTED = 0.05, 0.1
"""Standard deviation where the tensor is zero, such as a fresh bias or LoRA's B; the latter on experts and routers."""

_BLOCK = 1_000_003
"""Random numbers per tensor; longer ones repeat them. A prime, so that no two rows of a matrix get the same."""

_LORA_B = re.compile(r"\blora_(embedding_)?B\b")
_VECTORS = re.compile(r"(norm|\bln_)[^.]*\.weight$|\.bias$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def make_noise(model: nn.Module, *, seed: int, adapter_only: bool) -> dict[str, Tensor]:
    """Choose the tensors and draw the noise; a collective when parameters are sharded.

    Args:
        model: the policy as the trainer holds it.
        seed: equal seeds give equal noise, on every rank.
        adapter_only: the engine gets nothing but the adapter, so only that may change.
    """
    parameters = dict(model.named_parameters())
    values = {}
    with torch.no_grad():
        for name in choose(model, adapter_only=adapter_only):
            with gathered([parameters[name]]) as whole:
                values[name] = _with_noise(name, whole(parameters[name]), seed)
    return values


def choose(model: nn.Module, *, adapter_only: bool) -> list[str]:
    """Names of one parameter of each place in a layer, in a layer somewhere in the model, and of every LoRA B."""
    chosen: list[str] = []
    places: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.dtype.is_floating_point or hasattr(parameter, "quant_state"):
            continue
        if _LORA_B.search(name):
            chosen.append(name)
        elif not adapter_only and _has_noise(name, len(whole_shape(parameter))):
            places.setdefault(_NUMBER.sub("N", name), []).append(name)
    for number, (place, names) in enumerate(places.items()):
        depth = (number * 0.618) % 1.0  # golden ratio: places spread evenly over the layers
        if _ROUTED.search(place):  # all in one layer, where they show more of each other
            depth = 0.618
        chosen.append(names[int(depth * len(names))])
    return chosen


def has_experts(model: nn.Module) -> bool:
    """Whether tokens are routed to experts."""
    return any(_ROUTED.search(name) for name, _ in model.named_parameters())


def _has_noise(name: str, dimensions: int) -> bool:
    """Whether a parameter is in use, and one that any value suits: a matrix, a norm or a bias."""
    unused = "lora_" in name or ".original_module." in name
    return not unused and (dimensions > 1 or bool(_VECTORS.search(name)))


def _with_noise(name: str, tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(sample_seed(seed, f"noise:{name}", 0, 0))
    count = tensor.numel()
    block = torch.randn(min(count, _BLOCK), generator=generator).to(tensor.device)
    noise = block.repeat(-(-count // block.numel()))[:count].view(tensor.shape)
    own = float(tensor.float().square().mean().sqrt())
    share = next((share for pattern, share in RELATIVE_OF if pattern.search(name)), RELATIVE)
    floor = FLOOR_ROUTED if _ROUTED.search(name) else FLOOR
    deviation = share * own if own > 1e-3 and not _LORA_B.search(name) else floor
    return (tensor.float() + deviation * noise).to(tensor.dtype)
