"""A bucket as one run of bytes and a JSON-safe table of contents, for every transport alike.

Bytes travel, not numbers: no type is ever converted on the way. Tensors start at multiples of `ALIGNMENT`. Tensors that
are the same memory (a tied head beside its embedding) lie in the run once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.weights.base import Bucket, TensorInfo, torch_dtype

ALIGNMENT = 64
"""Bytes; a multiple of every element size, and of a cache line."""

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, torch dtype name, shape, offset in bytes."""

_staging = threading.Lock()
T = TypeVar("T")


def staged(bucket: Bucket, key: str, make: Callable[[], T]) -> T:
    """What a transport makes of a bucket, made once although several receivers' threads ask for it."""
    with _staging:
        if key not in bucket.staged:
            bucket.staged[key] = make()
        found: T = bucket.staged[key]
        return found


def lay_out(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[Entry], int]:
    """Where each tensor goes, and the length of the run in bytes."""
    entries: list[Entry] = []
    places: dict[tuple[Any, ...], int] = {}
    end = 0
    for name, tensor in tensors:
        info = TensorInfo.of(name, tensor)
        memory = (tensor.data_ptr(), info.dtype, info.shape, tensor.stride()) if tensor.numel() else (name,)
        if memory not in places:
            places[memory] = end
            end = -(-(end + info.nbytes) // ALIGNMENT) * ALIGNMENT
        entries.append((name, info.dtype, info.shape, places[memory]))
    return entries, end


@torch.no_grad()
def pack_into(flat: Tensor, tensors: Sequence[tuple[str, Tensor]], entries: Sequence[Entry]) -> None:
    """Copy the tensors' bytes to their places in `flat` (uint8)."""
    written: set[int] = set()
    for (_, tensor), (name, _, _, offset) in zip(tensors, entries, strict=True):
        if offset in written and tensor.numel():
            continue
        written.add(offset)
        place = view_at(flat, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
        place.copy_(tensor.detach())


def pack(bucket: Bucket, device: torch.device | str | None = None) -> tuple[Tensor, list[Entry]]:
    """The bucket as one new uint8 tensor, on the device of its tensors unless another is given."""
    entries, size = lay_out(bucket.tensors)
    where = device if device is not None else bucket.tensors[0][1].device if bucket.tensors else "cpu"
    flat = torch.zeros(size, dtype=torch.uint8, device=where)
    pack_into(flat, bucket.tensors, entries)
    return flat, entries


def unpack(flat: Tensor, entries: Sequence[Sequence[Any]]) -> list[tuple[str, Tensor]]:
    """The tensors as views of the run.

    Raises:
        SyncFailed: the table of contents does not fit the run.
    """
    return [(name, view_at(flat, name, dtype, tuple(shape), offset)) for name, dtype, shape, offset in entries]


def view_at(flat: Tensor, name: str, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    """One tensor of the run."""
    size = TensorInfo(name, dtype, shape).nbytes
    if offset < 0 or offset + size > flat.numel():
        raise SyncFailed(f"weights: {name}: lies at {offset}..{offset + size} of a bucket of {flat.numel()} bytes")
    return flat[offset : offset + size].view(torch_dtype(dtype)).view(shape)
