"""Buckets in Ray's object store: one copy per node, which all engines of the node read in place.

The trainer's tensors are written into the store directly. Engines get read-only views, valid while they reference them.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swift.rollout.weights.base import Bucket, TensorInfo, memory_of, torch_dtype

ByteArrays = list[tuple[TensorInfo, np.ndarray]]
"""Each tensor and its bytes; tensors with the same memory share one array, which pickle writes once."""


def put(bucket: Bucket) -> Any:
    """Write a bucket into the store, once for all engines; returns its reference."""
    import ray

    return bucket.once("object_store", lambda: ray.put(byte_arrays_of(bucket)))


def byte_arrays_of(bucket: Bucket) -> ByteArrays:
    """The bucket as arrays of bytes, views of tensors in main memory."""
    arrays: dict[tuple[Any, ...], np.ndarray] = {}
    packed = []
    for name, tensor in bucket.tensors:
        memory = memory_of(name, tensor)
        if memory not in arrays:
            arrays[memory] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        packed.append((TensorInfo.of(name, tensor), arrays[memory]))
    return packed


def tensors_of(packed: ByteArrays) -> list[tuple[str, Tensor]]:
    """The tensors as read-only views of the store."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about read-only arrays
        return [(info.name, _typed(torch.from_numpy(array), info)) for info, array in packed]


def _typed(raw: Tensor, info: TensorInfo) -> Tensor:
    """A view of bytes as a tensor; an empty tensor is created, as it cannot be a view."""
    dtype = torch_dtype(info.dtype)
    return raw.view(dtype).view(info.shape) if raw.numel() else torch.empty(info.shape, dtype=dtype)
