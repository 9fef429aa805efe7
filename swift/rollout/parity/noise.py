"""Seeded noise on one tensor of each place in a layer, to detect weights that a weight sync does not update.

A place is a parameter's name without its layer numbers. The tensors are from layers at different depths. Every B of a
LoRA adapter, which is zero at first, gets noise. The scale of the noise is that of the tensor, within a factor of a
few, so that log-probs change by far more than rounding.

Parameters are exchanged, not added to, so that the restored ones have the same bits. `swift.models.sharded` gathers,
exchanges and restores them under ZeRO-3 and FSDP2; collective.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from swift.models.attention.interface import transformers_model
from swift.models.quantisation import is_quantised_layer
from swift.models.sharded import gathered, whole_shape
from swift.rollout.seeds import sample_seed

RELATIVE = 0.5
"""Noise as a share of the tensor's root mean square."""

_ROUTED = re.compile(r"\bexperts\.|\b(mlp\.gate|router)\b")
"""Routers and experts; a token uses few experts, and adds their outputs with small weights."""

RELATIVE_OF = (
    (_ROUTED, 4.0),
    (re.compile(r"\b(q|k|kv)(_[ab])?_proj|\.(query|key)\."), 4.0),
    (re.compile(r"\b(gate|up|gate_up|down)_proj|\.(w[123]|fc[12]|c_fc)\."), 1.0),
)
"""The same for tensors with less effect on log-probs: measured, so that each changes them by 0.05 nats or more."""

FLOOR, FLOOR_ROUTED = 0.05, 0.1
"""Standard deviation on a zero tensor, such as a new bias or LoRA's B; the second one for experts and routers."""

_BLOCK = 1_000_003
"""Number of random numbers per tensor; larger tensors repeat them. A prime, so that rows of a matrix differ."""

_LORA_B = re.compile(r"\blora_(embedding_)?B\b")
_VECTORS = re.compile(r"(norm|\bln_)[^.]*\.weight$|\.bias$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def make_noise(model: nn.Module, *, seed: int, adapter_only: bool) -> dict[str, Tensor]:
    """The chosen tensors with noise, by name; a collective if parameters are sharded.

    Args:
        model: the trainer's policy.
        seed: equal seeds give equal noise, on every rank.
        adapter_only: whether only the adapter is synced, so that only its tensors get noise.
    """
    parameters = dict(model.named_parameters())
    values = {}
    with torch.no_grad():
        for name in choose(model, adapter_only=adapter_only):
            with gathered([parameters[name]]) as whole:
                values[name] = _with_noise(name, whole(parameters[name]), seed)
    return values


def choose(model: nn.Module, *, adapter_only: bool) -> list[str]:
    """Names of one parameter of each place in a layer, at different depths, and of every LoRA B."""
    chosen: list[str] = []
    places: dict[str, list[str]] = {}
    packed = {f"{name}.weight" for name, layer in model.named_modules() if is_quantised_layer(layer)}
    for name, parameter in model.named_parameters():
        if not parameter.dtype.is_floating_point or name in packed:
            continue
        if _LORA_B.search(name):
            chosen.append(name)
            continue
        unused = adapter_only or "lora_" in name or ".original_module." in name
        # vectors other than norms and biases may not allow arbitrary values
        if not unused and (len(whole_shape(parameter)) > 1 or _VECTORS.search(name)):
            places.setdefault(_NUMBER.sub("N", name), []).append(name)
    for number, (place, names) in enumerate(places.items()):
        depth = (number * 0.618) % 1.0  # golden ratio: places spread evenly over the layers
        if _ROUTED.search(place):  # all in one layer, where their effects add up
            depth = 0.618
        chosen.append(names[int(depth * len(names))])
    return chosen


def has_experts(model: nn.Module) -> bool:
    """Whether tokens are routed to experts."""
    return any(_ROUTED.search(name) for name, _ in model.named_parameters())


def num_layers(model: nn.Module) -> int:
    """Layers of the decoder, as its config has it; 1 if it does not say."""
    config = getattr(transformers_model(model), "config", None)
    return getattr(config.get_text_config(), "num_hidden_layers", None) or 1 if config is not None else 1


def _with_noise(name: str, tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(sample_seed(seed, f"noise:{name}", 0, 0))
    count = tensor.numel()
    block = torch.randn(min(count, _BLOCK), generator=generator).to(tensor.device)
    noise = block.repeat(-(-count // block.numel()))[:count].view(tensor.shape)
    rms = float(tensor.float().square().mean().sqrt())
    share = next((share for pattern, share in RELATIVE_OF if pattern.search(name)), RELATIVE)
    floor = FLOOR_ROUTED if _ROUTED.search(name) else FLOOR
    deviation = share * rms if rms > 1e-3 and not _LORA_B.search(name) else floor
    return (tensor.float() + deviation * noise).to(tensor.dtype)
