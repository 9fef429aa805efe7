"""Buckets by a broadcast from the trainer to its engines, over gloo or NCCL.

The group is made of the trainer (rank 0) and the engines, each process of a tensor-parallel engine on its own, apart
from torch.distributed's default group on both sides: a store on a free port and a bare process group object. It is made
at the first update and again whenever the engines are no longer the same processes. Every wait is bounded. A failure
ends the group.

A bucket travels as one run of bytes and a JSON-safe table of contents: no type is converted on the way. Tensors that
are the same memory (a tied head beside its embedding) lie in the run once.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from swift.errors import SyncFailed, first_line
from swift.rollout.engines.process import on_thread
from swift.rollout.weights.base import Bucket, TensorInfo, memory_of, torch_dtype

GroupBackend = Literal["gloo", "nccl"]
SOURCE = 0
"""The trainer's rank."""
POLL_S = 0.001
"""How often a NCCL collective is looked at; its own wait has no bound."""
ABORT_S = 10.0
"""How long NCCL may take to abort a group."""
JOIN_S = 120.0
"""How long a group may take to be made: each member joins as soon as it is invited."""
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
        self._join_s = min(self.timeout_s, JOIN_S)
        self._group: Any = None
        try:
            prefixed = dist.PrefixStore(f"swift-weights-{backend}", store)
            if backend == "gloo":
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = timedelta(seconds=self._join_s)
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(invitation))]
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
            store.wait([f"joins/{one}" for one in range(size) if one != SOURCE], timedelta(seconds=self._join_s))

        def connect() -> None:
            with torch.cuda.device(self.device):
                self._group.eager_connect_single_device(self.device)

        try:
            on_thread(connect, "weights: nccl").result(self._join_s)
        except TimeoutError:
            raise SyncFailed(f"the others did not connect within {self._join_s:g} s") from None

    def broadcast(self, flat: Tensor) -> None:
        """Send (trainer) or fill (engine) a tensor. After a failure the group is gone.

        Raises SyncFailed: another member is gone, or time is over.
        """
        what = f"weights: {self._backend} broadcast"
        if self._group is None:
            raise SyncFailed(f"{what}: its group is gone")
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = SOURCE, timedelta(seconds=self.timeout_s)
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

    def close(self) -> None:
        """Leave. A broadcast under way is aborted with NCCL (bounded); gloo waits for it."""
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
    """The trainer's end: one thread for each engine calls `announce` and `send` for each bucket.

    Args:
        members: number of receivers of each engine by its name; each is a rank of the group.
        backend: see `BroadcastGroup`.
        device: of the trainer's tensors.
        timeout_s: bound on each wait.
        host: address under which the engines reach this process.
    """

    def __init__(
        self,
        members: Mapping[str, int],
        *,
        timeout_s: float,
        backend: GroupBackend = "gloo",
        device: str = "cpu",
        host: str = "127.0.0.1",
    ) -> None:
        self.backend, self.device, self.timeout_s = backend, torch.device(device), timeout_s
        ends = list(itertools.accumulate(members.values(), initial=SOURCE + 1))
        self._first_rank = dict(zip(members, ends, strict=False))
        self._store = _store(host, ends[-1], timeout_s)
        self._own = Invitation(host, self._store.port, SOURCE, ends[-1], backend, timeout_s)
        self._group: BroadcastGroup | None = None
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._all_announced = threading.Barrier(len(members), timeout=timeout_s)
        self._sending: Future[None] = Future()  # of the last bucket
        self._sending.set_result(None)
        self._failing = threading.Lock()
        self._failed: Future[Any] = Future()
        self._failure = ""

    @property
    def is_open(self) -> bool:
        return not self._failure

    def announce(self, member: str, bucket: Bucket) -> dict[str, Any]:
        """The message to an engine before `send` (JSON-safe); the first one invites it into the group."""
        self._check_open()
        self._flat, entries = bucket.once("broadcast", lambda: pack(bucket, self.device))
        header: dict[str, Any] = {"entries": [list(entry) for entry in entries], "size": self._flat.numel()}
        if self._group is None:
            header["invitation"] = asdict(replace(self._own, rank=self._first_rank[member]))
        return header

    def send(self, arrived: Callable[[], object]) -> None:
        """Have the bucket sent once every engine has its announcement, and wait until this engine has the bucket.

        Args:
            arrived: waits until the engine has it; a failure there ends the broadcast for all.

        Raises:
            SyncFailed: the broadcast failed, or what `arrived` raises.
        """
        arriving: Future[Any] = on_thread(arrived, "weights: broadcast arrives")
        arriving.add_done_callback(self._check_arrival)
        try:
            if self._all_announced.wait() == 0:
                flat, self._flat = self._flat, torch.empty(0, dtype=torch.uint8)
                self._sending = on_thread(partial(self._broadcast, flat, self._sending), "weights: broadcast")
        except threading.BrokenBarrierError:
            self.fail("another engine was not told in time")
        futures.wait([arriving, self._failed], return_when=futures.FIRST_COMPLETED)
        if arriving.done():
            arriving.result()
        self._check_open()

    def _check_arrival(self, arriving: Future[Any]) -> None:
        if (error := arriving.exception()) is not None:
            self.fail(first_line(error))

    def _broadcast(self, flat: Tensor, former: Future[None]) -> None:
        """Send to all engines, after the former bucket."""
        try:
            former.result()
            group = self._group or BroadcastGroup(self._store, self._own, self.device)
            with self._failing:
                if not self._failure:
                    self._group = group
            if self._failure:  # it came while the others joined
                group.close()
            else:
                group.broadcast(flat)
        except Exception as error:  # every thread that sends raises it
            self.fail(first_line(error))

    def _check_open(self) -> None:
        if self._failure:
            raise SyncFailed(f"weights: {self.backend} broadcast: {self._failure}")

    def fail(self, why: str) -> None:
        """End the group: engines that wait in it fail, and so does every thread that sends. Idempotent, never waits."""
        with self._failing:
            self._failure = self._failure or why
            group, self._group = self._group, None
            if not self._failed.done():
                self._failed.set_result(None)
        self._all_announced.abort()
        if group is not None:
            on_thread(group.close, "weights: end of a group")  # gloo waits for what is under way

    def close(self) -> None:
        self.fail("it is closed")


