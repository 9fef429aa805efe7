"""ms-swift's names of small helpers, for plugins written for it."""

from __future__ import annotations

import logging
from typing import Any


def get_logger(log_file: str | None = None, log_level: int | None = None) -> logging.Logger:
    """The logger of plugins. log_file, log_level: not used; swift configures where lines go."""
    return logging.getLogger("swift.plugin")


def to_device(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """A tensor, or a list, tuple or dict of them at any depth, on a device; other values unchanged."""
    if isinstance(data, dict):
        return {name: to_device(value, device, non_blocking) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device, non_blocking) for value in data)
    return data.to(device, non_blocking=non_blocking) if hasattr(data, "to") else data
