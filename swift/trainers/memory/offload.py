"""Offload of the trainer's tensors: they leave their device while an engine uses it, and return bit for bit.

Memory moves, tensors do not: the bytes of each storage are copied to the host and the storage is emptied in place,
later it is filled again. Parameters stay the same objects on the same device, tied weights and views stay tied,
optimizer state stays keyed by its parameters, and the gradient hooks of DDP and DeepSpeed stay in place (assigning
`.data` across devices would drop them). This holds for FSDP2's shards and ZeRO's flat partitions too.

While a tensor is away nothing may read or write it; `copies` gives its bytes on the host instead. Host memory is
page-locked where there is an accelerator, which makes copies several times faster, and is used again the next time.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from swift.errors import ResourceError, is_out_of_memory

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Copies begin at multiples of so many bytes, so that they can be read as any type."""
PARTITIONS = (
    "single_partition_of_fp32_groups",  # ZeRO-1, ZeRO-2
    "fp32_partitioned_groups_flat",  # ZeRO-3
    "grad_partitions_flat_buffer",  # ZeRO-3
    "fp32_groups_flat",  # stage 0 in 16 bits
)
"""Where DeepSpeed's optimizers keep tensors that their inner optimizer does not list between two steps."""


class _Absent(NamedTuple):
    """A storage that is away, and its bytes on the host."""

    storage: torch.UntypedStorage
    host: Tensor


