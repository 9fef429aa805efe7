"""One weight update on its way to an engine elsewhere, over any transport.

What was sent is kept as it travelled, so that an engine that replaces a lost one can be given it again: object
references, files or bytes. A broadcast leaves nothing behind, and a copy would take a second pass over the model: only
an engine that is the only one gets it; with several, a replaced one waits for the next update while the others sample.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from swift.errors import SwiftError, SyncFailed
from swift.rollout.engines.events import Lost
from swift.rollout.weights.base import Ack, Bucket, TensorInfo, Wait, WeightUpdate
from swift.rollout.weights.broadcast import BroadcastSender

if TYPE_CHECKING:
    from swift.rollout.engines.client import EngineClient

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Kept:
    """The last full update, and what it takes to send it again: way and payload of each bucket."""

    version: int
    manifest: tuple[TensorInfo, ...]
    digest: str
    parts: list[tuple[str, Any]]

    def send(self, client: EngineClient) -> str:
        """Bring it to another instance of the engine; returns what sleeps there.

        Raises SyncFailed: its ack is not that of the first time.
        """
        timeout_s = client.timeouts.sync_s
        deadline = time.monotonic() + timeout_s
        number = client.call("begin_update", timeout_s, manifest=self.manifest, version=self.version)
        for way, payload in self.parts:
            client.send_bucket(number, way, payload, _left(deadline))()
        reply = client.call("commit", _left(deadline), update=number)
        ack: Ack = reply["ack"]
        if (ack.version, ack.digest) != (self.version, self.digest):
            raise SyncFailed(
                f"weights: version {self.version} for {client.name}: after its restart it has version {ack.version}, "
                f"digest {ack.digest}; before, it had digest {self.digest}"
            )
        return str(reply["asleep"])


class ClientUpdate(WeightUpdate):
    """See the module's docstring. deadline: of the whole update, by the monotonic clock."""

    def __init__(
        self, owner: EngineClient, number: int, manifest: Sequence[TensorInfo], version: int, deadline: float
    ) -> None:
        super().__init__(owner.name, manifest, version)
        self.owner, self.instance = owner, owner.instance
        self._number, self._deadline = number, deadline
        self._way = ""
        self._sender: BroadcastSender | None = None
        self._parts: list[tuple[str, Any]] = []
        self._buckets = 0
        self._unconfirmed: Wait | None = None
        self._asleep = ""

    def way_of(self, bucket: Bucket) -> str:
        return self.owner.weight_transport or self.owner.choose(bucket)

    def _deliver(self, bucket: Bucket) -> Wait | None:
        self.owner.weights_change(f"the update to version {self.version} is incomplete")
        if not self._way:
            self._way = self.way_of(bucket)
            if self._way == "broadcast" and self._sender is None:
                join_broadcast([self], bucket)
        self._confirm()
        self._buckets += 1
        phase = f"bucket {self._buckets}"
        wait = self._as_sync_failed(phase, lambda: self._begin(bucket))
        if self._sender is not None:
            return lambda: self._as_sync_failed(phase, wait)
        self._unconfirmed = wait  # while the engine takes it, the next one is gathered
        return None

    def _begin(self, bucket: Bucket) -> Wait:
        def send(payload: Any) -> Wait:
            return self.owner.send_bucket(self._number, self._way, payload, _left(self._deadline))

        wait, way = None, self._way
        if self._sender is not None:
            wait, way = self._sender.transmit(bucket, send), self.owner.stored
        if wait is None or self._keeps:
            payload = self.owner.payload(way, bucket, self.version)
            if self._keeps:
                self._parts.append((way, payload))
            wait = wait or send(payload)
        return wait

    @property
    def _keeps(self) -> bool:
        """Whether what is sent is kept for a restart."""
        return self.owner.keeps_weights and (self._sender is None or self.owner.alone)

    def _confirm(self) -> None:
        wait, self._unconfirmed = self._unconfirmed, None
        if wait is not None:
            self._as_sync_failed(f"bucket {self._buckets}", wait)

    def _finish(self) -> Ack:
        self._confirm()
        reply = self._as_sync_failed(
            "commit", lambda: self.owner.call("commit", _left(self._deadline), update=self._number)
        )
        self._asleep = reply["asleep"]
        ack: Ack = reply["ack"]
        return ack

    def commit(self) -> Ack:
        """The engine switches to the weights, and they are kept; see `WeightUpdate.commit`."""
        ack = super().commit()
        if self.owner.sent_by != self._way:
            self.owner.sent_by = self._way
            logger.info("weights: %s gets them by %s: %d MiB", self.engine, self._way, ack.nbytes >> 20)
        self.owner.update_ended(complete=True)
        kept = Kept(self.version, self.manifest, ack.digest, self._parts) if self._keeps else None
        self.owner.weights_arrived(self.version, kept, self._asleep)
        return ack

    def _give_up(self) -> None:
        self._parts.clear()
        with contextlib.suppress(SyncFailed):  # what is on its way must not arrive after the end
            self._confirm()
        if self._sender is not None:  # engines that wait in it fail at once
            self._sender.close()
        self.owner.abort_update(self._number)
        self.owner.update_ended(complete=False)

    def _as_sync_failed(self, phase: str, work: Callable[[], T]) -> T:
        """Whatever goes wrong is a `SyncFailed` that names engine, version and phase."""
        try:
            return work()
        except Lost as lost:
            problem = str(lost)
        except SwiftError as error:
            problem = error.problems[0].removeprefix(f"{self.engine}: ")
        raise SyncFailed(f"{self.name}: {phase}: {problem}")

    def take_part_in(self, sender: BroadcastSender) -> None:
        """Use this sender, which others may share; a former one is left."""
        if self.owner.broadcaster is not sender and self.owner.broadcaster is not None:
            self.owner.broadcaster.close()
        self.owner.broadcaster = self._sender = sender

    def invite(self, invitation: dict[str, Any]) -> Wait:
        wait = self._as_sync_failed(
            "connect", lambda: self.owner.start_call("connect", _left(self._deadline), invitation=invitation)
        )
        return lambda: self._as_sync_failed("connect", wait)


def join_broadcast(updates: Sequence[WeightUpdate], bucket: Bucket) -> None:
    """Before the first bucket: the engines that are reached by a broadcast are in one group. Raises SyncFailed."""
    members = [one for one in updates if isinstance(one, ClientUpdate) and one.way_of(bucket) == "broadcast"]
    if not members:
        return
    sender = next((one.owner.broadcaster for one in members if one.owner.broadcaster), None)
    sender = sender or _new_sender(members, bucket)
    for one in members:
        one.take_part_in(sender)
    by_name = {one.engine: one for one in members}
    instances = {name: one.instance for name, one in by_name.items()}
    sender.connect(instances, lambda name, invitation: by_name[name].invite(invitation))


def _new_sender(members: Sequence[ClientUpdate], bucket: Bucket) -> BroadcastSender:
    """NCCL between GPUs, gloo otherwise; at loopback if every engine is on this host."""
    device = str(bucket.tensors[0][1].device) if bucket.tensors else "cpu"
    owners = [one.owner for one in members]
    host = next((one for one in (each.address() for each in owners) if one != "127.0.0.1"), "127.0.0.1")
    on_gpus = all(one.startswith("cuda") for one in (device, *(each.devices[0] for each in owners)))
    timeout_s = owners[0].timeouts.sync_s
    if on_gpus:
        return BroadcastSender(timeout_s=timeout_s, backend="nccl", device=device, host=host)
    return BroadcastSender(timeout_s=timeout_s, host=host)


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
