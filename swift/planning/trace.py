"""What a computation on tensors without numbers (device "meta") would allocate, compute and move.

Every operation passes `Trace`, the backward pass included. Bytes are those of the storages that are alive, in blocks as
torch's CUDA allocator rounds them. Times are those of a roofline: a kernel takes as long as its FLOPs or its bytes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from swift.models.quantisation import scales_of
from swift.planning.devices import Device

aten = torch.ops.aten
BLOCK = 512
"""Bytes to whose multiple the allocator rounds."""
FREE = {aten.detach.default, aten.lift_fresh.default}
FUSED = {aten._fused_adamw_.default, aten._fused_adam_.default, aten._fused_sgd_.default}
"""Updates in place, for which meta tensors have no kernel."""
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
HALF = (torch.bfloat16, torch.float16)


class Trace(TorchDispatchMode):
    """Counts inside of a `with` block; nothing has a value there.

    live, peak: bytes. flops, moved, seconds, kernels: of all operations so far.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.live = self.peak = 0
        self.flops = self.moved = self.seconds = 0.0
        self.kernels = 0
        self._known: dict[int, int] = {}
        self._chosen: Mapping[int, int] | None = None
        self._holds = True

    @contextlib.contextmanager
    def resizing(self) -> Iterator[None]:
        """Notice in the block that a storage is emptied and filled again, as FSDP does with gathered weights."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if (key := storage._cdata) in self._known:
                self._change(key, _rounded(size) - self._known[key])
            return found

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    @contextlib.contextmanager
    def reading(self, chosen: Mapping[int, int], *, holds: bool = True) -> Iterator[None]:
        """Answer in the block what only numbers tell: each that is read is 1, a truth value `holds`, and masks choose.

        chosen: number of places of a mask -> how many are chosen; all of a mask that is not named.
        """
        self._chosen, self._holds = chosen, holds
        try:
            yield
        finally:
            self._chosen = None

    def hold(self, *modules: torch.nn.Module) -> None:
        """Count the parameters and buffers of modules that were made before."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers(), *scales_of(module)):
                self._note(local(tensor))

    def reset_peak(self) -> None:
        """Let the peak be what is alive."""
        self.peak = self.live

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = NotImplemented if self._chosen is None else self._answer(operation, args)
        if results is NotImplemented:
            results = None if operation in FUSED else operation(*args, **kwargs)
        outputs = _tensors(results)
        for tensor in outputs:
            self._note(tensor)
        if not operation.is_view and operation not in FREE:
            self._cost(operation, args, kwargs, results, outputs)
        return results

    def _answer(self, operation: Any, args: Any) -> Any:
        """The result of an operation whose shape or value depends on numbers; NotImplemented for others."""
        packet = operation.overloadpacket
        if not all(tensor.is_meta for tensor in _tensors(args)):
            return NotImplemented
        if packet is aten._local_scalar_dense:
            return self._holds if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if packet is aten.masked_scatter_backward:
            return args[0].new_empty(args[2])
        if packet is aten.masked_select:
            return args[0].new_empty(self._count(args[1]))
        if packet is aten.nonzero:
            return args[0].new_empty((self._count(args[0]), args[0].ndim), dtype=torch.long)
        if packet in INDEXED and len(args[1]) == 1 and args[1][0] is not None and args[1][0].dtype == torch.bool:
            table, mask = args[0], args[1][0]
            if packet is aten.index:
                return table.new_empty((self._count(mask), *table.shape[mask.ndim :]))
            return torch.empty_like(table) if packet is aten.index_put else table
        return NotImplemented

    def _count(self, mask: Tensor) -> int:
        assert self._chosen is not None
        return self._chosen.get(mask.numel(), mask.numel())

    def _cost(self, operation: Any, args: Any, kwargs: Any, results: Any, outputs: list[Tensor]) -> None:
        packet = operation.overloadpacket
        if str(packet).startswith(("aten.empty", "aten.new_empty", "aten._local_scalar")):
            return
        inputs = _tensors((args, kwargs))
        moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        if packet is aten.embedding:  # only the rows that are asked for
            moved = 2 * sum(tensor.nbytes for tensor in outputs)
        if packet is aten._grouped_mm:  # each row meets one expert
            left, right = args[:2]
            flops = 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]
        else:
            flops = flop_registry[packet](*args, **kwargs, out_val=results) if packet in flop_registry else 0
        self._add(flops, moved, half=bool(inputs) and inputs[0].dtype in HALF)

    def kernel(self, flops: float, tensors: Sequence[Tensor]) -> None:
        """Count a kernel that reads or writes these tensors."""
        self._add(flops, sum(tensor.nbytes for tensor in tensors), half=tensors[0].dtype in HALF)

    def _add(self, flops: float, moved: float, *, half: bool) -> None:
        seconds = self.device.seconds(flops, moved, half=half)
        self.flops, self.moved, self.seconds = self.flops + flops, self.moved + moved, self.seconds + seconds
        self.kernels += 1

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = 0
        self._change(key, _rounded(storage.nbytes()))
        weakref.finalize(storage, self._freed, key)

    def _change(self, key: int, size: int) -> None:
        self._known[key] += size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def local(tensor: Any) -> Tensor:
    """What this process has of a tensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _tensors(values: Any) -> list[Tensor]:
    return [local(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def fused_on_meta() -> Iterator[None]:
    """Optimizers accept `fused` for tensors without numbers, whose updates `Trace` then does not compute."""
    from torch.optim import optimizer

    supported = [*optimizer._get_fused_kernels_supported_devices(), "meta"]
    with mock.patch.object(optimizer, "_get_fused_kernels_supported_devices", lambda: supported):
        yield
