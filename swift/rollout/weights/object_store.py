"""Buckets in Ray's object store: one copy per node, read in place by every engine there, pulled by other nodes.

The trainer's tensors are written into the store directly. Engines get read-only views, valid while they refer to them.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swift.rollout.weights.base import Bucket, TensorInfo, torch_dtype
from swift.rollout.weights.packing import staged

Parcel = tuple[list[tuple[str, str, tuple[int, ...], int]], list[np.ndarray]]
"""Name, dtype name, shape and place in the list for each tensor; bytes, once for tensors that are the same memory."""


def put(bucket: Bucket) -> Any:
    """A reference to the bucket in the store; made once for all engines."""
    import ray

    return staged(bucket, "object_store", lambda: ray.put(parcel_of(bucket)))


def parcel_of(bucket: Bucket) -> Parcel:
    """The bucket as arrays of bytes, views of tensors in main memory."""
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    arrays: list[np.ndarray] = []
    places: dict[tuple[Any, ...], int] = {}
    for name, tensor in bucket.tensors:
        info = TensorInfo.of(name, tensor)
        memory = (tensor.data_ptr(), info.dtype, info.shape, tensor.stride()) if tensor.numel() else (name,)
        if memory not in places:
            places[memory] = len(arrays)
            arrays.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        entries.append((name, info.dtype, info.shape, places[memory]))
    return entries, arrays


def tensors_of(parcel: Parcel) -> list[tuple[str, Tensor]]:
    """The tensors as views of the store; nobody may write to them."""
    entries, arrays = parcel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they cannot be written to
        flat = [torch.from_numpy(array) for array in arrays]
    return [(name, _typed(flat[place], dtype, shape)) for name, dtype, shape, place in entries]


def _typed(raw: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor that bytes are of; none of an empty one can be viewed."""
    return raw.view(torch_dtype(dtype)).view(shape) if raw.numel() else torch.empty(shape, dtype=torch_dtype(dtype))
