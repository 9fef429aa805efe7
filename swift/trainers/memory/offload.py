"""Tensors of the trainer that leave their device while an engine uses it, and come back bit for bit.

What moves is memory, not tensors: the bytes of each storage are copied to the host and the storage is emptied in place,
later it is filled again. So nobody who holds a tensor notices: parameters stay the same objects on the same
device, tied weights and views stay tied, an optimizer's state stays keyed by its parameters, and the hooks by which
DDP and DeepSpeed gather gradients stay in place (assigning `.data` across devices would drop them). The same holds for
what is spread over ranks: FSDP2's shards, ZeRO's flat partitions.

While a tensor is away nothing may read or write it; `copies` gives its bytes on the host instead.

    on device --leave--> away --come_back--> on device       (come_back after half a leave brings back that half)

Host memory is page-locked where there is an accelerator, which makes the copies several times faster, and is kept for
the next time. It takes what the moved tensors take: it is laid out for all of them together (`arrange`), and locked as
it is, since torch's own page-locked memory would be rounded up to powers of two.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swift.errors import ResourceError

logger = logging.getLogger(__name__)

SLAB_BYTES = 4 << 30
"""Host memory is taken in slabs of at most this size, or of one larger tensor."""
PORTABLE = 1
"""`cudaHostRegisterPortable`: locked for every device of this process."""
ALIGNMENT = 64
"""Copies begin at multiples of so many bytes, so that they can be read as any type."""
PARTITIONS = (
    "single_partition_of_fp32_groups",  # ZeRO-1, ZeRO-2
    "fp32_partitioned_groups_flat",  # ZeRO-3
    "grad_partitions_flat_buffer",  # ZeRO-3
    "fp32_groups_flat",  # stage 0 in 16 bits
)
"""Where DeepSpeed's optimizers keep tensors that their inner optimizer does not list between two steps."""
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_cpu")


@dataclass(slots=True)
class _Absent:
    """A storage that is away: where it belongs, and its bytes on the host."""

    storage: torch.UntypedStorage
    nbytes: int
    host: Tensor


