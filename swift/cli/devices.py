"""What the machine has: accelerators and the CPU cores this process may use."""

from __future__ import annotations

import os


def count_accelerators() -> tuple[int, str]:
    """Visible accelerators and their kind (`cuda`, `xpu`, ...); (0, "cpu") on a machine without one."""
    import torch

    if not torch.accelerator.is_available():
        return 0, "cpu"
    kind = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count(), "cuda" if kind is None else kind.type


def allowed_cores() -> list[int]:
    """Ids of the CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
