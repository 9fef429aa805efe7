"""The engine's parameters written where they lie, or shared with the trainer, in place of a reload.

vLLM's reload takes checkpoint tensors through a loader for each. Where the loaded parameters are the checkpoint's own
numbers, rows one behind the other (GPUs, and CPUs without vLLM's packing), that way is only needed once: a `Layout`
says which rows of which parameter a tensor is, and the first reload proves it, since every tensor's checksum must be
found there afterwards. From then on all tensors of a bucket are copied by one call.

    checkpoint      q_proj  k_proj  v_proj      down_proj      embed_tokens  (lm_head, tied: the same memory)
                      |       |       |             |               |
    engine          [ rows .. rows .. rows ]     [ whole ]      [ whole | padding ]

A trainer in the same process whose parameters have the same type can do without the copy: they become views of the
engine's parameters. This way around, because captured graphs of vLLM hold the addresses of its own. Both must then take
turns: an optimizer step changes what the engine would sample with.

Nothing here guesses. What is not proven equal (packed, quantised, cut for tensor parallelism, below LoRA layers, in
another order, with values derived from weights beside them) is an obstacle, and the reload stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swift.rollout.weight_sync.base import Live, TensorInfo, checksums

ALIGNED = 64
"""Bytes. A parameter of the trainer that began elsewhere could be multiplied by other kernels than before."""


class NoLayout(Exception):
    """Why an engine's parameters cannot be written where they lie."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """A parameter of the engine, and where it was when the layout was made."""

    module: nn.Module
    name: str
    parameter: Tensor
    address: int

    def is_there(self) -> bool:
        """Whether the module has the same parameter in the same memory."""
        return self.module._parameters.get(self.name) is self.parameter and self.parameter.data_ptr() == self.address


class Layout:
    """Which memory of the engine each tensor of an update is.

    Args:
        places: name of a tensor -> the part of a parameter that it is.
        tied: names that have no memory of their own here, because the engine reads another tensor's -> that one.
        owners: the parameters.
        manifest: the tensors of the update that proved it.
    """

    def __init__(
        self,
        places: Mapping[str, Tensor],
        tied: Mapping[str, str],
        owners: Sequence[_Owner],
        manifest: Sequence[TensorInfo],
    ) -> None:
        self.places = dict(places)
        self.tied = dict(tied)
        self._owners = list(owners)
        self._names = frozenset(info.name for info in manifest)
        self._found: dict[str, int] = {}
        self._lent: list[tuple[Tensor, Tensor]] = []  # tensors of the trainer, and the memory they were given

    @classmethod
    def of(cls, model: nn.Module, manifest: Sequence[TensorInfo], *, tied: str = "", embedding: str = "") -> Layout:
        """Find the place of each tensor by name and shape; no data is read.

        Args:
            model: vLLM's.
            manifest: of a complete update.
            tied: name of the head when it is the embedding, or "".
            embedding: name of the embedding then.

        Raises:
            NoLayout: a tensor has no place, or a parameter is more than the tensors that belong to it.
        """
        parameters = _parameters(model)
        targets = _targets(model, [info.name for info in manifest])
        wanted: dict[str, list[tuple[int, TensorInfo]]] = {}
        ties = {}
        for info in manifest:
            owner, part = targets[info.name]
            if owner not in parameters and info.name == tied:
                ties[info.name] = embedding
            elif owner not in parameters:
                raise NoLayout(f"the engine has no parameter for {info.name}")
            else:
                wanted.setdefault(owner, []).append((part, info))
        places = {}
        for name, parts in wanted.items():
            places.update(_cut(name, *parameters[name], sorted(parts, key=lambda one: one[0])))
        unfed = sorted(set(parameters) - set(wanted))
        if unfed:
            raise NoLayout(f"no tensor of the update belongs to {unfed[0]}")
        if ties and embedding not in places:
            raise NoLayout(f"{tied} is tied to {embedding}, which is not sent")
        _check_derived(model)
        owners = [_Owner(module, key, one, one.data_ptr()) for module, key, one in parameters.values()]
        return cls(places, ties, owners, manifest)

    # --- the proof ----------------------------------------------------------------------------------------------

    def note(self, tensors: Sequence[tuple[str, Tensor]], known: Mapping[str, int]) -> None:
        """Remember what an update sends, as it will be stored.

        Args:
            tensors: of the update.
            known: their checksums as they are.
        """
        rounded = []
        for name, tensor in tensors:
            place = self._place(name)
            if place.dtype == tensor.dtype:
                self._found[name] = known[name]
            else:
                rounded.append((name, tensor.detach().to(place.dtype)))
        numbers = checksums([tensor for _, tensor in rounded])
        self._found.update((name, number) for (name, _), number in zip(rounded, numbers, strict=True))

    def prove(self) -> None:
        """Compare the engine's memory with what `note` has seen, once the engine has loaded it by itself.

        Raises:
            NoLayout: the engine stores something else, or somewhere else.
        """
        names = sorted(self._found)
        if set(names) != self._names or not self.in_place():
            raise NoLayout("the engine has moved its parameters while they were loaded")
        numbers = checksums([self._place(name) for name in names])
        for name, number in zip(names, numbers, strict=True):
            if number != self._found[name]:
                raise NoLayout(f"the engine stores {name} in another way than it came")
        self._found = {}

    # --- updates ------------------------------------------------------------------------------------------------

    def fits(self, manifest: Sequence[TensorInfo]) -> bool:
        """Whether an update has the tensors that were proven, no more and no less."""
        return len(manifest) == len(self._names) and all(
            info.name in self._names and tuple(self._place(info.name).shape) == info.shape for info in manifest
        )

    def in_place(self) -> bool:
        """Whether all parameters of the engine are where they were."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are slow to ask otherwise
            return all(owner.is_there() for owner in self._owners)

    @torch.no_grad()
    def write(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors to their places, all by one call."""
        own = [(self.places[name], tensor) for name, tensor in tensors if name in self.places]
        torch._foreach_copy_([place for place, _ in own], [tensor.detach() for _, tensor in own])

    # --- one memory for both --------------------------------------------------------------------------------------

    def shared_with(self, live: Live) -> bool:
        """Whether all tensors of the trainer are the engine's memory."""
        return live.keys() == self._names and all(
            tensor.data_ptr() == self._place(name).data_ptr() for name, tensor in live.items()
        )

    def share(self, live: Live) -> None:
        """Make the trainer's tensors views of the engine's memory, which holds the same bits at this moment.

        Args:
            live: the trainer's parameters by the names of an update; tied ones are one object under two names.

        Raises:
            NoLayout: that is not possible; nothing has changed.
        """
        if live.keys() != self._names:
            raise NoLayout("the trainer has other tensors than the engine")
        chosen: dict[int, tuple[Tensor, Tensor]] = {}
        for name, tensor in live.items():
            place = self._place(name)
            _check_shareable(name, tensor, place)
            former = chosen.setdefault(id(tensor), (tensor, place))
            if former[1].data_ptr() != place.data_ptr():
                raise NoLayout(f"{name} is one tensor in the trainer and two in the engine")
        if len({place.data_ptr() for _, place in chosen.values()}) != len(chosen):
            raise NoLayout("the engine ties tensors that the trainer does not")
        for tensor, place in chosen.values():
            tensor.data = place
        self._lent = list(chosen.values())

    def separate(self) -> None:
        """Give the trainer's tensors memory of their own wherever they still have the engine's."""
        for tensor, place in self._lent:
            if tensor.data_ptr() == place.data_ptr():
                tensor.data = tensor.data.clone()
        self._lent = []

    def _place(self, name: str) -> Tensor:
        return self.places[self.tied.get(name, name)]


