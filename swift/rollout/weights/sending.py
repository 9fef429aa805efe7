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
from typing import TYPE_CHECKING, Any

import torch

from swift.errors import SwiftError, SyncFailed
from swift.rollout.engines.events import Lost
from swift.rollout.weights.base import Ack, Bucket, TensorInfo, WeightStream
from swift.rollout.weights.broadcast import Announcement, BroadcastSender

if TYPE_CHECKING:
    from swift.rollout.engines.client import EngineClient

logger = logging.getLogger(__name__)


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
        begin_s = client.timeouts.drain_s + client.timeouts.sync_s
        number = client.call("begin_update", begin_s, manifest=self.manifest, version=self.version)
        sending = _Sending(client, number)
        for way, payload in self.parts:
            client.send_bucket(number, way, payload, sending.left_s())()
        reply = client.call("commit", sending.left_s(), update=number)
        ack: Ack = reply["ack"]
        if (ack.version, ack.digest) != (self.version, self.digest):
            raise SyncFailed(
                f"weights: version {self.version} for {client.name}: after its restart it has version {ack.version}, "
                f"digest {ack.digest}; before, it had digest {self.digest}"
            )
        return str(reply["asleep"])


def send_update(client: EngineClient, stream: WeightStream) -> Ack:
    """Begin an update there, send its buckets, and have the engine switch to it.

    While the engine takes a bucket, the next one is gathered. Raises SyncFailed, which names engine, version and phase;
    EngineDead and what `InferenceEngine.update` refuses, before anything was sent.
    """
    bounds = client.timeouts
    what = {"manifest": stream.manifest, "version": stream.version}
    number = client.safe_call("begin_update", bounds.drain_s + bounds.sync_s, **what)
    sending = _Sending(client, number)
    try:
        for bucket in stream:
            client.weights_change(f"the update to version {stream.version} is incomplete")
            sending.send(bucket, stream.version)
            del bucket  # before the next one is gathered
        sending.confirm()
        sending.phase = "commit"
        reply = client.call("commit", sending.left_s(), update=number)
    except BaseException as error:
        sending.give_up()
        if not isinstance(error, Lost | SwiftError):
            raise
        problem = (str(error) if isinstance(error, Lost) else error.problems[0]).removeprefix(f"{client.name}: ")
        raise SyncFailed(f"weights: version {stream.version} for {client.name}: {sending.phase}: {problem}") from error
    ack: Ack = reply["ack"]
    client.update_ended(complete=True)
    kept = Kept(stream.version, stream.manifest, ack.digest, sending.parts) if sending.keeps else None
    client.weights_arrived(stream.version, kept, reply["asleep"])
    if client.sent_by != sending.way:
        client.sent_by = sending.way
        logger.info("weights: %s gets them by %s: %d MiB", client.name, sending.way, ack.nbytes >> 20)
    return ack


class _Sending:
    """The buckets of one update. phase: for messages. parts: what is kept for a restart."""

    def __init__(self, client: EngineClient, number: int) -> None:
        self.client, self.number = client, number
        self.phase, self.way, self.keeps = "bucket 1", "", False
        self.parts: list[tuple[str, Any]] = []
        self._deadline: float | None = None
        self._count = 0
        self._unconfirmed: Callable[[], object] | None = None

    def left_s(self) -> float:
        """Seconds that are left; they count from the first bucket, which may wait for the begin of other engines."""
        now = time.monotonic()
        self._deadline = self._deadline or now + self.client.timeouts.sync_s
        return max(0.1, self._deadline - now)

    def send(self, bucket: Bucket, version: int) -> None:
        """Returns once the memory of the bucket may be reused."""
        client = self.client
        self.confirm()
        self._count += 1
        self.phase = f"bucket {self._count}"
        if not self.way:
            self.way = client.way_of(bucket)
            copied = self.way != "broadcast" or (client.alone and not isinstance(bucket, Announcement))
            self.keeps = client.keeps_weights and copied
        if self.way == "broadcast":
            self._broadcast(bucket)
            if self.keeps:
                self.parts.append((client.stored, client.payload(client.stored, bucket, version)))
            return
        payload = client.payload(self.way, bucket, version)
        if self.keeps:
            self.parts.append((self.way, payload))
        self._unconfirmed = client.send_bucket(self.number, self.way, payload, self.left_s())

    def _broadcast(self, bucket: Bucket) -> None:
        """Take part in a broadcast of this process, or, in a server, have the engine take part in the trainer's."""
        client, sender = self.client, self.client.broadcaster
        if isinstance(bucket, Announcement):
            client.send_bucket(self.number, "broadcast", bucket.for_rank(client.rank_offset).header, self.left_s())()
            return
        assert sender is not None
        header = sender.announce(client.name, bucket)
        sender.send(client.send_bucket(self.number, "broadcast", header, self.left_s()))

    def confirm(self) -> None:
        """Wait until the engine has taken the last bucket."""
        wait, self._unconfirmed = self._unconfirmed, None
        if wait is not None:
            wait()

    def give_up(self) -> None:
        """The engine gets no more of it; never raises."""
        with contextlib.suppress(Lost, SwiftError):  # what is on its way must not arrive after the end
            self.confirm()
        self.parts.clear()  # the error may be kept, and refers to them
        if self.way == "broadcast" and self.client.broadcaster is not None:  # engines that wait in it fail at once
            self.client.broadcaster.fail(f"{self.client.name} failed")
        self.client.abort_update(self.number)
        self.client.update_ended(complete=False)


def new_sender(clients: Sequence[EngineClient], device: torch.device) -> BroadcastSender:
    """A group of these engines: NCCL between GPUs, gloo otherwise; at loopback if every engine is on this host."""
    hosts = [client.address() for client in clients]
    host = next((host for host in hosts if host != "127.0.0.1"), "127.0.0.1")
    on_gpus = all(name.startswith("cuda") for name in (str(device), *(client.devices[0] for client in clients)))
    return BroadcastSender(
        {client.name: client.receivers() for client in clients},
        timeout_s=clients[0].timeouts.sync_s,
        backend="nccl" if on_gpus else "gloo",
        device=str(device) if on_gpus else "cpu",
        host=host,
    )
