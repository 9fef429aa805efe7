"""One weight update on its way to an engine elsewhere, over any transport.

What was sent is kept as it travelled, so that an engine that replaces a lost one can be given it again: object
references, files or bytes. A device that sends directly (`ipc`, `broadcast`) leaves nothing behind, so there the
buckets are stored besides while the engine may be restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift.errors import SwiftError, SyncFailed
from swift.rollout.weights.base import Ack, Bucket, TensorInfo, WeightUpdate
from swift.rollout.weights.broadcast import BroadcastSender

if TYPE_CHECKING:
    from swift.rollout.engines.client import EngineClient
    from swift.rollout.engines.transport import Transport

STORED = ("object_store", "disk", "http")
"""Ways whose payload outlives the update."""


@dataclass(slots=True)
class Kept:
    """The last full update, and what it takes to send it again: way and payload of each bucket."""

    version: int
    manifest: tuple[TensorInfo, ...]
    digest: str
    parts: list[tuple[str, Any]]

    def send(self, transport: Transport, name: str, timeout_s: float) -> str:
        """Bring it to another life of the engine; returns what sleeps there.

        Raises:
            SyncFailed: its ack is not that of the first time.
            Lost, SwiftError.
        """
        deadline = time.monotonic() + timeout_s
        number = transport.call("begin_update", timeout_s, manifest=self.manifest, version=self.version)
        for index, (way, payload) in enumerate(self.parts):
            transport.send_bucket(number, index, way, payload, _left(deadline))()
        reply = transport.call("commit", _left(deadline), update=number)
        ack: Ack = reply["ack"]
        if (ack.version, ack.digest) != (self.version, self.digest):
            raise SyncFailed(
                f"weights: version {self.version} for {name}: after its restart it has version {ack.version}, digest "
                f"{ack.digest}; before, it had digest {self.digest}"
            )
        return str(reply["asleep"])


class ClientUpdate(WeightUpdate):
    """See the module's docstring.

    Args:
        owner: the engine.
        number: of the update there.
        manifest: every tensor that will come.
        version: of the policy.
        deadline: of the whole update, by the monotonic clock.
    """

    def __init__(
        self, owner: EngineClient, number: int, manifest: Sequence[TensorInfo], version: int, deadline: float
    ) -> None:
        super().__init__(owner.name, manifest, version)
        self._owner, self._transport, self._life = owner, owner.transport, owner.transport.life
        self._number, self._deadline = number, deadline
        self._way = ""
        self._parts: list[tuple[str, Any]] = []
        self._buckets = 0
        self._unconfirmed: Callable[[], Any] | None = None
        self._asleep = ""
        self._open = True

    def way_of(self, bucket: Bucket) -> str:
        """How this engine is sent a bucket."""
        return self._owner.weight_transport or self._transport.choose(bucket)

    def _deliver(self, bucket: Bucket) -> None:
        if not self._open:
            raise SyncFailed(f"weights: version {self.version} for {self.engine}: the update is over; begin another")
        self._owner.weights_change(f"the update to version {self.version} is incomplete")
        if not self._way:
            self._way = self.way_of(bucket)
            if self._way == "broadcast":
                self._guarded("bucket 1", lambda: self._join(bucket))
        stored = self._guarded(f"bucket {self._buckets + 1}", lambda: self._stored(bucket))
        self._confirm()
        self._buckets += 1
        self._guarded(f"bucket {self._buckets}", lambda: self._transfer(bucket, stored))

    def _stored(self, bucket: Bucket) -> tuple[str, Any] | None:
        """The bucket where a restarted engine finds it, if it is sent from there or kept there."""
        if self._way not in STORED and not self._owner.keeps_weights:
            return None
        way = self._way if self._way in STORED else self._transport.stored
        part = way, self._transport.payload(way, bucket, self.version)
        if self._owner.keeps_weights:
            self._parts.append(part)
        return part

    def _transfer(self, bucket: Bucket, stored: tuple[str, Any] | None) -> None:
        if self._way == "broadcast":
            self._sender().transmit(bucket, self._send)
            return
        payload = stored[1] if stored is not None and stored[0] == self._way else None
        wait = self._send(payload or self._transport.payload(self._way, bucket, self.version))
        if self._way in STORED:  # while the engine takes it, the next one is gathered
            self._unconfirmed = wait
        else:
            wait()

    def _send(self, payload: Any) -> Callable[[], Any]:
        index = self._buckets - 1
        return self._transport.send_bucket(self._number, index, self._way, payload, _left(self._deadline))

    def _confirm(self) -> None:
        wait, self._unconfirmed = self._unconfirmed, None
        if wait is not None:
            self._guarded(f"bucket {self._buckets}", wait)

    # --- broadcast --------------------------------------------------------------------------------------------

    def _join(self, bucket: Bucket) -> None:
        if self._owner.broadcaster is None:
            self._owner.broadcaster = new_broadcaster([self], bucket)

        def invite(invitation: dict[str, Any]) -> Callable[[], Any]:
            return self._transport.start_call("connect", _left(self._deadline), invitation=invitation)

        self._sender().connect(self.engine, self._life, invite)

    def _sender(self) -> BroadcastSender:
        assert self._owner.broadcaster is not None
        return self._owner.broadcaster

    # --- the end ----------------------------------------------------------------------------------------------

    def _finish(self) -> Ack:
        self._confirm()
        reply = self._guarded(
            "commit", lambda: self._transport.call("commit", _left(self._deadline), update=self._number)
        )
        self._asleep = reply["asleep"]
        ack: Ack = reply["ack"]
        return ack

    def commit(self) -> Ack:
        """The engine switches to the weights, and they are kept; see `WeightUpdate.commit`."""
        ack = super().commit()
        self._open = False
        self._transport.update_ended(self.manifest)
        self._owner.weights_arrived(Kept(self.version, self.manifest, ack.digest, self._parts), self._asleep)
        return ack

    def abort(self) -> None:
        """Give up; never raises."""
        if not self._open:
            return
        self._open = False
        self._parts.clear()
        self._unconfirmed = None
        self._transport.abort_update(self._number)
        self._transport.update_ended(None)

    def _guarded(self, phase: str, work: Callable[[], Any]) -> Any:
        """Whatever goes wrong is a `SyncFailed` that names engine, version and phase."""
        from swift.rollout.engines.transport import Lost

        try:
            return work()
        except Lost as lost:
            problem = str(lost)
        except SwiftError as error:
            problem = error.problems[0].removeprefix(f"{self.engine}: ")
        if self._owner.broadcaster is not None:
            self._owner.broadcaster.fail(f"{self.engine}: {problem}")
        raise SyncFailed(f"weights: version {self.version} for {self.engine}: {phase}: {problem}")

    # --- for the pool -----------------------------------------------------------------------------------------

    @property
    def broadcaster(self) -> BroadcastSender | None:
        """The trainer's end of the broadcast that this engine takes part in."""
        return self._owner.broadcaster

    @property
    def address(self) -> str:
        """This host as the engine reaches it."""
        return self._transport.address()

    @property
    def on_gpu(self) -> bool:
        """Whether the engine's weights lie on a GPU."""
        return self._transport.devices[0].startswith("cuda")

    @property
    def sync_s(self) -> float:
        """Bound on an update."""
        return self._owner.timeouts.sync_s

    def take_part_in(self, sender: BroadcastSender) -> None:
        """Use this sender, which others may share; a former one is left."""
        if self._owner.broadcaster is not None:
            self._owner.broadcaster.close()
        self._owner.broadcaster = sender


def new_broadcaster(updates: Sequence[ClientUpdate], bucket: Bucket) -> BroadcastSender:
    """NCCL between GPUs, gloo otherwise; at loopback if every engine is on this host."""
    device = bucket.tensors[0][1].device if bucket.tensors else None
    host = next((one.address for one in updates if one.address != "127.0.0.1"), "127.0.0.1")
    if device is None or device.type != "cuda" or not all(one.on_gpu for one in updates):
        return BroadcastSender(len(updates), timeout_s=updates[0].sync_s, host=host)
    return BroadcastSender(len(updates), backend="nccl", device=device, timeout_s=updates[0].sync_s, host=host)


def share_broadcast(updates: Sequence[WeightUpdate], bucket: Bucket) -> None:
    """Before the first bucket: engines that are reached by a broadcast take part in one, not in one each."""
    members = [one for one in updates if isinstance(one, ClientUpdate) and one.way_of(bucket) == "broadcast"]
    if not members:
        return
    senders = {one.broadcaster for one in members}
    present = members[0].broadcaster
    if len(senders) > 1 or present is None or present.receivers != len(members):
        sender = new_broadcaster(members, bucket)
        for one in members:
            one.take_part_in(sender)


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