def _own_address(invitation: Invitation) -> str:
    """The address of this host on the way to the trainer, where the others reach it."""
    if invitation.rank == SOURCE:
        return invitation.host
    with socket.create_connection((invitation.host, invitation.port), timeout=JOIN_S) as connection:
        return str(connection.getsockname()[0])


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


@dataclass(slots=True)
class Announcement(Bucket):
    """A bucket that its receiver takes out of a broadcast. header: see `BroadcastSender.announce`."""

    header: dict[str, Any] = field(default_factory=dict)

    @property
    def infos(self) -> list[TensorInfo]:
        return [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape, _ in self.header["entries"]]

    def for_rank(self, offset: int) -> Announcement:
        """The same for a receiver that comes so many ranks after the first one that is invited."""
        if "invitation" not in self.header:
            return self
        invitation = self.header["invitation"]
        header = {**self.header, "invitation": {**invitation, "rank": invitation["rank"] + offset}}
        return Announcement([], header=header)


class BroadcastReceiver:
    """An engine's end; joins a group whenever it is invited to one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._group: BroadcastGroup | None = None

    def receive(self, announced: Announcement) -> Bucket:
        """Take part in the broadcast. Raises SyncFailed: the trainer cannot be reached, or does not send."""
        header = announced.header
        if "invitation" in header:
            self.close()
            self._group = _join(Invitation(**header["invitation"]), self.device)
        if self._group is None:
            raise SyncFailed("weights: a broadcast without a group; the first one of an update invites to it")
        flat = torch.empty(int(header["size"]), dtype=torch.uint8, device=self.device)
        self._group.broadcast(flat)
        return Bucket(unpack(flat, header["entries"]))

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


def _join(mine: Invitation, device: torch.device) -> BroadcastGroup:
    join = timedelta(seconds=min(mine.timeout_s, JOIN_S))
    try:
        store = dist.TCPStore(mine.host, mine.port, mine.size, False, timeout=join)
    except RuntimeError as error:
        raise SyncFailed(f"weights: store at {mine.host}:{mine.port}: {first_line(error)}") from error
    return BroadcastGroup(store, mine, device)


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
