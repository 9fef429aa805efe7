"""Buckets by a broadcast from the trainer to its engines, over gloo or NCCL.

The group is made of the trainer (rank 0) and the engines, apart from torch.distributed's default group on both sides: a
store on a free port and a bare process group object. It is made at the first update and again whenever the
engines are no longer the same processes. Several engines take part in one broadcast: each is served by a thread
of the trainer, and the last thread to arrive does what is to be done once.

    thread of engine 1 --announce--+
                                   +-- last one: broadcast --+-- wait for the receipt of one's own engine
    thread of engine 2 --announce--+

Every wait is bounded. A failure breaks the round for all of them, and the group with it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.packing import Entry, pack, staged, unpack

GroupBackend = Literal["gloo", "nccl"]
SOURCE = 0
"""The trainer's rank."""
POLL_S = 0.001
"""How often a NCCL collective is looked at; its own wait has no bound."""
ABORT_S = 10.0
"""How long NCCL may take to abort a group."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that says what torch does when a collective fails; 0 is nothing."""

Wait = Callable[[], object]
"""Waits for one engine's receipt; raises what went wrong there."""


class BroadcastGroup:
    """One side's membership.

    Args:
        store: where the members meet.
        rank: 0 is the trainer.
        size: number of members.
        backend: "gloo" for tensors in main memory, "nccl" for those on GPUs.
        device: of the tensors.
        timeout_s: bound on meeting and on each broadcast.
        host: address of this member's own end (gloo).

    Raises:
        SyncFailed: the others did not come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        backend: GroupBackend,
        device: torch.device,
        timeout_s: float,
        host: str,
    ) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self._backend = backend
        self._group: Any = None
        try:
            prefixed = dist.PrefixStore(f"swift-weights-{backend}", store)
            if backend == "gloo":
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = timedelta(seconds=timeout_s)
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                self._group = dist.ProcessGroupGloo(prefixed, rank, size, options)
            else:
                self._group = _nccl_group(prefixed, rank, size, timeout_s)
                self._connect(prefixed, rank, size)
        except (RuntimeError, ValueError, SyncFailed) as error:
            self.close()
            raise SyncFailed(f"weights: {backend} group of {size}: rank {rank}: {_first_line(error)}") from error

    def _connect(self, store: dist.Store, rank: int, size: int) -> None:
        """Make the communicator (NCCL), which has no bound of its own once it has begun.

        So the trainer begins when every engine has said that it begins; what then hangs is left to its thread.
        """
        if rank != SOURCE:
            store.set(f"joins/{rank}", "1")
        else:
            store.wait([f"joins/{one}" for one in range(size) if one != SOURCE], timedelta(seconds=self.timeout_s))
        group, failures = self._group, []

        def connect() -> None:
            try:
                with torch.cuda.device(self.device):
                    group.eager_connect_single_device(self.device)
            except Exception as error:  # raised below, in the thread that waits
                failures.append(error)

        if not _within(self.timeout_s, connect):
            raise SyncFailed(f"the others did not connect within {self.timeout_s:g} s")
        if failures:
            raise failures[0]

    def broadcast(self, flat: Tensor) -> None:
        """Send (trainer) or fill (engine) a tensor. After a failure the group is gone.

        Raises:
            SyncFailed: another member is gone, or time is over.
        """
        if self._group is None:
            raise SyncFailed(f"weights: {self._backend} broadcast: its group is gone")
        options = dist.BroadcastOptions()
        options.rootRank = SOURCE
        try:
            if self._backend == "gloo":
                self._group.broadcast([flat], options).wait()
            else:
                self._broadcast_nccl(flat, options)
        except RuntimeError as error:
            self.close()
            raise SyncFailed(f"weights: {self._backend} broadcast: {_first_line(error)}") from error
        except SyncFailed:
            self.close()
            raise

    def _broadcast_nccl(self, flat: Tensor, options: Any) -> None:
        """Waits with a bound, which neither NCCL nor a stream has."""
        with torch.cuda.device(self.device):
            self._group.broadcast([flat], options).wait()  # this stream waits, not this thread
            done = torch.cuda.Event()
            done.record()
            deadline = time.monotonic() + self.timeout_s
            while not done.query():
                if time.monotonic() > deadline:
                    raise SyncFailed(f"weights: nccl broadcast of {flat.numel()} bytes: {self.timeout_s:g} s passed")
                time.sleep(POLL_S)

    def close(self) -> None:
        """Leave; never waits for the others."""
        group, self._group = self._group, None
        if group is not None and self._backend == "nccl":
            _within(ABORT_S, group.abort)


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


def _within(limit_s: float, work: Callable[[], object]) -> bool:
    """Whether `work` ended in time; otherwise its thread is left behind, for there is no way to end it."""
    thread = threading.Thread(target=work, name="weights: nccl", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


class BroadcastSender:
    """The trainer's end.

    Args:
        receivers: engines that take part in every round.
        backend: see `BroadcastGroup`.
        device: of the trainer's tensors.
        timeout_s: bound on each wait.
        host: address under which the engines reach this process.
    """

    def __init__(
        self,
        receivers: int,
        *,
        backend: GroupBackend = "gloo",
        device: torch.device | None = None,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.backend: GroupBackend = backend
        self.device = device if device is not None else torch.device("cpu")
        self.timeout_s = timeout_s
        self.host = host
        self.receivers = receivers
        self._size = receivers + 1
        self._lock = threading.Lock()
        self._rounds = threading.Barrier(receivers, action=self._act)
        self._todo: Callable[[], None] = lambda: None
        self._here: dict[Hashable, Hashable] = {}
        self._members: dict[Hashable, Hashable] = {}
        self._store: dist.TCPStore | None = None
        self._group: BroadcastGroup | None = None
        self._why = ""

    def connect(self, member: Hashable, incarnation: Hashable, invite: Callable[[dict[str, Any]], Wait]) -> None:
        """Make sure that this engine is in the group; called by the thread of every engine before an update.

        Args:
            member: which engine.
            incarnation: changes when the engine is another process than before.
            invite: tells the engine how to join (JSON-safe) and returns at once.

        Raises:
            SyncFailed: the group could not be made.
        """
        with self._lock:
            if self._rounds.broken:
                self._forget()
                self._rounds.reset()
            self._here[member] = incarnation
        self._meet(self._prepare)
        if self._group is not None:
            return
        receipt = invite(self._invitation(member))
        self._meet(self._found)
        receipt()

    def transmit(self, bucket: Bucket, announce: Callable[[dict[str, Any]], Wait]) -> Any:
        """Send a bucket; called by the thread of every engine.

        Args:
            bucket: the same in all threads.
            announce: tells the engine what comes (JSON-safe) and returns at once.

        Returns:
            what the engine's receipt says.

        Raises:
            SyncFailed: it did not arrive at one of the engines.
        """
        flat, entries = staged(bucket, "broadcast", lambda: pack(bucket, self.device))
        receipt = announce({"entries": [list(entry) for entry in entries], "size": flat.numel()})
        self._meet(lambda: self._broadcast(flat))
        return receipt()

    def fail(self, why: str) -> None:
        """An engine cannot take part: nobody waits for it any longer."""
        with self._lock:
            self._why = self._why or why
        self._rounds.abort()

    def close(self) -> None:
        """End the group."""
        with self._lock:
            self._forget()

    def _meet(self, todo: Callable[[], None]) -> None:
        self._todo = todo  # the same in every thread of a round
        try:
            self._rounds.wait(3 * self.timeout_s)
        except threading.BrokenBarrierError as error:
            why = self._why or "another engine did not come"
            raise SyncFailed(f"weights: {self.backend} broadcast: {why}") from error

    def _act(self) -> None:
        try:
            self._todo()
        except SyncFailed as error:
            self._why = self._why or error.problems[0]
            raise

    def _prepare(self) -> None:
        """Keep the group if its members are those that are here, else make a place to meet."""
        here, self._here = self._here, {}
        if self._group is not None and here == self._members:
            return
        self._forget()
        self._members = here
        self._store = _store(self.host, self._size, self.timeout_s)

    def _invitation(self, member: Hashable) -> dict[str, Any]:
        assert self._store is not None
        return {
            "host": self.host,
            "port": self._store.port,
            "rank": 1 + sorted(self._members, key=repr).index(member),
            "size": self._size,
            "backend": self.backend,
            "timeout_s": self.timeout_s,
        }

    def _found(self) -> None:
        assert self._store is not None
        self._group = BroadcastGroup(
            self._store,
            SOURCE,
            self._size,
            backend=self.backend,
            device=self.device,
            timeout_s=self.timeout_s,
            host=self.host,
        )

    def _broadcast(self, flat: Tensor) -> None:
        if self._group is None:
            raise SyncFailed(f"weights: {self.backend} broadcast: its group is gone")
        self._group.broadcast(flat)

    def _forget(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._store, self._members, self._here, self._why = None, None, {}, {}, ""


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


class BroadcastReceiver:
    """An engine's end.

    Args:
        invitation: as `BroadcastSender` makes it.
        device: that tensors arrive on.

    Raises:
        SyncFailed: the trainer cannot be reached.
    """

    def __init__(self, invitation: dict[str, Any], device: torch.device) -> None:
        timeout_s = float(invitation["timeout_s"])
        try:
            store = dist.TCPStore(
                invitation["host"],
                int(invitation["port"]),
                int(invitation["size"]),
                False,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise SyncFailed(
                f"weights: store at {invitation['host']}:{invitation['port']}: {_first_line(error)}"
            ) from error
        self._group = BroadcastGroup(
            store,
            int(invitation["rank"]),
            int(invitation["size"]),
            backend=invitation["backend"],
            device=device,
            timeout_s=timeout_s,
            host=invitation["host"],
        )
        self.device = device

    def receive(self, header: dict[str, Any]) -> list[tuple[str, Tensor]]:
        """Take part in one broadcast; the tensors are views of one buffer."""
        entries: list[Entry] = [(name, dtype, tuple(shape), at) for name, dtype, shape, at in header["entries"]]
        flat = torch.empty(int(header["size"]), dtype=torch.uint8, device=self.device)
        self._group.broadcast(flat)
        return unpack(flat, entries)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
