"""A worker's weights: how they get there, and what is kept so that they get there again.

A worker that dies in the middle of a trainer's step must come back with the weights of the last publication, and no
rank can be asked for them then: gathering is a collective. So the buckets of the last update are kept as they were
staged, in shared memory: **one copy of the model in the engine's type per node**, whatever the number of workers,
since all of them refer to the same segments. The copy of the version before is given up when the first bucket of a new
one is sent, so that there are never two. `staging` moves the copy from memory to a folder.

A bucket in shared memory is confirmed when the next one is staged: while the worker takes it, the trainer gathers and
copies the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from swift.errors import SwiftError, SyncFailed
from swift.rollout.engines.worker.link import Call, CallTimeout, Link, WorkerLost
from swift.rollout.weight_sync import cuda_ipc, shared_memory
from swift.rollout.weight_sync.base import Ack, AdapterWeights, Bucket, TensorInfo, WeightUpdate
from swift.rollout.weight_sync.broadcast import BroadcastSender
from swift.rollout.weight_sync.shared_memory import Segment

if TYPE_CHECKING:
    from swift.rollout.engines.worker.client import WorkerEngine

Transport = Literal["shared_memory", "broadcast", "cuda_ipc"]


@dataclass(slots=True)
class KeptWeights:
    """The last full update, as it was sent."""

    version: int
    manifest: tuple[TensorInfo, ...]
    segments: list[Segment]
    digest: str

    def send(self, link: Link, *, name: str, sync_s: float) -> Ack:
        """Bring it to another life of the worker; the receipt must be that of the first time.

        Raises:
            SyncFailed, WorkerLost, CallTimeout.
        """
        deadline = time.monotonic() + sync_s
        link.ask("begin_update", _left(deadline), manifest=as_json(self.manifest), version=self.version)
        for segment in self.segments:
            call = link.post(
                "bucket", descriptors=[segment.descriptor], transport="shared_memory", header=segment.header()
            )
            link.wait(call, _left(deadline))
        ack = Ack(**link.ask("commit", _left(deadline)))
        if (ack.version, ack.digest) != (self.version, self.digest):
            raise SyncFailed(
                f"weights: version {self.version} for {name}: after its restart it has version {ack.version}, digest "
                f"{ack.digest}; before, it had digest {self.digest}"
            )
        return ack


@dataclass(slots=True)
class KeptAdapter:
    """The last adapter, as it was sent."""

    version: int
    config: dict[str, Any]
    segment: Segment
    digest: str

    @classmethod
    def of(cls, adapter: AdapterWeights, version: int, staging: Path | None) -> KeptAdapter:
        """Copies the adapter."""
        segment = Segment(Bucket(list(adapter.tensors.items())), staging)
        return cls(version, adapter.config, segment, adapter.digest())

    def send(self, link: Link, *, name: str, sync_s: float) -> Ack:
        """Bring it to the worker.

        Raises:
            SyncFailed: it confirms something else.
            SwiftError, WorkerLost, CallTimeout.
        """
        call = link.post(
            "load_adapter",
            descriptors=[self.segment.descriptor],
            header=self.segment.header(),
            config=self.config,
            version=self.version,
        )
        ack = Ack(**link.wait(call, sync_s))
        if (ack.version, ack.digest) != (self.version, self.digest):
            raise SyncFailed(
                f"weights: adapter version {self.version} for {name}: it confirms version {ack.version}, digest "
                f"{ack.digest}; sent was digest {self.digest}"
            )
        return ack


class WorkerUpdate(WeightUpdate):
    """One update on its way to a worker.

    Args:
        owner: the engine.
        link: the life of its worker that receives it.
        manifest: every tensor that will come.
        version: of the policy.
        deadline: of the whole update, by the monotonic clock.
    """

    def __init__(
        self, owner: WorkerEngine, link: Link, manifest: Sequence[TensorInfo], version: int, deadline: float
    ) -> None:
        super().__init__(owner.name, manifest, version)
        self._owner = owner
        self._link = link
        self._deadline = deadline
        self._segments: list[Segment] = []
        self._buckets = 0
        self._unconfirmed: tuple[int, Call] | None = None
        self._transport: Transport | None = None
        self._open = True

    def _deliver(self, bucket: Bucket) -> None:
        if not self._open:
            raise SyncFailed(f"weights: version {self.version} for {self.engine}: the update is over; begin another")
        self._owner.weights_change(f"the update to version {self.version} has not arrived whole")
        self._buckets += 1
        phase = f"bucket {self._buckets}"
        segment = self._guarded(phase, lambda: self._staged(bucket))
        self._confirm()
        self._guarded(phase, lambda: self._transfer(bucket, segment))

    def _staged(self, bucket: Bucket) -> Segment | None:
        """The bucket in shared memory, where it is sent or kept there."""
        if self._transport is None:
            self._transport = self.way_of(bucket)
            if self._transport == "broadcast":
                self._join(bucket)
        if not self._owner.keeps_weights and self._transport != "shared_memory":
            return None
        segment = shared_memory.stage(bucket, self._owner.staging)
        if self._owner.keeps_weights:
            self._segments.append(segment)
        return segment

    def _transfer(self, bucket: Bucket, segment: Segment | None) -> None:
        if self._transport == "shared_memory":
            assert segment is not None, "what is sent in shared memory lies there"
            self._unconfirmed = self._buckets, self._post(segment.header(), [segment.descriptor])
        elif self._transport == "cuda_ipc":
            self._wait(self._post(cuda_ipc.header_for(bucket)))
            cuda_ipc.release()
        else:
            self._broadcaster().transmit(bucket, self._announced)

    def _confirm(self) -> None:
        """Wait until the worker has taken the bucket before, if that is still open."""
        open_one, self._unconfirmed = self._unconfirmed, None
        if open_one is not None:
            number, call = open_one
            self._guarded(f"bucket {number}", lambda: self._wait(call))

    def _announced(self, header: dict[str, Any]) -> Callable[[], object]:
        call = self._post(header)
        return lambda: self._wait(call)

    def _post(self, header: dict[str, Any], descriptors: Sequence[int] = ()) -> Call:
        return self._link.post("bucket", descriptors=descriptors, transport=self._transport, header=header)

    def _wait(self, call: Call) -> Any:
        return self._link.wait(call, _left(self._deadline))

    def way_of(self, bucket: Bucket) -> Transport:
        """How this worker is sent a bucket."""
        first = bucket.tensors[0][1] if bucket.tensors else None
        return self._owner.transport or choose_transport(first, self._owner.spec.devices)

    @property
    def broadcaster(self) -> BroadcastSender | None:
        """The trainer's end of the broadcast that this worker takes part in."""
        return self._owner.broadcaster

    def new_broadcaster(self, bucket: Bucket, receivers: int) -> BroadcastSender:
        """NCCL between GPUs, gloo otherwise."""
        device = bucket.tensors[0][1].device if bucket.tensors else None
        on_gpus = device is not None and device.type == "cuda" and self._owner.spec.devices[0].startswith("cuda")
        timeout_s = self._owner.timeouts.sync_s
        if not on_gpus:
            return BroadcastSender(receivers, timeout_s=timeout_s)
        return BroadcastSender(receivers, backend="nccl", device=device, timeout_s=timeout_s)

    def take_part_in(self, sender: BroadcastSender) -> None:
        """Use this sender, which others may share; a former one is left."""
        if self._owner.broadcaster is not None:
            self._owner.broadcaster.close()
        self._owner.broadcaster = sender

    def _broadcaster(self) -> BroadcastSender:
        assert self._owner.broadcaster is not None
        return self._owner.broadcaster

    def _join(self, bucket: Bucket) -> None:
        def invite(invitation: dict[str, Any]) -> Callable[[], object]:
            call = self._link.post("connect", invitation=invitation)
            return lambda: self._wait(call)

        if self._owner.broadcaster is None:
            self._owner.broadcaster = self.new_broadcaster(bucket, 1)
        self._owner.broadcaster.connect(self.engine, self._link.host_pid, invite)

    def _finish(self) -> Ack:
        self._confirm()
        return self._guarded("commit", lambda: Ack(**self._link.ask("commit", _left(self._deadline))))

    def commit(self) -> Ack:
        """The worker switches to the weights, and they are kept; see `WeightUpdate.commit`."""
        ack = super().commit()
        self._open = False
        kept = KeptWeights(self.version, self.manifest, self._segments, ack.digest)
        self._owner.weights_arrived(kept, self._link)
        return ack

    def abort(self) -> None:
        """Give up; never raises."""
        if self._open:
            self._open = False
            self._segments.clear()
            self._link.tell("abort_update")

    def _guarded(self, phase: str, work: Callable[[], Any]) -> Any:
        """Whatever goes wrong is a `SyncFailed` that names worker, version and phase."""
        try:
            return work()
        except WorkerLost as lost:
            problem = f"its process {lost}; {self._link.last_lines()}"
        except CallTimeout as late:
            problem = f"it {late}; {self._link.stacks()}"
            self._link.lose("took too long for its weights")
        except SwiftError as error:
            problem = error.problems[0].removeprefix(f"{self.engine}: ")
        if self._transport == "broadcast":
            self._broadcaster().fail(f"{self.engine}: {problem}")
        raise SyncFailed(f"weights: version {self.version} for {self.engine}: {phase}: {problem}")


def share_broadcast(updates: Sequence[WeightUpdate], bucket: Bucket) -> None:
    """Before the first bucket: workers that are reached by a broadcast take part in one, not in one each."""
    members = [one for one in updates if isinstance(one, WorkerUpdate) and one.way_of(bucket) == "broadcast"]
    if not members:
        return
    senders = {one.broadcaster for one in members}
    present = members[0].broadcaster
    if len(senders) > 1 or present is None or present.receivers != len(members):
        sender = members[0].new_broadcaster(bucket, len(members))
        for one in members:
            one.take_part_in(sender)


def choose_transport(tensor: Tensor | None, devices: Sequence[str]) -> Transport:
    """The shortest way from where the trainer's tensors lie to an engine on this host.

    Args:
        tensor: of the trainer.
        devices: of the engine, as this process numbers them.
    """
    if tensor is None or tensor.device.type != "cuda" or not all(one.startswith("cuda") for one in devices):
        return "shared_memory"
    own = f"cuda:{tensor.device.index or 0}"
    return "cuda_ipc" if list(devices) == [own] else "broadcast"


def as_json(manifest: Sequence[TensorInfo]) -> list[list[Any]]:
    """A manifest for the worker."""
    return [list(asdict(info).values()) for info in manifest]


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
