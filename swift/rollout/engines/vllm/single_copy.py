"""One copy of the weights for a trainer and an engine that take turns on one device.

The trainer's parameters become views of the engine's, not the other way around, because captured graphs of vLLM hold
the addresses of its parameters. vLLM fuses rows (q, k, v; gate, up) and pads vocabularies:

    checkpoint      q_proj  k_proj  v_proj      down_proj      embed_tokens  (lm_head, tied: the same memory)
                      |       |       |             |               |
    engine          [ rows .. rows .. rows ]     [ whole ]      [ whole | padding ]

Weights are shared right after a reload, and only if every tensor is equal bit for bit to its part of the engine's
parameters. Two copies remain for packed weights (vLLM on a CPU), quantised weights, tensor parallelism, LoRA layers,
another order of rows, and layers that keep values derived from weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from swift.rollout.weights.base import PolicyParameters

ALIGNED = 64
"""Required alignment of shared parameters, in bytes; with another one, matrix products may use other kernels."""


class NotShareable(Exception):
    """The reason why engine and trainer keep two copies."""


class SingleCopy:
    """Makes the trainer's tensors views of the engine's memory; both must hold equal weights.

    Args:
        model: vLLM's.
        parameters: the trainer's, by their names in an update; tied ones are one object under two names.
        tied: name of the head if it is tied to the embedding, or "".
        embedding: name of the embedding if the head is tied to it.

    Raises:
        NotShareable: the weights cannot be shared; nothing has changed.
    """

    def __init__(self, model: nn.Module, parameters: PolicyParameters, *, tied: str = "", embedding: str = "") -> None:
        _check_derived(model)
        self._owners: list[tuple[nn.Module, str, Tensor, int]] = []  # module, name, parameter, address
        self._places = self._find_places(model, parameters, tied, embedding)
        chosen: dict[int, tuple[Tensor, Tensor]] = {}
        for name, tensor in parameters.items():
            place = self._places[name]
            _check_shareable(name, tensor, place)
            _, first_place = chosen.setdefault(id(tensor), (tensor, place))
            if first_place.data_ptr() != place.data_ptr():
                raise NotShareable(f"{name} is one tensor in the trainer and two in the engine")
        if len({place.data_ptr() for _, place in chosen.values()}) != len(chosen):
            raise NotShareable("the engine ties tensors that the trainer does not")
        for tensor, place in chosen.values():
            tensor.data = place
        self._shared = list(chosen.values())

    def holds(self, parameters: PolicyParameters) -> bool:
        """Whether the trainer's tensors still are views of the engine's memory, and this has not moved."""
        with torch._C.DisableTorchFunctionSubclass():  # faster access to vLLM's parameters
            unmoved = all(
                module._parameters.get(key) is parameter and parameter.data_ptr() == address
                for module, key, parameter, address in self._owners
            )
            return (
                unmoved
                and parameters.keys() == self._places.keys()
                and all(tensor.data_ptr() == self._places[name].data_ptr() for name, tensor in parameters.items())
            )

    def separate(self) -> None:
        """Give the trainer's tensors that still are views memory of their own."""
        for tensor, place in self._shared:
            if tensor.data_ptr() == place.data_ptr():
                tensor.data = tensor.data.clone()
        self._shared = []

    def _find_places(
        self, model: nn.Module, parameters: PolicyParameters, tied: str, embedding: str
    ) -> dict[str, Tensor]:
        """Name of a tensor -> its part of an engine parameter, found by name and shape."""
        engine_parameters = _parameters(model)
        targets = _targets(model, list(parameters))
        parts: dict[str, list[tuple[int, str]]] = {}
        for name, (owner, part) in targets.items():
            if owner in engine_parameters:
                parts.setdefault(owner, []).append((part, name))
            elif name != tied:
                raise NotShareable(f"the engine has no parameter for {name}")
        places: dict[str, Tensor] = {}
        for owner, named in parts.items():
            module, key, parameter = engine_parameters[owner]
            shapes = {name: tuple(parameters[name].shape) for _, name in sorted(named)}
            if len({part for part, _ in named}) != len(named):
                raise NotShareable(f"two tensors belong to the same part of {owner}")
            places |= _cut(owner, parameter.detach(), shapes, padded=hasattr(module, "num_embeddings_padded"))
            self._owners.append((module, key, parameter, parameter.data_ptr()))
        unmatched = sorted(set(engine_parameters) - set(parts))
        if unmatched:
            raise NotShareable(f"no tensor of the trainer belongs to {unmatched[0]}")
        if tied in parameters and tied not in places:
            if embedding not in places:
                raise NotShareable(f"{tied} is tied to {embedding}, which the trainer does not have")
            places[tied] = places[embedding]
        return places


def _check_shareable(name: str, tensor: Tensor, place: Tensor) -> None:
    """Raises NotShareable unless the tensor can become a view of its place with equal values."""
    same = (tensor.device, tensor.dtype, tensor.shape) == (place.device, place.dtype, place.shape)
    if not same or not tensor.is_contiguous():
        raise NotShareable(f"{name} has another device, type or layout in the trainer")
    if tensor.is_inference() or place.is_inference():
        raise NotShareable(f"{name} was created in inference mode and cannot be trained")
    if place.data_ptr() % ALIGNED:
        raise NotShareable(f"{name} is not aligned to {ALIGNED} bytes in the engine")
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        raise NotShareable(f"{name} is a part of a larger piece of memory in the trainer")
    if not torch.equal(*(values.detach().view(-1).view(torch.uint8) for values in (tensor, place))):
        raise NotShareable(f"{name} differs from the engine's")


def _parameters(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Parameters of vLLM's model by name, tied ones once: (module, name in the module, parameter)."""
    found: dict[str, tuple[nn.Module, str, Tensor]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{key}" if prefix else key] = (module, key, parameter)
    return found


def _targets(model: nn.Module, names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Name of a tensor -> name of its engine parameter, and the index of its part of a fused parameter."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None and hasattr(mapper, "get_rename_mapper"):  # 0.32: without fused names
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
            raise NotShareable(f"the engine has no name mapping for {name}")
        module, _, key = mapped[0].rpartition(".")
        parent, _, last = module.rpartition(".")
        fused, place = parts.get(last, (last, 0))
        targets[name] = (".".join(word for word in (parent, fused, key) if word), place)
    return targets


def _cut(owner: str, data: Tensor, shapes: Mapping[str, tuple[int, ...]], *, padded: bool) -> dict[str, Tensor]:
    """Name of a tensor -> its rows of an engine parameter, in order; only a vocabulary may have more rows (padding)."""
    if data.is_meta or not data.is_contiguous():
        raise NotShareable(f"{owner} is not stored as a contiguous tensor")
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
    """Raises NotShareable if a layer keeps values that vLLM computes from weights after loading them.

    Such values are tensors that are neither parameters nor buffers, in a layer or in its attention implementation
    (absorbed projections of latent attention). The KV cache, scalars and integer tables are not checked.
    """
    weights = {parameter.untyped_storage().data_ptr() for _, _, parameter in _parameters(model).values()}
    for name, module in model.named_modules():
        implementation = getattr(getattr(module, "impl", None), "__dict__", {})
        for key, value in [*vars(module).items(), *implementation.items()]:
            if key.startswith("kv_cache"):
                continue
            for item in value if isinstance(value, list | tuple) else [value]:
                is_matrix = isinstance(item, Tensor) and item.is_floating_point() and item.dim() > 0
                if is_matrix and item.untyped_storage().data_ptr() not in weights:
                    raise NotShareable(f"{name} keeps values beside its weights ({key})")
