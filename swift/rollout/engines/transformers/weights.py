"""Weight updates of an in-process copy of the model, written in place, and LoRA adapters merged into it.

A second copy of the model would not fit beside a trainer. So an incomplete update leaves invalid weights until the
checkpoint is loaded again. The manifest is checked before the first tensor is written. Removal of an adapter restores
the base weights bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swift.errors import ConfigError, SyncFailed, Unsupported
from swift.models.adapter_merge import merged_tensors
from swift.models.checkpoint_tensors import CheckpointUnit, checkpoint_units, describe_unit
from swift.rollout.engines.expected_weights import manifest_problems
from swift.rollout.weights.base import AdapterWeights, Bucket, TensorInfo, torch_dtype
from swift.rollout.weights.digest import StreamDigest, checksum


class InPlaceWeights:
    """Writes the tensors of one update into the model's parameters as they arrive.

    If loading rearranges the parameters (such as experts fused into one parameter), the inverse of the conversion at
    saving is applied. Tied tensors may have any of their names, and must be equal if both arrive.

    Attributes:
        digest: of the stored values; of the sent ones where these have another dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        self.digest = StreamDigest()
        self._places = {name: place for unit in checkpoint_units(model) for name, place in _places(model, unit).items()}
        self._written: dict[int | str, str] = {}  # identity of a written tensor -> its name

    def problems(self, manifest: Sequence[TensorInfo]) -> list[str]:
        """Names, shapes and types of the manifest against those of the model."""
        known = {info.name: self._places[info.name] for info in manifest if info.name in self._places}
        given = {place.identity for place in known.values()}
        problems = manifest_problems(
            manifest,
            {name: place.shape for name, place in self._places.items()},
            optional={name for name, place in self._places.items() if place.identity in given},
        )
        return problems + [
            f"{info.name} of type {info.dtype} cannot be stored"
            for info in manifest
            if info.name in known
            and torch_dtype(info.dtype).is_floating_point != known[info.name].dtype.is_floating_point
        ]

    @torch.no_grad()
    def write(self, bucket: Bucket) -> None:
        """Store its tensors. Raises SyncFailed: two tensors differ that the model ties."""
        for name, tensor in bucket.tensors:
            place = self._places[name]
            if place.identity in self._written:
                self._check_tie(place, name, tensor)
                stored = place.target
            else:
                self._written[place.identity] = name
                stored = place.write(tensor)
            self.digest.add(name, stored if stored.dtype == tensor.dtype else tensor)

    def _check_tie(self, place: _Place, name: str, tensor: Tensor) -> None:
        if checksum(tensor.to(place.dtype)) != checksum(place.target):
            raise SyncFailed(
                f"weights: {name} differs from {self._written[place.identity]}, to which this model ties it; untie it "
                "in the model's config.json"
            )


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a checkpoint tensor in the model: a parameter, or elements of several parameters of a layer.

    identity: equal for tied tensors. target: the parameter, or a parameter of the layer.
    """

    name: str
    identity: int | str
    shape: tuple[int, ...]
    dtype: torch.dtype
    target: Tensor
    layer: _Rearranged | None = None

    def write(self, tensor: Tensor) -> Tensor:
        """Store a tensor; returns the stored values."""
        if self.layer is not None:
            return self.layer.write(self.name, tensor, self.dtype).view(self.shape)
        self.target.copy_(tensor)
        return self.target


def _places(model: nn.Module, unit: CheckpointUnit) -> dict[str, _Place]:
    """The places of a unit's tensors, under their names in the checkpoint."""
    parameters = {tensor.name: tensor.sources[0] for tensor in unit.tensors}
    saved = describe_unit(model, unit)
    shapes = {name: tensor.shape for name, tensor in parameters.items()}
    if shapes == {name: tensor.shape for name, tensor in saved.items()}:
        return {name: _Place(name, id(t), tuple(t.shape), t.dtype, t) for name, t in parameters.items()}
    layer = _Rearranged(model, parameters)
    first = next(iter(parameters.values()))
    return {name: _Place(name, name, tuple(t.shape), t.dtype, first, layer) for name, t in saved.items()}


