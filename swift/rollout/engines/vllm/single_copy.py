"""One copy of the weights for trainer and engine, which take turns on one device.

The trainer's parameters become views of the engine's, and not the other way around, because captured graphs of vLLM
hold the addresses of its own. vLLM fuses rows (q, k, v; gate, up) and pads vocabularies:

    checkpoint      q_proj  k_proj  v_proj      down_proj      embed_tokens  (lm_head, tied: the same memory)
                      |       |       |             |               |
    engine          [ rows .. rows .. rows ]     [ whole ]      [ whole | padding ]

Nothing is guessed: weights are shared right after a reload, and only if every tensor is found bit for bit at its place.
What is packed (vLLM on a CPU), quantised, cut for tensor parallelism, below LoRA layers, in another order or has
values derived from weights beside it keeps two copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from swift.rollout.weights.base import Live

ALIGNED = 64
"""Bytes. A parameter of the trainer that began elsewhere could be multiplied by other kernels than before."""


class NotShareable(Exception):
    """Why engine and trainer keep two copies."""


class SingleCopy:
    """The trainer's tensors as views of the engine's memory, which holds the same bits at this moment.

    Args:
        model: vLLM's.
        live: the trainer's parameters by the names of an update; tied ones are one object under two names.
        tied: name of the head when it is the embedding, or "".
        embedding: name of the embedding then.

    Raises:
        NotShareable: nothing has changed.
    """

    def __init__(self, model: nn.Module, live: Live, *, tied: str = "", embedding: str = "") -> None:
        _check_derived(model)
        self._owners: list[tuple[nn.Module, str, Tensor, int]] = []  # parameters that were shared, and where
        self._places = self._find_places(model, live, tied, embedding)
        chosen: dict[int, tuple[Tensor, Tensor]] = {}
        for name, tensor in live.items():
            place = self._places[name]
            _check_shareable(name, tensor, place)
            former = chosen.setdefault(id(tensor), (tensor, place))
            if former[1].data_ptr() != place.data_ptr():
                raise NotShareable(f"{name} is one tensor in the trainer and two in the engine")
        if len({place.data_ptr() for _, place in chosen.values()}) != len(chosen):
            raise NotShareable("the engine ties tensors that the trainer does not")
        for tensor, place in chosen.values():
            tensor.data = place
        self._shared = list(chosen.values())

    def holds(self, live: Live) -> bool:
        """Whether all tensors of the trainer still are the engine's memory, and that is where it was."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are slow to ask otherwise
            stayed = all(
                module._parameters.get(key) is parameter and parameter.data_ptr() == address
                for module, key, parameter, address in self._owners
            )
            return (
                stayed
                and live.keys() == self._places.keys()
                and all(tensor.data_ptr() == self._places[name].data_ptr() for name, tensor in live.items())
            )

    def separate(self) -> None:
        """Give the trainer's tensors memory of their own wherever they still have the engine's."""
        for tensor, place in self._shared:
            if tensor.data_ptr() == place.data_ptr():
                tensor.data = tensor.data.clone()
        self._shared = []

    def _find_places(self, model: nn.Module, live: Live, tied: str, embedding: str) -> dict[str, Tensor]:
        """Name of a tensor -> the part of an engine parameter that it is, by name and shape."""
        parameters = _parameters(model)
        targets = _targets(model, list(live))
        parts: dict[str, list[tuple[int, str]]] = {}
        for name, (owner, part) in targets.items():
            if owner in parameters:
                parts.setdefault(owner, []).append((part, name))
            elif name != tied:
                raise NotShareable(f"the engine has no parameter for {name}")
        places: dict[str, Tensor] = {}
        for owner, named in parts.items():
            module, key, parameter = parameters[owner]
            shapes = {name: tuple(live[name].shape) for _, name in sorted(named)}
            if len({part for part, _ in named}) != len(named):
                raise NotShareable(f"two tensors belong to the same part of {owner}")
            places |= _cut(owner, parameter.detach(), shapes, padded=hasattr(module, "num_embeddings_padded"))
            self._owners.append((module, key, parameter, parameter.data_ptr()))
        without = sorted(set(parameters) - set(parts))
        if without:
            raise NotShareable(f"no tensor of the trainer belongs to {without[0]}")
        if tied in live and tied not in places:
            if embedding not in places:
                raise NotShareable(f"{tied} is tied to {embedding}, which the trainer does not have")
            places[tied] = places[embedding]
        return places


