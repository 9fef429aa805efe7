"""Updates that are written into the parameters of an in-process copy as they come.

There is no second copy of the model, which is what an engine beside a trainer can afford least. So an update that ends
early leaves weights that belong to no version: they are void until another update has come whole, or the folder is
read again. What can be known from the manifest is refused before the first byte is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swift.errors import SyncFailed
from swift.models.checkpoint_tensors import CheckpointUnit, checkpoint_units, describe_unit
from swift.rollout.weights.base import Ack, Bucket, TensorInfo, WeightUpdate, torch_dtype
from swift.rollout.weights.digest import StreamDigest, checksum

NAMED_IN_ERRORS = 3
"""Tensors that a message names before it says how many more there are."""


class InPlaceUpdate(WeightUpdate):
    """Writes an update into a model's parameters as it comes.

    A model that loading has rearranged (experts fused into one parameter, say) is written through the inverse of
    what saving does to it. Tied tensors may come under any of their names, and must agree when they come twice.

    Args:
        model: receives it.
        manifest: every tensor that will come.
        version: of the policy.
        ended: called once with this update and why the weights are void, "" when they are not.

    Raises:
        SyncFailed: names or shapes are not those of the model's checkpoint; nothing has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        manifest: Sequence[TensorInfo],
        version: int,
        *,
        ended: Callable[[InPlaceUpdate, str], None],
    ) -> None:
        super().__init__("transformers", manifest, version)
        self.committed = False
        self._places = {name: place for unit in checkpoint_units(model) for name, place in _places(model, unit).items()}
        self._check()
        self._ended = ended
        self._open = True
        self._written: dict[int | str, str] = {}
        self._received = StreamDigest()
        self._received_bytes = 0
        self._rounded = False
        self._started = time.monotonic()

    def _check(self) -> None:
        """Names and shapes of the manifest against those of the model."""
        names = [info.name for info in self.manifest]
        given = set(names)
        covered = {self._places[name].identity for name in given if name in self._places}
        problems = {
            "is twice in the manifest": sorted({name for name in names if names.count(name) > 1})
            if len(given) != len(names)
            else [],
            "is not a tensor of the model": [name for name in names if name not in self._places],
            "is missing": [name for name, place in self._places.items() if place.identity not in covered],
            "has another shape than in the model": [
                f"{info.name} {list(info.shape)} (model: {list(self._places[info.name].shape)})"
                for info in self.manifest
                if info.name in self._places and info.shape != self._places[info.name].shape
            ],
            "is of a type that cannot be stored": [
                f"{info.name} {info.dtype}"
                for info in self.manifest
                if info.name in self._places
                and torch_dtype(info.dtype).is_floating_point != self._places[info.name].dtype.is_floating_point
            ],
        }
        lines = [f"{_some(found)}: {what}" for what, found in problems.items() if found]
        if lines:
            raise SyncFailed(
                f"weights: version {self.version} for transformers: {'; '.join(lines)}; "
                "trainer and engine must have the same architecture"
            )

    @torch.no_grad()
    def _deliver(self, bucket: Bucket) -> None:
        if not self._open:
            raise SyncFailed(f"weights: version {self.version} for transformers: the update has ended; begin another")
        for name, tensor in bucket.tensors:
            place = self._places[name]
            if place.identity in self._written:
                self._check_tie(place, name, tensor)
                stored = place.target
            else:
                self._written[place.identity] = name
                stored = place.write(tensor)
            # the proof is what lies in the parameters now, unless it has another type than what came
            self._received.add(name, stored if stored.dtype == tensor.dtype else tensor)
            self._received_bytes += tensor.numel() * tensor.element_size()
            self._rounded |= torch.promote_types(tensor.dtype, place.dtype) != place.dtype

    def _check_tie(self, place: _Place, name: str, tensor: Tensor) -> None:
        if checksum(tensor.to(place.dtype)) != checksum(place.target):
            raise SyncFailed(
                f"weights: version {self.version} for transformers: {name} differs from "
                f"{self._written[place.identity]}, to which this model ties it; untie it in the model's config.json"
            )

    def _finish(self) -> Ack:
        return Ack(
            version=self.version,
            tensors=self.sent,
            nbytes=self._received_bytes,
            digest=self._received.hexdigest(),
            seconds=time.monotonic() - self._started,
            rounded=self._rounded,
        )

    def commit(self) -> Ack:
        """All tensors are written: the engine samples with them from now on; see `WeightUpdate.commit`."""
        if not self._open:
            raise SyncFailed(f"weights: version {self.version} for transformers: the update has ended; begin another")
        ack = super().commit()
        self._open, self.committed = False, True
        self._ended(self, "")
        return ack

    def abort(self) -> None:
        """Give up: the weights are void when anything was written."""
        if self._open:
            self._open = False
            self._ended(self, f"the update to version {self.version} ended early" if self._written else "")


