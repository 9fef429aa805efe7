"""New weights on their way through the server: one update at a time, and nothing is sampled until it has ended.

    begin -> bucket (bytes in pieces | file on a shared disk | broadcast) * -> commit -> receipt of the engines
                                                                            or abort, or silence: weights are void

Everything here runs on the driver's thread, as jobs of `Front`, except `Upload.add`, which only collects bytes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swift.errors import SyncFailed
from swift.rollout.server.front import Front
from swift.rollout.server.limits import Refused
from swift.rollout.weight_sync import disk
from swift.rollout.weight_sync.base import Ack, Bucket, TensorInfo, WeightUpdate
from swift.rollout.weight_sync.broadcast import BroadcastReceiver

HOLD = "update"
"""The hold on the queue while an update is open."""
HEADER_ROOM = 16 << 20
"""Bytes that a safetensors header may take beside the tensors."""


class Upload:
    """A body that comes in pieces, in order.

    Args:
        total: its length in bytes.
        limit: longest allowed.

    Raises:
        Refused: it would be longer (413).
    """

    def __init__(self, total: int, limit: int) -> None:
        if not 0 < total <= limit:
            raise Refused(413, "upload", f"total: {total} bytes: not within the limit of {limit} bytes for this upload")
        self.total = total
        self.data = bytearray()
        self.touched_at = time.monotonic()

    def add(self, offset: int, piece: bytes) -> bool:
        """Append a piece; whether everything is there. A piece that came already changes nothing.

        Raises:
            Refused: there is a gap before it, or it is too long.
        """
        self.touched_at = time.monotonic()
        end = offset + len(piece)
        if offset > len(self.data) or end > self.total:
            raise Refused(
                409,
                "piece",
                f"offset: {offset}: the piece ends at {end} of {self.total}, and {len(self.data)} are here",
            )
        if end > len(self.data):
            self.data += piece[len(self.data) - offset :]
        return len(self.data) == self.total

    def silent(self, idle_s: float) -> bool:
        """Whether nothing has come for so long."""
        return time.monotonic() - self.touched_at > idle_s


@dataclass(slots=True)
class _Open:
    number: int
    update: WeightUpdate
    manifest: tuple[TensorInfo, ...]
    delivered: int = 0
    upload: Upload | None = None
    bucket: int = -1
    done_buckets: set[int] = field(default_factory=set)
    touched_at: float = field(default_factory=time.monotonic)


class Updates:
    """See the module's docstring.

    Args:
        front: the engines.
        weights_folder: below which files may be named.
        idle_s: silence after which an update is given up.

    Attributes:
        digest: of the present weights, "" while they are those of the start.
        whole_came: engines have got a whole model since they were built, under whichever version.
    """

    def __init__(self, front: Front, *, weights_folder: Path | None, idle_s: float) -> None:
        self.front = front
        self.weights_folder = weights_folder
        self.idle_s = idle_s
        self.digest = ""
        self.whole_came = False
        self.last: Ack | None = None
        self.last_number = 0
        self._open: _Open | None = None
        self._numbers = itertools.count(1)
        self._broadcast: BroadcastReceiver | None = None

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._open is not None

    def begin(self, manifest: Sequence[TensorInfo], version: int) -> int:
        """Start; returns the update's number. A former one that was left open is given up.

        Raises:
            SyncFailed, EngineAsleep, EngineError: as `InferenceEngine.begin_update`.
        """
        self.abort(None)
        update = self.front.engine.begin_update(manifest, version)
        self._open = _Open(next(self._numbers), update, tuple(manifest))
        self.front.hold(HOLD)
        return self._open.number

    def upload(self, number: int, bucket: int, total: int) -> Upload | None:
        """Where the bytes of a bucket are collected; None when it was delivered already (a repeated request)."""
        opened = self._this(number)
        opened.touched_at = time.monotonic()
        if bucket in opened.done_buckets:
            return None
        if opened.upload is None or opened.bucket != bucket:
            left = sum(info.nbytes for info in opened.manifest[opened.delivered :])
            opened.upload, opened.bucket = Upload(total, left + HEADER_ROOM), bucket
        return opened.upload

    def deliver_bytes(self, number: int, bucket: int) -> None:
        """A bucket whose bytes are all here."""
        opened = self._this(number)
        upload, opened.upload = opened.upload, None
        assert upload is not None, "delivered without its bytes"
        what = f"bucket {bucket}"
        self._guarded(
            opened, bucket, lambda: disk.in_order(disk.from_bytes(upload.data, what), what, self._next(opened))
        )

    def deliver_file(self, number: int, bucket: int, path: str, digest: str | None) -> None:
        """A bucket in a file below the weights folder."""
        opened = self._this(number)
        if bucket in opened.done_buckets:
            return
        file = disk.inside(self.weights_folder, path)
        self._guarded(opened, bucket, lambda: disk.read_bucket(file, self._next(opened), digest))

    def connect(self, invitation: dict[str, Any]) -> None:
        """Join a trainer's broadcast group; not a job: it waits for the trainer, who waits for this.

        Raises:
            SyncFailed: nobody is there.
        """
        self.disconnect()
        self._broadcast = BroadcastReceiver(invitation, torch.device("cpu"))

    def deliver_broadcast(self, number: int, bucket: int, header: dict[str, Any]) -> None:
        """A bucket that the trainer broadcasts now."""
        opened = self._this(number)
        receiver = self._broadcast
        if receiver is None:
            raise SyncFailed("weights: no broadcast group; POST /weights/connect first")
        self._guarded(opened, bucket, lambda: Bucket(receiver.receive(header)))

    def _next(self, opened: _Open) -> tuple[TensorInfo, ...]:
        return opened.manifest[opened.delivered :]

    def _guarded(self, opened: _Open, bucket: int, read: Any) -> None:
        try:
            made: Bucket = read()
            opened.update.send(made)
        except BaseException:
            self.abort(opened.number)
            raise
        opened.delivered += len(made.tensors)
        opened.done_buckets.add(bucket)
        opened.touched_at = time.monotonic()

    def commit(self, number: int) -> Ack:
        """Everything is delivered: the engines switch. Repeated for an update that is done, its receipt again."""
        if self._open is None and self.last is not None and number == self.last_number:
            return self.last
        opened = self._this(number)
        try:
            ack = opened.update.commit()
        except BaseException:
            self.abort(number)
            raise
        self._end()
        self.whole_came = True
        self.digest, self.last, self.last_number = ack.digest, ack, number
        return ack

    def abort(self, number: int | None) -> None:
        """Give an update up, whichever is open with None; idempotent."""
        opened = self._open
        if opened is not None and number in (None, opened.number):
            self._end()
            opened.update.abort()

    def expired(self) -> bool:
        """Whether the open update's trainer has fallen silent."""
        opened = self._open
        if opened is None:
            return False
        touched = max(opened.touched_at, opened.upload.touched_at if opened.upload is not None else 0.0)
        return time.monotonic() - touched > self.idle_s

    def disconnect(self) -> None:
        """Leave the broadcast group."""
        receiver, self._broadcast = self._broadcast, None
        if receiver is not None:
            receiver.close()

    def _end(self) -> None:
        self._open = None
        self.front.release(HOLD)

    def _this(self, number: int) -> _Open:
        if self._open is None or self._open.number != number:
            raise SyncFailed(
                f"weights: update {number}: is not open; it ended, or fell silent for {self.idle_s:g} s: begin another"
            )
        return self._open


def load_whole(front: Front, tensors: Sequence[tuple[str, torch.Tensor]], version: int) -> Ack:
    """A job: replace all weights by tensors that are here already, in buckets that end between layers.

    Raises:
        SyncFailed: they are not the model's, or did not arrive.
    """
    if not tensors:
        raise SyncFailed("weights: no tensor came; send them between start and finish")
    update = front.engine.begin_update([TensorInfo.of(name, tensor) for name, tensor in tensors], version)
    try:
        for bucket in whole_layers(tensors):
            update.send(bucket)
        return update.commit()
    except BaseException:
        update.abort()
        raise


def whole_layers(tensors: Sequence[tuple[str, torch.Tensor]], limit: int = 512 << 20) -> list[Bucket]:
    """Tensors in buckets up to `limit` bytes, cut where the number of the layer in their names changes."""
    buckets: list[Bucket] = []
    for _, group in itertools.groupby(tensors, key=lambda one: _layer(one[0])):
        layer = Bucket(list(group))
        if buckets and buckets[-1].nbytes + layer.nbytes <= limit:
            buckets[-1].tensors += layer.tensors
        else:
            buckets.append(layer)
    return buckets


def _layer(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; what belongs to no layer is one group."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""
