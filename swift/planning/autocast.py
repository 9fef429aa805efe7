"""torch's autocast for tensors on "meta", a device that it does not know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

PRODUCTS = {
    nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm,
    torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm,
}  # fmt: skip
"""What is cast; what autocast computes in float32 is so already, because weights and residual stream are."""


class Autocast(TorchFunctionMode):
    """Stands for `torch.autocast`, with its arguments; the innermost one counts."""

    entered: ClassVar[list[Autocast]] = []

    def __init__(self, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        super().__init__()
        self.dtype, self.enabled = dtype or torch.bfloat16, enabled

    def __enter__(self) -> Autocast:
        self.entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.entered.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS and is_enabled():
            args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        return func(*args, **kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor


def is_enabled(device_type: str = "") -> bool:
    """Stands for `torch.is_autocast_enabled`."""
    return bool(Autocast.entered) and Autocast.entered[-1].enabled


def dtype_of(device_type: str = "") -> torch.dtype:
    """Stands for `torch.get_autocast_dtype`."""
    return Autocast.entered[-1].dtype if Autocast.entered else torch.bfloat16


@contextlib.contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Use the stand-ins, in recomputed layers too."""
    with (
        mock.patch.object(torch, "autocast", Autocast),
        mock.patch.object(torch.amp, "autocast", Autocast),
        mock.patch.object(torch, "is_autocast_enabled", is_enabled),
        mock.patch.object(torch, "get_autocast_dtype", dtype_of),
    ):
        yield