def _check_shareable(name: str, tensor: Tensor, place: Tensor) -> None:
    """Raises NotShareable unless one memory can serve as both."""
    same = (tensor.device, tensor.dtype, tensor.shape) == (place.device, place.dtype, place.shape)
    if not same or not tensor.is_contiguous():
        raise NotShareable(f"{name} has another device, type or layout in the trainer")
    if tensor.is_inference() or place.is_inference():
        raise NotShareable(f"{name} was made under inference mode and cannot be trained")
    if place.data_ptr() % ALIGNED:
        raise NotShareable(f"{name} begins at an odd address in the engine")
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        raise NotShareable(f"{name} is a part of a larger piece of memory in the trainer")
    if not torch.equal(*(one.detach().view(-1).view(torch.uint8) for one in (tensor, place))):
        raise NotShareable(f"{name} differs from the engine's")


def _parameters(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Parameters of vLLM's model by name, tied ones once, each with its module and its name there."""
    found: dict[str, tuple[nn.Module, str, Tensor]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{key}" if prefix else key] = (module, key, parameter)
    return found


def _targets(model: nn.Module, names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Name of a tensor -> the engine's parameter that takes it, and the position of its part in that one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None and hasattr(mapper, "get_rename_mapper"):  # 0.32's also fuses, which is done below
        mapper = mapper.get_rename_mapper()
    parts = {
        part: (fused, place)
        for fused, fields in (getattr(model, "packed_modules_mapping", None) or {}).items()
        for place, part in enumerate(fields)
        if len(fields) > 1
    }
    targets = {}
    for name in names:
        mapped = mapper.apply_list([name]) if mapper is not None else [name]
        if len(mapped) != 1:
            raise NotShareable(f"the engine does not say where {name} belongs")
        module, _, key = mapped[0].rpartition(".")
        parent, _, last = module.rpartition(".")
        fused, place = parts.get(last, (last, 0))
        targets[name] = (".".join(word for word in (parent, fused, key) if word), place)
    return targets


def _cut(owner: str, data: Tensor, shapes: Mapping[str, tuple[int, ...]], *, padded: bool) -> dict[str, Tensor]:
    """The rows of a parameter that its tensors are, in order. They fill it, unless the rest pads a vocabulary."""
    if data.is_meta or not data.is_contiguous():
        raise NotShareable(f"{owner} is stored in another way")
    if [tuple(data.shape)] == list(shapes.values()):
        return {name: data.view_as(data) for name in shapes}
    start, places = 0, {}
    for name, shape in shapes.items():
        if not shape or shape[1:] != tuple(data.shape[1:]) or start + shape[0] > data.shape[0]:
            raise NotShareable(f"{name} does not fit into {owner}")
        places[name] = data[start : start + shape[0]]
        start += shape[0]
    if start != data.shape[0] and not (padded and len(shapes) == 1):
        raise NotShareable(f"{owner} has more rows than its tensors")
    return places


def _check_derived(model: nn.Module) -> None:
    """Raises NotShareable when a layer keeps values that vLLM computes from weights after loading them.

    Such values are tensors that are neither parameters nor buffers, in a layer or in what does its attention (absorbed
    projections of latent attention, say). The KV cache, single numbers and tables of integers are none.
    """
    weights = {parameter.untyped_storage().data_ptr() for _, _, parameter in _parameters(model).values()}
    for name, module in model.named_modules():
        beside = getattr(getattr(module, "impl", None), "__dict__", {})
        for key, value in [*vars(module).items(), *beside.items()]:
            some = value if isinstance(value, list | tuple) else [value]
            for one in some if not key.startswith("kv_cache") else []:
                matrix = isinstance(one, Tensor) and one.is_floating_point() and one.dim() > 0
                if matrix and one.untyped_storage().data_ptr() not in weights:
                    raise NotShareable(f"{name} keeps values beside its weights ({key})")
