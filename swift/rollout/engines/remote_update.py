"""One full update on its way to a server: over HTTP, as files on a disk that both sides see, or as a broadcast.

Whatever goes wrong is a `SyncFailed`; the weights there are void from the first bucket until the commit. What was sent
is kept, so that a server that was restarted can be given it again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit

from swift.errors import EngineError, SyncFailed
from swift.rollout.engines.base import Ack, TensorInfo, WeightUpdate
from swift.rollout.engines.remote_replies import Failed, Lost
from swift.rollout.weight_sync import disk
from swift.rollout.weight_sync.base import Bucket
from swift.rollout.weight_sync.broadcast import BroadcastSender
from swift.rollout.weight_sync.packing import staged

if TYPE_CHECKING:
    from swift.rollout.engines.remote import RemoteEngine

RemoteTransport = Literal["http", "disk", "broadcast"]


@dataclass(slots=True)
class Kept:
    """The last full update, and what it takes to send it again: a call per bucket, with the update."""

    version: int
    manifest: tuple[TensorInfo, ...]
    digest: str
    parts: list[Callable[[int], None]] = field(default_factory=list)


class RemoteUpdate(WeightUpdate):
    """One update on its way to a server.

    Args:
        owner: the engine.
        manifest: every tensor that will come.
        version: of the policy.
    """

    def __init__(self, owner: RemoteEngine, manifest: Sequence[TensorInfo], version: int) -> None:
        super().__init__(owner.name, manifest, version)
        self._owner = owner
        self._number = 0
        self._way: RemoteTransport = owner.transport or ("disk" if owner.weights_folder is not None else "http")
        self._buckets = 0
        self._parts: list[Callable[[int], None]] = []
        self._writer: disk.VersionWriter | None = None
        self._asleep = ""
        self._open = True

    def begin(self) -> None:
        """Announce it."""
        self._number = self._owner.begin_there(self.manifest, self.version)

    def _deliver(self, bucket: Bucket) -> None:
        if not self._open:
            raise SyncFailed(f"weights: version {self.version} for {self.engine}: the update is over; begin another")
        self._owner.weights_change(f"the update to version {self.version} has not arrived whole")
        index, self._buckets = self._buckets, self._buckets + 1
        self._guarded(f"bucket {index + 1}", lambda: self._transfer(bucket))

    def _transfer(self, bucket: Bucket) -> None:
        owner = self._owner
        if self._way == "disk":
            entry = self._written(bucket)
            part: Callable[[int], None] = lambda number: owner.send_file(number, entry)  # noqa: E731
        elif self._way == "http" or owner.keeps_weights:
            data = staged(bucket, "safetensors", lambda: disk.as_bytes(bucket.tensors))
            part = lambda number: owner.send_bytes(number, data)  # noqa: E731
        if self._way == "broadcast":
            self._broadcast(bucket)
        else:
            part(self._number)
        if owner.keeps_weights:
            self._parts.append(part)

    def _written(self, bucket: Bucket) -> dict[str, str]:
        """The file of a bucket; one server of a pool writes it for all that see the folder."""
        files = self._owner.files
        assert files is not None
        writer = self._writer = self._writer or files.writer(self.version)
        return staged(bucket, f"disk {files.folder}", lambda: writer.add(bucket))

    def _broadcast(self, bucket: Bucket) -> None:
        owner = self._owner
        if owner.broadcaster is None:
            host = _address_towards(owner.url)
            owner.broadcaster = BroadcastSender(1, timeout_s=owner.timeouts.sync_s, host=host)
        invite = lambda invitation: owner.post_aside("/weights/connect", {"invitation": invitation})  # noqa: E731
        owner.broadcaster.connect(owner.name, owner._boot, invite)

        def announce(header: dict[str, Any]) -> Callable[[], Any]:
            return owner.post_aside("/weights/bucket", {"update": self._number, "broadcast": header})

        owner.broadcaster.transmit(bucket, announce)

    def _finish(self) -> Ack:
        ack, self._asleep = self._guarded("commit", lambda: self._owner.commit_there(self._number))
        return cast("Ack", ack)

    def commit(self) -> Ack:
        """The server switches to the weights, and they are kept; see `WeightUpdate.commit`."""
        ack = super().commit()
        self._open = False
        if self._writer is not None:
            self._writer.finish(self.manifest)
        self._owner.weights_arrived(Kept(self.version, self.manifest, ack.digest, self._parts), self._asleep)
        return ack

    def abort(self) -> None:
        """Give up; never raises."""
        if not self._open:
            return
        self._open = False
        self._parts.clear()
        self._owner.abort_there(self._number)
        if self._writer is not None:
            self._writer.abandon()

    def _guarded(self, phase: str, work: Callable[[], Any]) -> Any:
        """Whatever goes wrong is a `SyncFailed` that names server, version and phase; what the disk refuses is said."""
        try:
            return work()
        except (Lost, Failed) as lost:
            problem = str(lost)
        except (SyncFailed, EngineError) as error:
            problem = error.problems[0].removeprefix(f"{self.engine}: ")
        if self._way == "broadcast" and self._owner.broadcaster is not None:
            self._owner.broadcaster.close()
            self._owner.broadcaster = None
        raise SyncFailed(f"weights: version {self.version} for {self.engine}: {phase}: {problem}")


def _address_towards(url: str) -> str:
    """The address of this host that the server reaches."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=5.0) as one:
        return str(one.getsockname()[0])
