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
from swift.planning import numbers
from swift.planning.devices import HOST, LINK, Device
from swift.planning.numbers import CPU, META

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

    place: type of the tensors that are counted. live, peak: their bytes. host_live, host_peak: of those among them that
    stand for tensors of the host (`moving`). flops, moved, seconds, kernels: of all operations so far.
    """

    def __init__(self, device: Device, *, place: str = "meta") -> None:
        super().__init__()
        self.device, self.place = device, place
        self.live = self.peak = 0
        self.host_live = self.host_peak = 0
        self.flops = self.moved = self.seconds = 0.0
        self.kernels = 0
        self._known: dict[int, int] = {}
        self._chosen: Mapping[int, int] | None = None
        self._holds = True
        self._knows = self._moves = False
        self._of_host: set[int] = set()

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
    def knowing(self) -> Iterator[None]:
        """Follow integers from the host in the block; see `swift.planning.numbers`."""
        self._knows = True
        try:
            with numbers.made_on_host():
                yield
        finally:
            self._knows = False

    @contextlib.contextmanager
    def reading(self, chosen: Mapping[int, int], *, holds: bool = True) -> Iterator[None]:
        """Answer in the block what only numbers tell: each that is read is 1, a truth value `holds`, and masks choose.

        chosen: number of places of a mask -> how many are chosen; all of a mask that is not named.
        """
        to_list = Tensor.tolist

        def listed(tensor: Tensor) -> Any:
            unknown = tensor.is_meta and numbers.of(tensor) is None
            return to_list(torch.ones(tensor.shape, dtype=tensor.dtype) if unknown else tensor)

        self._chosen, self._holds = chosen, holds
        try:
            with mock.patch.object(Tensor, "tolist", listed):
                yield
        finally:
            self._chosen = None

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Follow copies between host and device in the block, where tensors of both are on "meta".

        What is computed of tensors of the host alone stays there.
        """
        to = Tensor.to

        def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found = to(tensor, *args, **kwargs)
            asked = kwargs.get("device", args[0] if args else None)
            there = isinstance(asked, str | torch.device) and torch.device(asked) == META
            if found is tensor and there and self._is_of_host(tensor):
                found = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
                self.seconds += tensor.nbytes / LINK
            return found

        self._moves = True
        try:
            with mock.patch.object(Tensor, "to", moved):
                yield
        finally:
            self._moves = False

    def hold(self, *modules: torch.nn.Module) -> None:
        """Count the parameters and buffers of modules that were made before; shards are on the host if things move."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers(), *scales_of(module)):
                self._note(local(tensor), of_host=self._moves and local(tensor) is not tensor)

    def reset_peak(self) -> None:
        """Let the peaks be what is alive."""
        self.peak, self.host_peak = self.live, self.host_live

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = numbers.results_of(operation, args, kwargs) if self._knows else NotImplemented
        if results is NotImplemented and (self._knows or self._chosen is not None):
            results = self._answer(operation, args)
        leaves = self._moves and operation.overloadpacket is aten._to_copy and kwargs.get("device") == CPU
        if results is NotImplemented and leaves and args[0].is_meta:
            results = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
        elif results is NotImplemented:
            results = None if operation in FUSED else operation(*args, **kwargs)
        inputs, outputs = self._there((args, kwargs)), self._there(results)
        of_host = self._moves and bool(inputs) and (leaves or all(map(self._is_of_host, inputs)))
        for tensor in outputs:
            self._note(tensor, of_host=of_host)
        if (inputs or outputs) and not operation.is_view and operation not in FREE:
            if of_host:
                self.seconds += sum(tensor.nbytes for tensor in (*inputs, *outputs)) / (LINK if leaves else HOST)
            else:
                self._cost(operation, args, kwargs, results, inputs, outputs)
        return results

    def _there(self, values: Any) -> list[Tensor]:
        return [tensor for tensor in _tensors(values) if tensor.device.type == self.place]

    def _is_of_host(self, tensor: Tensor) -> bool:
        return local(tensor).untyped_storage()._cdata in self._of_host

    def _answer(self, operation: Any, args: Any) -> Any:
        """The result of an operation whose shape or value depends on numbers; NotImplemented for others."""
        packet = operation.overloadpacket
        if not all(tensor.is_meta for tensor in _tensors(args)):
            return NotImplemented
        if packet is aten.masked_scatter_backward:
            return args[0].new_empty(args[2])
        if packet in INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1]):
            return self._indexed(packet, *args[:2])
        if self._chosen is None:
            return NotImplemented
        if packet is aten._local_scalar_dense:
            return self._holds if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if packet is aten.masked_select:
            return args[0].new_empty(self._count(args[1]))
        if packet is aten.nonzero:
            return args[0].new_empty((self._count(args[0]), args[0].ndim), dtype=torch.long)
        return NotImplemented

    def _indexed(self, packet: Any, table: Tensor, indices: Sequence[Tensor | None]) -> Any:
        """What a mask among `indices` chooses of a table, or the table that is written there."""
        if packet is not aten.index:
            return torch.empty_like(table) if packet is aten.index_put else table
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                places += [index.new_empty(self._count(index), dtype=torch.long) for _ in range(index.ndim)]
            else:
                places.append(index)
        return aten.index(table, places)

    def _count(self, mask: Tensor) -> int:
        """How many places of a mask are chosen; all by unknown numbers, such as of images that are not all zeros."""
        known, places = numbers.of(mask), mask.numel()
        return int(known.sum()) if known is not None else (self._chosen or {}).get(places, places)

    def _cost(
        self, operation: Any, args: Any, kwargs: Any, results: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        packet = operation.overloadpacket
        if str(packet).startswith(("aten.empty", "aten.new_empty", "aten._local_scalar")):
            return
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

    def _note(self, tensor: Tensor, *, of_host: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known and (not of_host or key in self._of_host):
            return
        if key not in self._known:
            self._known[key] = 0
            weakref.finalize(storage, self._freed, key)
        self._change(key, -self._known[key])
        if of_host:
            self._of_host.add(key)
        self._change(key, _rounded(storage.nbytes()))

    def _change(self, key: int, size: int) -> None:
        self._known[key] += size
        if key in self._of_host:
            self.host_live += size
            self.host_peak = max(self.host_peak, self.host_live)
        else:
            self.live += size
            self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> None:
        self._change(key, -self._known[key])
        del self._known[key]
        self._of_host.discard(key)


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
