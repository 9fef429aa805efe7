"""Copies between the host and a device that make the host wait as little as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device | str, *, dtype: torch.dtype | None = None) -> Tensor:
    """Values of the host (a tensor on it, an array, numbers) as a tensor on `device`.

    To a CUDA device they go through pinned memory, without waiting; torch reuses that memory once they have arrived.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def copy_to(tensor: Tensor, values: Tensor) -> None:
    """Copy values into `tensor`, rounded to its type; from the host to CUDA without waiting, or more memory there."""
    if tensor.is_cuda and not values.is_cuda:
        tensor.copy_(values.detach().to(tensor.dtype).pin_memory(), non_blocking=True)
    else:
        tensor.copy_(values)


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device on the host: from a CUDA device through pinned memory, after one wait for all of them."""
    copies = [value.to("cpu", non_blocking=value.is_cuda) for value in values]
    if copies and values[0].is_cuda:
        torch.cuda.current_stream(values[0].device).synchronize()
    return copies
