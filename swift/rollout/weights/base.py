"""A weight sync and the proof that it arrived.

An update is `begin_update(manifest, version)`, buckets, `commit` -> `Ack`. The manifest names every tensor before the
first byte travels, so that a tensor that is never sent is found by counting, not by luck. Both sides digest names and
bytes in the order sent; number of tensors, bytes and digest must agree, otherwise `SyncFailed`. Nothing is
fire-and-forget: without an `Ack` the version has not changed.

A bucket ends between two layers, never inside one: engines fuse neighbouring matrices (q, k, v; gate, up) and a fused
matrix that arrives in two parts is silently wrong.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.weights.digest import StreamDigest, checksums, digest_of

BUCKET_BYTES = 512 << 20
"""Upper size of a bucket; a single layer larger than this is a bucket of its own."""

T = TypeVar("T")
Wait = Callable[[], object]
"""Waits for what was begun; raises what went wrong there."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of an update: its engine-facing name, torch dtype name ("bfloat16") and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


@dataclass(slots=True)
class Bucket:
    """Whole layers that travel together. made: what was made of it to travel, once for all receivers."""

    tensors: list[tuple[str, Tensor]]
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What `make` returns, made for the first receiver that asks."""
        if key not in self.made:
            self.made[key] = make()
        found: T = self.made[key]
        return found

    def checksums(self) -> dict[str, int]:
        """Those of its tensors by name; computed once, however many receivers there are."""
        names, tensors = [name for name, _ in self.tensors], [tensor for _, tensor in self.tensors]
        return self.once("checksums", lambda: dict(zip(names, checksums(tensors), strict=True)))

    def add_to(self, digest: StreamDigest) -> None:
        known = self.checksums()
        for name, tensor in self.tensors:
            digest.add(name, tensor, known[name])

    def digest(self) -> str:
        stream = StreamDigest()
        self.add_to(stream)
        return stream.hexdigest()


class WeightSource(Protocol):
    """The policy's weights under the names that engines load: those of a Hugging Face checkpoint.

    Tied heads are included under their own name (`lm_head.weight`): an engine keeps its own copy of them.
    """

    def manifest(self) -> tuple[TensorInfo, ...]:
        """Every tensor of an update, in the order of the buckets; no collective."""
        ...

    def buckets(self) -> Iterator[Bucket]:
        """The tensors, in buckets that end between layers.

        Gathers sharded parameters, so every rank must iterate to the end, in step with the others. Tensors are
        valid until the next bucket is asked for; a receiver that keeps them copies them.
        """
        ...


Live = Mapping[str, Tensor]
"""The policy's own parameters by the names of an update, tied ones under each of theirs.

{} where the tensors of an update are made of something else: gathered, merged, cast or rearranged.
"""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A LoRA adapter alone, as peft would save it.

    config: the content of adapter_config.json. tensors: under peft's names
    (`base_model.model.<module>.lora_A.weight`), bit for bit in the trainer's dtype.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def digest(self) -> str:
        """Digest over names and bytes, in the order of the names."""
        return digest_of(sorted(self.tensors.items()))


@dataclass(frozen=True, slots=True)
class Ack:
    """An engine's confirmation: from now on it samples with these weights.

    digest: of what was sent; "" when nothing was, because the engine samples with the trainer's own memory.
    """

    version: int
    tensors: int
    nbytes: int
    digest: str


class WeightUpdate(ABC):
    """One update in progress, made by `InferenceEngine.begin_update`.

    Args:
        engine: name of the receiver, for messages.
        manifest: every tensor that will come.
        version: of the policy.
    """

    def __init__(self, engine: str, manifest: Sequence[TensorInfo], version: int) -> None:
        self.engine = engine
        self.manifest = tuple(manifest)
        self.version = version
        self.sent = 0
        self.sent_bytes = 0
        self.digest = StreamDigest()
        self.over = False  # committed, or given up

    @property
    def name(self) -> str:
        return f"weights: version {self.version} for {self.engine}"

    def send(self, bucket: Bucket) -> None:
        """Deliver a bucket. Raises SyncFailed: not what the manifest has at this place, or the receiver failed."""
        wait = self.start(bucket)
        if wait is not None:
            wait()

    def start(self, bucket: Bucket) -> Wait | None:
        """Begin to deliver a bucket; None once it has arrived. See `send`."""
        self._check_open()
        if not bucket.tensors:
            return None
        for name, tensor in bucket.tensors:
            expected = self.manifest[self.sent] if self.sent < len(self.manifest) else "no more tensors"
            seen = TensorInfo.of(name, tensor)
            if seen != expected:
                raise SyncFailed(f"{self.name}: tensor {self.sent} is {seen}; the manifest has {expected}")
            self.sent += 1
        self.sent_bytes += bucket.nbytes
        bucket.add_to(self.digest)
        return self._deliver(bucket)

    def commit(self) -> Ack:
        """All buckets are sent; the receiver switches to them.

        Raises SyncFailed: incomplete, or the receiver has something else than was sent.
        """
        self._check_open()
        if self.sent != len(self.manifest):
            missing = [info.name for info in self.manifest[self.sent : self.sent + 3]]
            raise SyncFailed(
                f"{self.name}: {self.sent} of {len(self.manifest)} tensors were sent; missing {', '.join(missing)}"
            )
        ack = self._finish()
        mine = (self.version, self.sent, self.sent_bytes, self.digest.hexdigest())
        if (ack.version, ack.tensors, ack.nbytes, ack.digest) != mine:
            raise SyncFailed(
                f"{self.name}: it confirms version {ack.version}, {ack.tensors} tensors, {ack.nbytes} bytes, digest "
                f"{ack.digest}; sent were {mine[1]} tensors, {mine[2]} bytes, digest {mine[3]}"
            )
        self.over = True
        return ack

    def abort(self) -> None:
        """Give up; the receiver's weights are invalid from now on. Idempotent, never raises."""
        if not self.over:
            self.over = True
            self._give_up()

    def _check_open(self) -> None:
        if self.over:
            raise SyncFailed(f"{self.name}: the update is over; begin another")

    @abstractmethod
    def _deliver(self, bucket: Bucket) -> Wait | None:
        """Bring a checked bucket to the receiver, or begin to and return what waits for its arrival."""

    @abstractmethod
    def _finish(self) -> Ack:
        """End the update at the receiver and return its ack."""

    @abstractmethod
    def _give_up(self) -> None:
        """The receiver gets no more of it."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name such as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def memory_of(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory, seen in the same way; empty ones share none."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
