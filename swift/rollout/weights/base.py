"""A weight sync and the proof that it arrived.

An update is a `WeightStream`, for which an engine returns an `Ack`. The manifest names every tensor before the first
byte travels, so that a tensor that is never sent is found by counting. Both sides digest names and bytes in the order
sent; number of tensors, bytes and digest must agree, otherwise `SyncFailed`. Without an `Ack` the version has not
changed.

A bucket ends between two layers, never inside one: engines fuse neighbouring matrices (q, k, v; gate, up) and a fused
matrix that arrives in two parts is silently wrong.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.weights.digest import StreamDigest, checksums, digest_of

BUCKET_BYTES = 512 << 20
"""Upper size of a bucket; a single layer larger than this is a bucket of its own."""

T = TypeVar("T")


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
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def infos(self) -> list[TensorInfo]:
        """Its tensors in order."""
        return [TensorInfo.of(name, tensor) for name, tensor in self.tensors]

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What `make` returns, made for the first receiver that asks; receivers may be on several threads."""
        with self.lock:
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


PolicyParameters = Mapping[str, Tensor]
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

    digest: of what it has received; "" when nothing was sent, because it samples with the trainer's own memory.
    """

    version: int
    tensors: int
    nbytes: int
    digest: str


class WeightStream:
    """One update on its way to an engine: its buckets, to be iterated once, in the order of its manifest.

    Iterating raises SyncFailed: a bucket is not what the manifest has at this place, or the last ones are missing.

    Args:
        manifest: every tensor that comes.
        buckets: those of the manifest.
        version: of the policy.
        from_trainer: whether they come from the trainer's own memory, so that an ack is checked against them.

    Attributes:
        count, nbytes: what has come so far: tensors, and their bytes.
    """

    def __init__(
        self, manifest: Sequence[TensorInfo], buckets: Iterable[Bucket], version: int, *, from_trainer: bool = False
    ) -> None:
        self.manifest, self.version = tuple(manifest), version
        self._buckets = iter(buckets)
        self._digest = StreamDigest() if from_trainer else None
        self.count = self.nbytes = 0

    @classmethod
    def of(cls, source: WeightSource, version: int) -> WeightStream:
        """The weights of a source."""
        return cls(source.manifest(), source.buckets(), version, from_trainer=True)

    def first(self) -> Bucket:
        """The first bucket, before the stream is iterated; an empty one if there is none."""
        found = next((bucket for bucket in self._buckets if bucket.infos), Bucket([]))
        self._buckets = _preceded(found, self._buckets)
        return found

    def __iter__(self) -> Iterator[Bucket]:
        for bucket in self._buckets:
            for info in bucket.infos:
                expected = self.manifest[self.count] if self.count < len(self.manifest) else "no more tensors"
                if info != expected:
                    raise SyncFailed(
                        f"weights: version {self.version}: tensor {self.count} is {info}; the manifest has {expected}"
                    )
                self.count += 1
                self.nbytes += info.nbytes
            if bucket.infos:
                if self._digest is not None:
                    bucket.add_to(self._digest)
                yield bucket
            del bucket  # before the next one is gathered
        if missing := [info.name for info in self.missing[:3]]:
            raise SyncFailed(
                f"weights: version {self.version}: {self.count} of {len(self.manifest)} tensors were sent; missing "
                f"{', '.join(missing)}"
            )

    @property
    def missing(self) -> tuple[TensorInfo, ...]:
        """Tensors that have not come yet."""
        return self.manifest[self.count :]

    def check(self, ack: Ack, engine: str) -> None:
        """Raises SyncFailed: the engine confirms something else than was sent."""
        if self._digest is None:
            return
        sent = Ack(self.version, self.count, self.nbytes, self._digest.hexdigest())
        if ack != sent:
            raise SyncFailed(
                f"weights: version {self.version} for {engine}: it confirms version {ack.version}, {ack.tensors} "
                f"tensors, {ack.nbytes} bytes, digest {ack.digest}; sent were {sent.tensors} tensors, {sent.nbytes} "
                f"bytes, digest {sent.digest}"
            )


def _preceded(first: Bucket, others: Iterator[Bucket]) -> Iterator[Bucket]:
    """`first`, which is not kept while the others are gathered, and the others; closing it leaves `others` open."""
    yield first
    del first
    for bucket in others:
        yield bucket
        del bucket


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