def _some(names: Sequence[str]) -> str:
    rest = len(names) - NAMED_IN_ERRORS
    return ", ".join(names[:NAMED_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint tensor lives: a parameter of its own, or numbers spread over the parameters of a layer.

    identity: equal for tied tensors. target: the parameter, or any of the layer's.
    """

    name: str
    identity: int | str
    shape: tuple[int, ...]
    dtype: torch.dtype
    target: Tensor
    layer: _Rearranged | None = None

    def write(self, tensor: Tensor) -> Tensor:
        """Store a tensor; what is stored now."""
        if self.layer is not None:
            return self.layer.write(self.name, tensor, self.dtype).view(self.shape)
        self.target.copy_(tensor)
        return self.target


def _places(model: nn.Module, unit: CheckpointUnit) -> dict[str, _Place]:
    """The places of a unit's tensors, under their names in the checkpoint."""
    own = {one.name: one.sources[0] for one in unit.tensors}
    saved = describe_unit(model, unit)
    if {name: tensor.shape for name, tensor in own.items()} == {name: tensor.shape for name, tensor in saved.items()}:
        return {name: _Place(name, id(one), tuple(one.shape), one.dtype, one) for name, one in own.items()}
    layer = _Rearranged(model, own)
    first = next(iter(own.values()))
    return {name: _Place(name, name, tuple(one.shape), one.dtype, first, layer) for name, one in saved.items()}


class _Rearranged:
    """A layer whose checkpoint cuts, joins or turns its parameters: where each number of the checkpoint belongs.

    Found by saving the numbers' own positions in place of the weights, which holds for every rearrangement and needs
    nothing but the conversion that saving does anyway. Kept from the first tensor of the layer to its last.

    Args:
        model: for its conversion.
        tensors: the layer's parameters under their names in the model.
    """

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        self._model = model
        self._tensors = tensors
        self._starts = [0]
        for tensor in tensors.values():
            self._starts.append(self._starts[-1] + tensor.numel())
        self._positions: dict[str, Tensor] = {}

    def write(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Store a tensor of the checkpoint; the numbers as they are stored now, flat."""
        if not self._positions:
            self._find_positions()
        flat = tensor.reshape(-1)
        stored = torch.empty_like(flat, dtype=dtype)
        for target, there, here in self._parts(self._positions.pop(name)):
            numbers = target.view(-1)
            numbers[there] = flat[here].to(numbers.device, numbers.dtype)
            stored[here] = numbers[there].to(stored.device)
        return stored

    def _parts(self, position: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(parameter, positions in it, positions in the checkpoint's tensor)."""
        for start, stop, target in zip(self._starts, self._starts[1:], self._tensors.values(), strict=False):
            here = ((position >= start) & (position < stop)).nonzero()[:, 0]
            if here.numel():
                yield target, position[here] - start, here

    def _find_positions(self) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        numbered = {
            name: torch.arange(start, start + tensor.numel(), device=tensor.device).view(tensor.shape)
            for start, (name, tensor) in zip(self._starts, self._tensors.items(), strict=False)
        }
        saved = revert_weight_conversion(self._model, numbered)
        self._positions = {name: tensor.reshape(-1) for name, tensor in saved.items()}
        found = torch.cat(list(self._positions.values()))
        if found.numel() != self._starts[-1] or not bool((torch.bincount(found) == 1).all()):
            raise SyncFailed(
                f"weights: {next(iter(self._tensors))}: saving this architecture does more than rearrange its weights, "
                "so that they cannot be updated in place; use --infer_backend vllm"
            )