class _Rearranged:
    """A layer whose checkpoint splits, joins or transposes its parameters: the position of each checkpoint element.

    The conversion of saving is applied to the positions of elements instead of the weights, which works for every
    rearrangement. The positions are kept from the first tensor of the layer to the last.
    """

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        self._model = model
        sizes = [tensor.numel() for tensor in tensors.values()]
        ends = list(itertools.accumulate(sizes))
        self._parameters = {
            name: (end - size, end, tensor)
            for (name, tensor), size, end in zip(tensors.items(), sizes, ends, strict=True)
        }
        self._positions: dict[str, Tensor] = {}

    def write(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Store a tensor of the checkpoint; returns the stored values, flat."""
        if not self._positions:
            self._find_positions()
        position, flat = self._positions.pop(name), tensor.reshape(-1)
        stored = torch.empty_like(flat, dtype=dtype)
        for start, end, parameter in self._parameters.values():
            here = ((position >= start) & (position < end)).nonzero()[:, 0]
            if here.numel():
                numbers, there = parameter.view(-1), position[here] - start
                numbers[there] = flat[here].to(numbers.device, numbers.dtype)
                stored[here] = numbers[there].to(stored.device)
        return stored

    def _find_positions(self) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        numbered = {
            name: torch.arange(start, end, device=parameter.device).view(parameter.shape)
            for name, (start, end, parameter) in self._parameters.items()
        }
        saved = revert_weight_conversion(self._model, numbered)
        self._positions = {name: tensor.reshape(-1) for name, tensor in saved.items()}
        found = torch.cat(list(self._positions.values()))
        total = sum(positions.numel() for positions in numbered.values())
        if found.numel() != total or not bool((torch.bincount(found) == 1).all()):
            raise SyncFailed(
                f"weights: {next(iter(numbered))}: saving this architecture does more than rearrange its weights, "
                "so that they cannot be updated in place; use --infer_backend vllm"
            )


class MergedAdapter:
    """Weights with a merged LoRA adapter (plain LoRA: `W + scaling * B A`).

    Computed in float32 from the base values and rounded once to the model's dtype. The model, without PEFT, is not
    changed before `merge`; fully trained modules (`modules_to_save`) replace those of the model.

    Raises:
        SyncFailed: its tensors do not fit the model or its own config.
        Unsupported: it is not LoRA, has other base weights, or changes one of two tied modules.
    """

    def __init__(self, model: nn.Module, adapter: AdapterWeights, version: int) -> None:
        where = f"adapter: version {version} for transformers"
        if not adapter.tensors:
            raise SyncFailed(f"{where}: it comes without tensors")
        try:
            self._changed = merged_tensors(model, adapter.config, adapter.tensors)
        except ConfigError as error:
            raise Unsupported(f"{where}: {str(error).partition(';')[0]}; use LoRA on untied modules") from error
        except ValueError as error:
            raise SyncFailed(f"{where}: {error}") from error
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._targets = [parameters[changed.name] for changed in self._changed]
        self._bases: list[Tensor] = []

    @torch.no_grad()
    def merge(self) -> None:
        for target, changed in zip(self._targets, self._changed, strict=True):
            self._bases.append(target.detach().clone())
            target.copy_(changed.read(lambda tensor: tensor))
        self._changed = []  # frees the tensors of the adapter

    @torch.no_grad()
    def remove(self) -> None:
        """Restore the base values of the parameters."""
        for target, base in zip(self._targets, self._bases, strict=True):
            target.copy_(base)

    def to_host(self) -> None:
        """Move the stored base values to the CPU."""
        self._bases = [base.to("cpu") for base in self._bases]
