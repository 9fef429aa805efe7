"""What is sent when weights are published, and the proof that it arrived.

An update is `begin(manifest, version)`, buckets, `commit` -> `Ack`. The manifest names every tensor before the first
byte travels, so that a tensor that is never sent is found by counting, not by luck. Both sides digest names and
bytes in the order sent; number of tensors, bytes and digest must agree, otherwise `SyncFailed`. Nothing is
fire-and-forget: without an `Ack` the version has not changed.

A bucket ends between two layers, never inside one: engines fuse neighbouring matrices (q, k, v; gate, up) and a fused
matrix that arrives in two parts is silently wrong.
"""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from swift.errors import SyncFailed

BUCKET_BYTES = 512 << 20
"""Upper size of a bucket; a single layer larger than this is a bucket of its own."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of an update: its engine-facing name, torch dtype name ("bfloat16") and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        """What `tensor` will be called and look like."""
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape))


@dataclass(slots=True)
class Bucket:
    """Whole layers that travel together.

    `staged` caches what a transport made of it for several receivers.
    """

    tensors: list[tuple[str, Tensor]]
    staged: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)

    def checksums(self) -> dict[str, int]:
        """Those of its tensors by name; computed once, whoever asks and however many receivers there are."""
        found: dict[str, int] | None = self.staged.get("checksums")
        if found is None:
            numbers = checksums([tensor for _, tensor in self.tensors])
            found = {name: number for (name, _), number in zip(self.tensors, numbers, strict=True)}
            self.staged["checksums"] = found
        return found


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

    def digest(self) -> str:
        """Digest over names and bytes, in the order of the names."""
        stream = StreamDigest()
        for name in sorted(self.tensors):
            stream.add(name, self.tensors[name])
        return stream.hexdigest()


@dataclass(frozen=True, slots=True)
class Ack:
    """An engine's receipt: from now on it samples with these weights.

    digest: of what was sent; "" when nothing was, because the engine samples with the trainer's own memory. rounded:
    the engine stores them in another dtype than they came in. note: what a person should know, or "".
    """

    version: int
    tensors: int
    nbytes: int
    digest: str
    seconds: float
    rounded: bool = False
    note: str = ""


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

    def send(self, bucket: Bucket) -> None:
        """Deliver a bucket.

        Raises:
            SyncFailed: a tensor that the manifest does not have at this place, or the receiver failed.
        """
        for name, tensor in bucket.tensors:
            expected = self.manifest[self.sent] if self.sent < len(self.manifest) else None
            seen = TensorInfo.of(name, tensor)
            if seen != expected:
                raise SyncFailed(
                    f"weights: version {self.version} for {self.engine}: tensor {self.sent} is {seen.name} "
                    f"{seen.dtype} {list(seen.shape)}; the manifest has "
                    + (f"{expected.name} {expected.dtype} {list(expected.shape)}" if expected else "no more tensors")
                )
            self.sent += 1
            self.sent_bytes += tensor.numel() * tensor.element_size()
        known = bucket.checksums()
        for name, tensor in bucket.tensors:
            self.digest.add(name, tensor, known[name])
        self._deliver(bucket)

    def commit(self) -> Ack:
        """All buckets are sent; the receiver switches to them.

        Raises:
            SyncFailed: incomplete, or the receiver has something else than was sent.
        """
        if self.sent != len(self.manifest):
            missing = [info.name for info in self.manifest[self.sent : self.sent + 3]]
            raise SyncFailed(
                f"weights: version {self.version} for {self.engine}: {self.sent} of {len(self.manifest)} tensors "
                f"were sent; missing {', '.join(missing)}"
            )
        ack = self._finish()
        mine = (self.version, self.sent, self.sent_bytes, self.digest.hexdigest())
        if (ack.version, ack.tensors, ack.nbytes, ack.digest) != mine:
            raise SyncFailed(
                f"weights: version {self.version} for {self.engine}: it confirms version {ack.version}, "
                f"{ack.tensors} tensors, {ack.nbytes} bytes, digest {ack.digest}; sent were {mine[1]} tensors, "
                f"{mine[2]} bytes, digest {mine[3]}"
            )
        return ack

    @abstractmethod
    def _deliver(self, bucket: Bucket) -> None:
        """Bring a checked bucket to the receiver."""

    @abstractmethod
    def _finish(self) -> Ack:
        """End the update at the receiver and return its receipt."""

    @abstractmethod
    def abort(self) -> None:
        """Give up; the receiver's weights are void from now on. Idempotent, never raises."""


