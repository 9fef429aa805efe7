"""Copies from the host to a device that do not make the host wait."""

from __future__ import annotations

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
