"""Buckets by a broadcast from the trainer to its engines, over gloo or NCCL.

The group is made of the trainer (rank 0) and the engines, apart from torch.distributed's default group on both sides: a
store on a free port and a bare process group object. It is made at the first update and again whenever the
engines are no longer the same processes. Every wait is bounded. A failure ends the group.

A bucket travels as one run of bytes and a JSON-safe table of contents: no type is converted on the way. Tensors that
are the same memory (a tied head beside its embedding) lie in the run once.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from swift.errors import SyncFailed, first_line
from swift.rollout.engines.process import on_thread
from swift.rollout.weights.base import Bucket, TensorInfo, Wait, memory_of, torch_dtype

GroupBackend = Literal["gloo", "nccl"]
SOURCE = 0
"""The trainer's rank."""
POLL_S = 0.001
"""How often a NCCL collective is looked at; its own wait has no bound."""
ABORT_S = 10.0
"""How long NCCL may take to abort a group."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that says what torch does when a collective fails; 0 is nothing."""

ALIGNMENT = 64
"""Bytes; a multiple of every element size, and of a cache line."""

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, torch dtype name, shape, offset in bytes."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """How a member joins: where they meet, and what bounds each wait. Rank 0 is the trainer.

    backend: "gloo" for tensors in main memory, "nccl" for those on GPUs. host: address of the trainer as the engines
    reach it.
    """

    host: str
    port: int
    rank: int
    size: int
    backend: GroupBackend
    timeout_s: float


class BroadcastGroup:
    """One side's membership. Raises SyncFailed: the others did not come."""

    def __init__(self, store: dist.Store, invitation: Invitation, device: torch.device) -> None:
        rank, size, backend = invitation.rank, invitation.size, invitation.backend
        self.device, self.timeout_s, self._backend = device, invitation.timeout_s, backend
        self._group: Any = None
        try:
            prefixed = dist.PrefixStore(f"swift-weights-{backend}", store)
            if backend == "gloo":
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = timedelta(seconds=self.timeout_s)
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=invitation.host)]
                self._group = dist.ProcessGroupGloo(prefixed, rank, size, options)
            else:
                self._group = _nccl_group(prefixed, rank, size, self.timeout_s)
                self._connect(prefixed, rank, size)
        except (RuntimeError, ValueError, SyncFailed) as error:
            self.close()
            raise SyncFailed(f"weights: {backend} group of {size}: rank {rank}: {first_line(error)}") from error

    def _connect(self, store: dist.Store, rank: int, size: int) -> None:
        """Make the communicator (NCCL), which has no bound of its own once it has begun.

        So the trainer begins when every engine has said that it begins; what then hangs is left to its thread.
        """
        if rank != SOURCE:
            store.set(f"joins/{rank}", "1")
        else:
            store.wait([f"joins/{one}" for one in range(size) if one != SOURCE], timedelta(seconds=self.timeout_s))

        def connect() -> None:
            with torch.cuda.device(self.device):
                self._group.eager_connect_single_device(self.device)

        try:
            on_thread(connect, "weights: nccl").result(self.timeout_s)
        except TimeoutError:
            raise SyncFailed(f"the others did not connect within {self.timeout_s:g} s") from None

    def broadcast(self, flat: Tensor) -> None:
        """Send (trainer) or fill (engine) a tensor. After a failure the group is gone.

        Raises SyncFailed: another member is gone, or time is over.
        """
        what = f"weights: {self._backend} broadcast"
        if self._group is None:
            raise SyncFailed(f"{what}: its group is gone")
        options = dist.BroadcastOptions()
        options.rootRank = SOURCE
        try:
            if self._backend == "gloo":
                self._group.broadcast([flat], options).wait()
            else:
                self._broadcast_nccl(flat, options)
        except (RuntimeError, SyncFailed) as error:
            self.close()
            raise SyncFailed(f"{what}: {first_line(error)}") from error

    def _broadcast_nccl(self, flat: Tensor, options: Any) -> None:
        """Waits with a bound, which neither NCCL nor a stream has."""
        with torch.cuda.device(self.device):
            self._group.broadcast([flat], options).wait()  # this stream waits, not this thread
            done = torch.cuda.Event()
            done.record()
            deadline = time.monotonic() + self.timeout_s
            while not done.query():
                if time.monotonic() > deadline:
                    raise SyncFailed(f"{flat.numel()} bytes: {self.timeout_s:g} s passed")
                time.sleep(POLL_S)

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def close(self) -> None:
        """Leave; never waits for the others."""
        group, self._group = self._group, None
        if group is not None and self._backend == "nccl":
            futures.wait([on_thread(group.abort, "weights: nccl")], ABORT_S)