class StreamDigest:
    """Digest of names, dtypes, shapes and bytes of tensors, in order; equal on every device and transport.

    Each tensor contributes an exact 64-bit checksum computed where it lies: sum of (8-byte word * odd multiplier of
    its position) modulo 2^64, so that a changed, moved or missing word shows. BLAKE2b binds these together.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, name: str, tensor: Tensor, known: int | None = None) -> None:
        """Append one tensor; `known` is its checksum where the caller has computed it already."""
        info = TensorInfo.of(name, tensor)
        number = checksum(tensor) if known is None else known
        text = f"{info.name}\x1f{info.dtype}\x1f{','.join(map(str, info.shape))}\x1f{number:016x}\x1e"
        self._hash.update(text.encode())

    def hexdigest(self) -> str:
        """The digest of all tensors so far, 32 hexadecimal digits."""
        return self._hash.hexdigest()


_ROW_WORDS = 1 << 10
_BLOCK_ROWS = {"cpu": 1 << 7}
"""Rows that are summed at once: 1 MiB on a CPU, so that the second sum reads a core's cache and not memory again."""
_DEVICE_ROWS = 1 << 17
_MIX = 0x9E3779B97F4A7C15
_STEP = 2 * _MIX


def checksum(tensor: Tensor) -> int:
    """Exact 64-bit checksum of a tensor's bytes in logical order, computed on its device."""
    return checksums([tensor])[0]


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Those of several tensors; on a device that works asynchronously they are waited for once, not once each.

    Word i of a tensor, 8 bytes, counts (2 m i + 1) times. Cut into rows, i is row * length + column: the sums of all
    rows and of all columns are enough, and sums run at the speed of memory.
    """
    parts = [_sums(tensor) for tensor in tensors]
    on_device: dict[torch.device, list[Tensor]] = {}
    for words, _ in parts:
        on_device.setdefault(words.device, []).append(words)
    numbers = {device: iter(torch.stack(found).tolist()) for device, found in on_device.items()}
    return [(next(numbers[words.device]) + rest) & (2**64 - 1) for words, rest in parts]


def _sums(tensor: Tensor) -> tuple[Tensor, int]:
    """The checksum of a tensor's whole words, a number on its device, and that of the bytes after them."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    rest = 0
    if whole < data.numel():
        for offset, byte in enumerate(data[whole:].tolist()):
            rest += (byte + 1) * (_MIX * (offset + 3) | 1)
    body = data[:whole]
    aligned = body.data_ptr() % 8 == 0 and body.storage_offset() % 8 == 0
    words = (body if aligned else body.clone()).view(torch.int64)
    rows = words.numel() // _ROW_WORDS
    end = words[rows * _ROW_WORDS :]
    total = _dot(end, _multipliers(words.device)[: end.numel()]) + end.sum() * _signed(_STEP * rows * _ROW_WORDS)
    if rows:
        total = total + _of_rows(words[: rows * _ROW_WORDS].view(rows, _ROW_WORDS))
    return total, rest


def _of_rows(words: Tensor) -> Tensor:
    """The checksum of words that fill whole rows."""
    block = _BLOCK_ROWS.get(words.device.type, _DEVICE_ROWS)
    by_column, by_row = words[:block].sum(0), [words[:block].sum(1)]
    for start in range(block, len(words), block):
        part = words[start : start + block]
        by_column += part.sum(0)
        by_row.append(part.sum(1))
    rows = by_row[0] if len(by_row) == 1 else torch.cat(by_row)
    place = torch.arange(len(words), dtype=torch.int64, device=words.device)
    return _dot(by_column, _multipliers(words.device)) + _dot(rows, place) * _signed(_STEP * _ROW_WORDS)


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    """The odd numbers by which the words of a first row count."""
    return torch.arange(_ROW_WORDS, dtype=torch.int64, device=device) * _signed(_STEP) + 1


def _dot(words: Tensor, numbers: Tensor) -> Tensor:
    """A scalar product modulo 2^64; torch.dot has no integers on a GPU."""
    return (words * numbers).sum()


def _signed(word: int) -> int:
    """A number modulo 2^64 as torch takes it."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name such as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
