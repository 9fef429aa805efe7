"""The trainer's model as a `WeightSource`: the tensors of a checkpoint, gathered bucket by bucket.

    parameters --gather--> whole parameters --merge LoRA--> checkpoint tensors --cast--> engine's type -> Bucket

Each parameter is gathered once per update and freed with its bucket, so that the peak memory is one bucket. Every rank
gathers the same buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from swift.models.checkpoint_tensors import (
    CheckpointTensor,
    CheckpointUnit,
    checkpoint_units,
    computing_dtype,
    describe_unit,
    read_adapter,
    read_unit,
)
from swift.models.sharded import gathered, is_dtensor, is_zero3
from swift.rollout.weights.base import BUCKET_BYTES, AdapterWeights, Bucket, TensorInfo, dtype_name, torch_dtype


class PolicyWeights:
    """The weights of a model in training, by their names in a checkpoint; see `WeightSource`.

    Args:
        model: the policy: a transformers model, also wrapped by PEFT, DDP, DeepSpeed or FSDP2.
        dtype: dtype of the engine; None sends the policy's own. Tensors whose dtype differs from that of most weights
            (float32 routers, integer buffers) keep it.
        move_model_batches: `--move_model_batches`: number of buckets of layers; the other tensors are one more.
            None fills buckets up to `bucket_bytes`.
        bucket_bytes: maximum size of a bucket as it is sent; a larger layer is a bucket of its own.

    Raises:
        ConfigError: an adapter that cannot be merged into weights.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | str | None = None,
        move_model_batches: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.model = model
        wanted = torch_dtype(dtype) if isinstance(dtype, str) else dtype
        self.dtype = wanted or computing_dtype(model)
        self._units = checkpoint_units(model)
        self._main_dtype = _main_dtype(self._units)
        self._groups = (
            _by_count(self._units, move_model_batches)
            if move_model_batches
            else _by_size(self._units, bucket_bytes, self._nbytes)
        )
        self._manifest: tuple[TensorInfo, ...] | None = None

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket as it is sent."""
        return max(sum(map(self._nbytes, group)) for group in self._groups)

    def manifest(self) -> tuple[TensorInfo, ...]:
        if self._manifest is None:
            self._manifest = tuple(
                TensorInfo.of(name, self._cast(tensor))
                for group in self._groups
                for unit in group
                for name, tensor in describe_unit(self.model, unit).items()
            )
        return self._manifest

    def parameters(self) -> dict[str, Tensor]:
        """The policy's parameters by their names in an update; {} if other tensors are sent. Not a collective."""
        found: dict[str, Tensor] = {}
        for unit in self._units:
            for tensor in unit.tensors:
                if not self._is_plain(tensor):
                    return {}
                found[tensor.name] = tensor.sources[0]
        sent = {info.name: (info.shape, info.dtype) for info in self.manifest()}
        own = {name: (tuple(parameter.shape), dtype_name(parameter.dtype)) for name, parameter in found.items()}
        return found if sent == own else {}

    def _is_plain(self, tensor: CheckpointTensor) -> bool:
        """Whether a tensor of the checkpoint is an unsharded parameter in this process's memory."""
        source = tensor.sources[0]
        sharded = is_zero3(source) or is_dtensor(source)
        freed = source.numel() > 0 and not sharded and source.untyped_storage().nbytes() == 0
        return tensor.identity == (id(source),) and not sharded and not freed

    def buckets(self) -> Iterator[Bucket]:
        for group in self._groups:
            sources = [source for unit in group for tensor in unit.tensors for source in tensor.sources]
            with torch.no_grad(), gathered(sources) as whole:
                tensors = [
                    (name, self._cast(tensor))
                    for unit in group
                    for name, tensor in read_unit(self.model, unit, whole).items()
                ]
            bucket = Bucket(tensors)  # it keeps the storage of gathered tensors
            del tensors, whole
            yield bucket
            del bucket

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.dtype == self._main_dtype else tensor

    def _nbytes(self, unit: CheckpointUnit) -> int:
        """Bytes of a unit as it is sent."""
        if self.dtype is None or self._main_dtype is None:
            return unit.nbytes
        return unit.nbytes * self.dtype.itemsize // self._main_dtype.itemsize


def adapter_weights(model: nn.Module) -> AdapterWeights:
    """A copy of the policy's adapter; a collective if parameters are sharded."""
    config, tensors = read_adapter(model)
    return AdapterWeights(config, tensors)


def _main_dtype(units: list[CheckpointUnit]) -> torch.dtype | None:
    """The floating-point dtype of most weights; None if there are none."""
    counts: dict[torch.dtype, int] = {}
    for tensor in (tensor for unit in units for tensor in unit.tensors):
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def _by_size(
    units: list[CheckpointUnit], limit: int, nbytes: Callable[[CheckpointUnit], int]
) -> list[list[CheckpointUnit]]:
    """Consecutive units in groups of at most `limit` bytes; a larger unit is a group of its own."""
    groups: list[list[CheckpointUnit]] = []
    room = -1
    for unit in units:
        size = nbytes(unit)
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(unit)
        room -= size
    return groups


def _by_count(units: list[CheckpointUnit], count: int) -> list[list[CheckpointUnit]]:
    """At most `count` groups of consecutive layers, and one of the other units."""
    layers = [unit for unit in units if unit.is_layer]
    rest = [unit for unit in units if not unit.is_layer]
    per_group = max(1, math.ceil(len(layers) / count))
    groups = [layers[start : start + per_group] for start in range(0, len(layers), per_group)]
    return [group for group in [*groups, rest] if group]