class Offloader:
    """The tensors of one owner; they leave together and come back together.

    Args:
        tensors: names the tensors that the owner has at this moment.
        device: what they are taken from; tensors elsewhere are left alone.
        keep: names tensors that stay, whoever lists them too.
        pin: page-locked host memory; None means where `device` is an accelerator.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        keep: Callable[[], Iterable[Tensor]] = lambda: (),
        pin: bool | None = None,
    ) -> None:
        self.device = device
        self._tensors = tensors
        self._keep = keep
        self._slabs = HostSlabs(pin=device.type != "cpu" if pin is None else pin)
        self._absent: dict[int, _Absent] = {}

    @property
    def away(self) -> bool:
        """Whether anything is away."""
        return bool(self._absent)

    @torch.no_grad()
    def leave(self) -> int:
        """Copy to the host and release the device's memory; returns the bytes that left.

        Raises:
            ResourceError: the host has no room; `come_back` undoes what was done so far.
        """
        assert not self._absent, "already away"
        kept = {key for key, _ in self._storages(self._keep())}
        found = [(k, one) for k, one in self._storages(self._tensors()) if k not in kept and one.resizable()]
        places = self._slabs.take([storage.nbytes() for _, storage in found])
        leaving: list[tuple[int, _Absent]] = []
        for (key, storage), host in zip(found, places, strict=True):
            host.copy_(_bytes_of(storage), non_blocking=True)
            leaving.append((key, _Absent(storage, storage.nbytes(), host)))
        _synchronize(self.device)
        for key, one in leaving:
            self._absent[key] = one
            one.storage.resize_(0)
        return sum(one.nbytes for _, one in leaving)

    @torch.no_grad()
    def come_back(self) -> int:
        """Take device memory again and fill it; returns the bytes that came. Nothing to do is fine.

        Raises:
            ResourceError: the device has no room; what is still away can be asked back again.
        """
        total = 0
        filled = []
        try:
            for key, one in self._absent.items():
                one.storage.resize_(one.nbytes)
                _bytes_of(one.storage).copy_(one.host, non_blocking=True)
                filled.append(key)
                total += one.nbytes
        except RuntimeError as error:
            if not ran_out(error):
                raise
            missing = sum(one.nbytes for key, one in self._absent.items() if key not in filled)
            raise ResourceError(
                f"memory: {self.device}: {missing >> 20} MiB of the trainer do not fit back beside the engine; use a "
                "higher --sleep_level, or lower --vllm_gpu_memory_utilization"
            ) from error
        finally:
            _synchronize(self.device)  # before a host copy may be overwritten
            for key in filled:
                del self._absent[key]
        return total

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
                view.set_(absent.host.untyped_storage(), first, tensor.size(), tensor.stride())
                found[id(tensor)] = view
        return found

    def resident_bytes(self) -> int:
        """Bytes that the owner's tensors take on the device now."""
        kept = {key for key, _ in self._storages(self._keep())}
        return sum(storage.nbytes() for key, storage in self._storages(self._tensors()) if key not in kept)

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Each storage once that has memory on the device, in order of the tensors, under a key of its own."""
        seen: set[int] = set()
        for tensor in tensors:
            for plain in _unwrapped(tensor):
                if plain.device.type != self.device.type or plain.layout != torch.strided:
                    continue
                if self.device.index is not None and plain.device.index not in (None, self.device.index):
                    continue
                storage = plain.untyped_storage()
                if storage._cdata not in seen and storage.nbytes():
                    seen.add(storage._cdata)
                    yield storage._cdata, storage


def arrange(
    sizes: Sequence[int], slabs: Sequence[int], *, slab_bytes: int = SLAB_BYTES
) -> tuple[list[tuple[int, int]], list[int]]:
    """Where tensors lie in host memory: the largest first, each in the first slab with room, the rest in new slabs.

    Args:
        sizes: bytes of the tensors.
        slabs: bytes of the slabs that are there.
        slab_bytes: most bytes of a new slab that holds more than one tensor.

    Returns:
        for each tensor (slab, first byte), and the sizes of the new slabs, which follow those that are there. New ones
        have no byte more than the tensors in them, up to alignment, so the same tensors find the same places again.

    Example:
        >>> arrange([64, 128, 64], [128])
        ([(1, 0), (0, 0), (1, 64)], [128])
    """
    used = [0] * len(slabs)
    new: list[int] = []
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        nbytes = -(-sizes[index] // ALIGNMENT) * ALIGNMENT
        slab = next((one for one, size in enumerate(slabs) if used[one] + nbytes <= size), None)
        if slab is not None:
            places[index] = slab, used[slab]
            used[slab] += nbytes
            continue
        if not new or new[-1] + nbytes > slab_bytes:
            new.append(0)
        places[index] = len(slabs) + len(new) - 1, new[-1]
        new[-1] += nbytes
    return places, new


class HostSlabs:
    """Host memory that is given out anew at every `take`, and grows when it does not suffice.

    Args:
        pin: page-locked; where the system refuses, ordinary memory is taken and a warning says so.
    """

    def __init__(self, *, pin: bool) -> None:
        self.pin = pin
        self._slabs: list[Tensor] = []
        self._locked: list[Tensor] = []  # those of them that we locked: to be unlocked before their memory is freed
        weakref.finalize(self, _unlock, self._locked).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(slab.numel() for slab in self._slabs)

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Consecutive bytes [n], aligned, for each of the sizes; what was given out before is given out again.

        Raises:
            ResourceError: the host has no room.
        """
        places, new = arrange(sizes, [slab.numel() for slab in self._slabs], slab_bytes=SLAB_BYTES)
        for nbytes in new:
            self._slabs.append(self._new(nbytes))
        return [self._slabs[slab][start : start + n] for (slab, start), n in zip(places, sizes, strict=True)]

    def _new(self, nbytes: int) -> Tensor:
        try:
            return self._new_locked(nbytes) if self.pin else torch.empty(nbytes, dtype=torch.uint8)
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            raise ResourceError(
                f"memory: host: no room for {nbytes >> 20} MiB of the trainer; --offload_optimizer false, or "
                "--offload_model false"
            ) from error

    def _new_locked(self, nbytes: int) -> Tensor:
        """Page-locked memory of this very size; torch's own, which is rounded up, where ours cannot be locked."""
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # pages that nobody shares
        memory.madvise(mmap.MADV_DONTFORK)  # nor a child, whose birth would move what the device writes to
        pages = torch.frombuffer(memory, dtype=torch.uint8)
        if _lock(pages):
            self._locked.append(pages)
            return pages
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self.pin = False
            logger.warning("offload: %s; moving through ordinary host memory, which is slower", error)
            return pages


def _lock(memory: Tensor) -> bool:
    """Page-lock memory that is there already; whether that was possible."""
    if not torch.cuda.is_available():
        return False
    failure = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE)
    if int(failure) == 0:
        return True
    _forget_error()
    return False


def _forget_error() -> None:
    """CUDA reports a failed call once more, to whoever starts the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unlock(locked: Sequence[Tensor]) -> None:
    for memory in locked:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, their gradients and buffers; of ZeRO-3 the partitions too."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
        for name in ("ds_tensor", "ds_secondary_tensor"):
            partition = getattr(tensor, name, None)
            if isinstance(partition, Tensor):
                yield partition


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Everything an optimizer holds: state, what it updates (float32 masters, ZeRO's partitions), gradients.

    The model's parameters are among them unless the optimizer updates copies; a caller keeps them apart.

    Args:
        optimizer: of torch, also inside of accelerate's or DeepSpeed's; None has no tensors.
    """
    while optimizer is not None:
        yield from _tensors_in([group["params"] for group in getattr(optimizer, "param_groups", ())])
        for name in PARTITIONS:
            yield from _tensors_in(getattr(optimizer, name, None))
        state = getattr(optimizer, "state", None)
        if isinstance(state, Mapping):
            yield from _tensors_in(list(state.values()))
        optimizer = getattr(optimizer, "optimizer", None)


def ran_out(error: BaseException) -> bool:
    """Whether an error of torch or of an engine says that memory did not suffice."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in text for words in OUT_OF_MEMORY)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested containers, and their gradients."""
    if isinstance(value, Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)


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
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