class Offloader:
    """The tensors of one owner; they leave together and come back together.

    Args:
        tensors: names the tensors that the owner has at this moment.
        device: what they are taken from; tensors elsewhere are left alone.
        keep: names tensors that stay even if the owner lists them.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        keep: Callable[[], Iterable[Tensor]] = lambda: (),
    ) -> None:
        self.device = device
        self._tensors = tensors
        self._keep = keep
        self._host = HostBuffer(device)
        self._absent: dict[int, _Absent] = {}

    @property
    def away(self) -> bool:
        """Whether anything is away."""
        return bool(self._absent)

    @torch.no_grad()
    def leave(self) -> None:
        """Copy to the host and release the device's memory; if the host has no room, nothing has left."""
        assert not self._absent, "already away"
        found = {key: storage for key, storage in self._own_storages() if storage.resizable()}
        aligned = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in found.values()]
        leaving = {}
        for (key, storage), place in zip(found.items(), self._host.take(sum(aligned)).split(aligned), strict=True):
            host = place[: storage.nbytes()]
            host.copy_(_bytes_of(storage), non_blocking=True)
            leaving[key] = _Absent(storage, host)
        _synchronize(self.device)
        self._absent = leaving
        for absent in leaving.values():
            absent.storage.resize_(0)

    @torch.no_grad()
    def come_back(self) -> None:
        """Take device memory again and fill it. If there is no room, a second call brings back what is still away."""
        filled = []
        try:
            for key, absent in self._absent.items():
                absent.storage.resize_(absent.host.numel())
                _bytes_of(absent.storage).copy_(absent.host, non_blocking=True)
                filled.append(key)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            missing = sum(absent.host.numel() for key, absent in self._absent.items() if key not in filled)
            raise ResourceError(
                f"memory: {self.device}: {missing >> 20} MiB of the trainer do not fit back beside the engine; use a "
                "higher --sleep_level, or lower --vllm_gpu_memory_utilization"
            ) from error
        finally:
            _synchronize(self.device)  # before a host copy may be overwritten
            for key in filled:
                del self._absent[key]

    def copies(self) -> dict[int, Tensor]:
        """The values of each tensor that is away: its id -> a tensor of equal type, shape and strides on the host.

        Tensor subclasses that wrap others (DTensor) are not among them. Valid until `come_back`.
        """
        found: dict[int, Tensor] = {}
        for tensor in self._tensors():
            absent = None if _wraps(tensor) else self._absent.get(tensor.untyped_storage()._cdata)
            if absent is not None:
                first = absent.host.storage_offset() // tensor.element_size() + tensor.storage_offset()
                view = torch.empty(0, dtype=tensor.dtype)
                found[id(tensor)] = view.set_(
                    absent.host.untyped_storage(), first, tensor.size(), tensor.stride()
                )  # fmt: skip
        return found

    def resident_bytes(self) -> int:
        """Bytes that the owner's tensors take on the device now."""
        return sum(storage.nbytes() for _, storage in self._own_storages())

    def _own_storages(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        kept = {key for key, _ in self._storages(self._keep())}
        return ((key, storage) for key, storage in self._storages(self._tensors()) if key not in kept)

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Each storage that has memory on the device, once, in order of the tensors."""
        seen: set[int] = set()
        for plain in (plain for tensor in tensors for plain in _unwrapped(tensor)):
            if plain.device.type != self.device.type or plain.layout != torch.strided:
                continue
            if self.device.index is not None and plain.device.index not in (None, self.device.index):
                continue
            storage = plain.untyped_storage()
            if storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                yield storage._cdata, storage


class HostBuffer:
    """One block of host memory that grows to the most bytes that were asked for.

    For a CUDA device it is locked as it is (`cudaHostRegister`): torch's own pinned memory is rounded up to powers of
    two. If the system refuses, copies go through ordinary memory, with a warning.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unlock: Callable[[], Any] = lambda: None

    def take(self, nbytes: int) -> Tensor:
        """Bytes [nbytes]; the same memory at every call, unless it has to grow."""
        if nbytes > self._memory.numel():
            self._unlock()
            self._memory = torch.empty(0, dtype=torch.uint8)  # released before more is taken
            try:
                self._memory = self._allocate(nbytes)
            except (RuntimeError, OSError, ValueError, OverflowError) as error:
                raise ResourceError(
                    f"memory: host: no room for {nbytes >> 20} MiB of the trainer; --offload_optimizer false, or "
                    "--offload_model false"
                ) from error
        return self._memory[:nbytes]

    def _allocate(self, nbytes: int) -> Tensor:
        if self._kind != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._kind != "cpu")
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)  # a fork would move the pages that the device writes to
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        runtime, portable = torch.cuda.cudart(), 1  # locked for every device of this process
        if failure := int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, portable)):
            logger.warning("offload: CUDA error %d: host memory cannot be locked, so moving is slower", failure)
            with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next kernel launch
                torch.zeros(1, device="cuda")
            return memory
        unlock = weakref.finalize(self, runtime.cudaHostUnregister, memory.data_ptr())
        unlock.atexit = False
        self._unlock = unlock
        return memory


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, their gradients and buffers; of ZeRO-3 the partitions too."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor
        yield from _tensors_in(
            [tensor.grad, *(getattr(tensor, name, None) for name in ("ds_tensor", "ds_secondary_tensor"))]
        )


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Everything an optimizer holds: state, what it updates (float32 masters, ZeRO's partitions), gradients.

    The model's parameters are among them unless the optimizer updates copies; a caller keeps them apart. `optimizer` is
    one of torch, also inside of accelerate's or DeepSpeed's; None has no tensors.
    """
    while optimizer is not None:
        yield from _tensors_in([group["params"] for group in getattr(optimizer, "param_groups", ())])
        for name in PARTITIONS:
            yield from _tensors_in(getattr(optimizer, name, None))
        yield from _tensors_in(getattr(optimizer, "state", None))
        optimizer = getattr(optimizer, "optimizer", None)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested containers, and their gradients."""
    if isinstance(value, Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors_in(entry)


def _wraps(tensor: Tensor) -> bool:
    """Whether the data are in tensors inside of it, as DTensor's are."""
    return hasattr(tensor, "__tensor_flatten__")


def _unwrapped(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data."""
    if not _wraps(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):
            yield from _unwrapped(part)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as bytes [nbytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