def _check_shareable(name: str, tensor: Tensor, place: Tensor) -> None:
    """Raises NoLayout unless one memory can serve as both."""
    same = (tensor.device, tensor.dtype, tensor.shape) == (place.device, place.dtype, place.shape)
    if not same or not tensor.is_contiguous():
        raise NoLayout(f"{name} has another device, type or layout in the trainer")
    if tensor.data_ptr() == place.data_ptr():
        return
    if tensor.is_inference() or place.is_inference():
        raise NoLayout(f"{name} was made under inference mode and cannot be trained")
    if place.data_ptr() % ALIGNED:
        raise NoLayout(f"{name} begins at an odd address in the engine")
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        raise NoLayout(f"{name} is a part of a larger piece of memory in the trainer")
    if not torch.equal(_bits(tensor), _bits(place)):
        raise NoLayout(f"{name} differs from the engine's")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


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
    """Name of a tensor -> the engine's parameter that takes it, and the how manieth of its parts it is."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None and hasattr(mapper, "get_rename_mapper"):  # newer ones also fuse, which is done below
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
            raise NoLayout(f"the engine does not say where {name} belongs")
        module, _, key = mapped[0].rpartition(".")
        parent, _, last = module.rpartition(".")
        fused, place = parts.get(last, (last, 0))
        targets[name] = (".".join(word for word in (parent, fused, key) if word), place)
    return targets


def _cut(
    name: str, module: nn.Module, key: str, parameter: Tensor, parts: Sequence[tuple[int, TensorInfo]]
) -> dict[str, Tensor]:
    """The rows of a parameter that its tensors are.

    Raises:
        NoLayout: they do not fill it, unless the rest pads a vocabulary.
    """
    data = parameter.detach()
    if data.is_meta or not data.is_contiguous():
        raise NoLayout(f"{name} is stored in another way")
    if len(parts) != len({place for place, _ in parts}):
        raise NoLayout(f"two tensors belong to the same part of {name}")
    if len(parts) == 1 and tuple(data.shape) == parts[0][1].shape:
        return {parts[0][1].name: data.view_as(data)}
    start, places = 0, {}
    for _, info in parts:
        rows = info.shape[0] if info.shape else 1
        if not info.shape or info.shape[1:] != tuple(data.shape[1:]) or start + rows > data.shape[0]:
            raise NoLayout(f"{info.name} does not fit into {name}")
        places[info.name] = data[start : start + rows]
        start += rows
    padded = hasattr(module, "num_embeddings_padded") and len(parts) == 1
    if start != data.shape[0] and not padded:
        raise NoLayout(f"{name} has more rows than its tensors")
    return places


def _check_derived(model: nn.Module) -> None:
    """Raises NoLayout when a layer keeps values that vLLM computes from weights after loading them.

    Such values are tensors that are neither parameters nor buffers, in a layer or in what does its attention (absorbed
    projections of latent attention, say). The KV cache, single numbers and tables of integers are none.
    """
    weights = {parameter.untyped_storage().data_ptr() for _, _, parameter in _parameters(model).values()}
    for name, module in model.named_modules():
        beside = getattr(getattr(module, "impl", None), "__dict__", {})
        for key, value in [*vars(module).items(), *beside.items()]:
            some = value if isinstance(value, list | tuple) else [value]
            for one in some if not key.startswith("kv_cache") else []:
                if _is_matrix(one) and one.untyped_storage().data_ptr() not in weights:
                    raise NoLayout(f"{name} keeps values beside its weights ({key})")


def _is_matrix(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