def _nccl_group(store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    """A group that leaves it to us what a failure means.

    By default torch ends the whole process when a collective of it fails or takes longer than the group's time-out: a
    dead engine would take the trainer with it. The variable is read once, by the constructor.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout_s + 60)
    former = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if former is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = former


class BroadcastSender:
    """The trainer's end.

    Args:
        backend: see `BroadcastGroup`.
        device: of the trainer's tensors.
        timeout_s: bound on each wait.
        host: address under which the engines reach this process.
    """

    def __init__(
        self, *, timeout_s: float, backend: GroupBackend = "gloo", device: str = "cpu", host: str = "127.0.0.1"
    ) -> None:
        self.backend, self.device, self.timeout_s, self.host = backend, torch.device(device), timeout_s, host
        self.members: dict[str, object] = {}
        self._store: dist.TCPStore | None = None
        self._group: BroadcastGroup | None = None

    def connect(self, members: Mapping[str, object], invite: Callable[[str, dict[str, Any]], Wait]) -> None:
        """Make sure that these engines, and no others, are in the group. Raises SyncFailed: it could not be made.

        members: by name; the value is another one when the engine is another process than before. invite: tells an
        engine how to join (JSON-safe) and returns at once.
        """
        if self._group is not None and self._group.is_open and self.members == members:
            return
        self.close()
        size = len(members) + 1
        self._store = _store(self.host, size, self.timeout_s)
        mine = Invitation(self.host, self._store.port, SOURCE, size, self.backend, self.timeout_s)
        waits = [invite(name, asdict(replace(mine, rank=rank))) for rank, name in enumerate(members, SOURCE + 1)]
        self._group = BroadcastGroup(self._store, mine, self.device)
        for wait in waits:
            wait()
        self.members = dict(members)

    def transmit(self, bucket: Bucket, announce: Callable[[dict[str, Any]], Wait]) -> Wait:
        """Send a bucket to one engine of the group; whoever waits first sends it to all that it was announced to.

        announce: tells the engine what comes (JSON-safe) and returns at once. Returns what waits until the engine has
        it.
        """
        if (group := self._group) is None:
            raise SyncFailed(f"weights: {self.backend} broadcast: its group is gone")
        flat, entries = bucket.once("broadcast", lambda: pack(bucket, self.device))
        arrived = announce({"entries": [list(entry) for entry in entries], "size": flat.numel()})

        def wait() -> object:
            bucket.once("broadcast was sent", lambda: group.broadcast(flat))
            return arrived()

        return wait

    def close(self) -> None:
        """End the group: an engine that waits in it fails."""
        if self._group is not None:
            self._group.close()
        self._group, self._store, self.members = None, None, {}


def _store(host: str, size: int, timeout_s: float) -> dist.TCPStore:
    """A place to meet that listens at this address alone; torch's own socket would listen at all of them."""
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        size,
        True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class BroadcastReceiver(BroadcastGroup):
    """An engine's end. Raises SyncFailed: the trainer cannot be reached."""

    def __init__(self, mine: Invitation, device: torch.device) -> None:
        try:
            store = dist.TCPStore(mine.host, mine.port, mine.size, False, timeout=timedelta(seconds=mine.timeout_s))
        except RuntimeError as error:
            raise SyncFailed(f"weights: store at {mine.host}:{mine.port}: {first_line(error)}") from error
        super().__init__(store, mine, device)

    def receive(self, header: dict[str, Any]) -> list[tuple[str, Tensor]]:
        flat = torch.empty(int(header["size"]), dtype=torch.uint8, device=self.device)
        self.broadcast(flat)
        return unpack(flat, header["entries"])


@torch.no_grad()
def pack(bucket: Bucket, device: torch.device | str | None = None) -> tuple[Tensor, list[Entry]]:
    """The bucket as one new uint8 tensor, on the device of its tensors unless another is given."""
    entries: list[Entry] = []
    first: dict[tuple[Any, ...], tuple[int, Tensor]] = {}
    end = 0
    for name, tensor in bucket.tensors:
        info, memory = TensorInfo.of(name, tensor), memory_of(name, tensor)
        if memory not in first:
            first[memory] = end, tensor
            end = -(-(end + info.nbytes) // ALIGNMENT) * ALIGNMENT
        entries.append((name, info.dtype, info.shape, first[memory][0]))
    where = device if device is not None else bucket.tensors[0][1].device if bucket.tensors else "cpu"
    flat = torch.zeros(end, dtype=torch.uint8, device=where)
    for offset, tensor in first.values():
        _view(flat, TensorInfo.of("", tensor), offset).copy_(tensor.detach())
    return flat, entries


def unpack(flat: Tensor, entries: Sequence[Sequence[Any]]) -> list[tuple[str, Tensor]]:
    """The tensors as views of the run. Raises SyncFailed: the table of contents does not fit the run."""
    infos = [(TensorInfo(name, dtype, tuple(shape)), offset) for name, dtype, shape, offset in entries]
    return [(info.name, _view(flat, info, offset)) for info, offset in infos]


def _view(flat: Tensor, info: TensorInfo, offset: int) -> Tensor:
    end = offset + info.nbytes
    if offset < 0 or end > flat.numel():
        raise SyncFailed(f"weights: {info.name}: lies at {offset}..{end} of a bucket of {flat.numel()} bytes")
    return flat[offset:end].view(torch_dtype(info.dtype)).view(info.shape)
