"""Buckets in memory that two processes of one host share, without a name that could be left behind.

The segment is an anonymous file. Its descriptor travels over the worker's socket (SCM_RIGHTS); the receiver maps it,
so it exists just as long as somebody holds it: no path leaves it over, not even SIGKILL of both sides. The mapping is
private: a receiver that writes into it changes its own copy. One segment serves every receiver of a bucket.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.weight_sync.base import Bucket
from swift.rollout.weight_sync.packing import Entry, lay_out, pack_into, staged, unpack


class Segment:
    """An anonymous file with one bucket; closed when nothing refers to it any more.

    Args:
        bucket: copied into it.
        folder: keep the bytes in an unlinked file there instead of in memory.

    Raises:
        SyncFailed: there is no room.
    """

    def __init__(self, bucket: Bucket, folder: Path | None = None) -> None:
        self.entries, self.size = lay_out(bucket.tensors)
        self.descriptor = _anonymous(folder)
        self._closed = weakref.finalize(self, os.close, self.descriptor)
        length = max(self.size, 1)
        try:
            os.ftruncate(self.descriptor, length)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, length)  # or writing would end in SIGBUS
        except OSError as error:
            raise SyncFailed(
                f"weights: {length} bytes of {folder or 'shared memory'} for a bucket: {error.strerror}; "
                "--move_model_batches makes buckets smaller"
            ) from error
        flat = _mapped(self.descriptor, length, shared=True)
        pack_into(flat, bucket.tensors, self.entries)

    def header(self) -> dict[str, Any]:
        """What the receiver needs besides the descriptor; JSON-safe."""
        return {"entries": [list(entry) for entry in self.entries], "size": self.size}

    def tensors(self) -> list[tuple[str, Tensor]]:
        """What it holds, mapped anew."""
        return receive(self.header(), os.dup(self.descriptor))


def stage(bucket: Bucket, folder: Path | None = None) -> Segment:
    """The bucket's segment, made at the first call."""
    return staged(bucket, "shared_memory", lambda: Segment(bucket, folder))


def receive(header: dict[str, Any], descriptor: int) -> list[tuple[str, Tensor]]:
    """The tensors of a segment; owns the descriptor. They live as long as their memory is referred to.

    Raises:
        SyncFailed: the segment is smaller than its header says.
    """
    try:
        size, length = os.fstat(descriptor).st_size, max(int(header["size"]), 1)
        if size < length:
            raise SyncFailed(f"weights: a segment of {size} bytes came for a bucket of {length}")
        flat = _mapped(descriptor, length, shared=False)
    finally:
        os.close(descriptor)
    return unpack(flat[: header["size"]], _entries(header["entries"]))


def _entries(entries: Sequence[Sequence[Any]]) -> list[Entry]:
    return [(str(name), str(dtype), tuple(shape), int(offset)) for name, dtype, shape, offset in entries]


def _mapped(descriptor: int, length: int, *, shared: bool) -> Tensor:
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    memory = mmap.mmap(descriptor, length, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # holds the mapping


def _anonymous(folder: Path | None) -> int:
    if folder is None and hasattr(os, "memfd_create"):
        return os.memfd_create("swift-weights", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
