"""Weights as safetensors: files on a disk that trainer and engine share, and bytes for HTTP.

    <folder>/<run>/v0000007/bucket-0001.safetensors ...      written to a partial file, synced, renamed when complete

The writer keeps the last two versions of a run. The reader accepts only paths below its folder, with links resolved.
safetensors files hold plain tensors and cannot execute code.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from swift.errors import ConfigError, ResourceError, SyncFailed
from swift.rollout.weights.base import Bucket, TensorInfo, memory_of

KEPT_VERSIONS = 2
"""Number of versions of a run on disk: the current one, and the one that an engine may still be reading."""


def as_bytes(tensors: Sequence[tuple[str, Tensor]], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file in memory. Tied tensors are written under each of their names.

    Raises SyncFailed: a dtype that the format does not have.
    """
    seen: set[Any] = set()
    unshared: dict[str, Tensor] = {}
    for name, tensor in tensors:
        memory = memory_of(name, tensor)
        unshared[name] = tensor.detach().clone() if memory in seen else tensor.detach().cpu().contiguous()
        seen.add(memory)
    try:
        return save(unshared, metadata)
    except (SafetensorError, KeyError, ValueError) as error:
        raise SyncFailed(f"weights: cannot be written as safetensors ({error})") from error


def from_bytes(data: bytes | bytearray, what: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file in memory. Raises SyncFailed: it is not a safetensors file."""
    try:
        return load(bytes(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise SyncFailed(f"weights: {what}: is no safetensors file ({error})") from error


def metadata_of(data: bytes | bytearray) -> dict[str, str]:
    """The `__metadata__` of a safetensors file in memory; {} if there is none."""
    (length,) = struct.unpack("<Q", bytes(data[:8]))
    found = json.loads(bytes(data[8 : 8 + length])).get("__metadata__")
    return found if isinstance(found, dict) else {}


class RunFolder:
    """The files of a run below a weights folder, shared by the clients of its servers; see `open_run`."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.path = folder, folder / run
        self.users = 0
        self._written: list[str] = []  # buckets of the version that is being written
        self._complete: list[str] = []

    def add(self, bucket: Bucket, version: int) -> dict[str, str]:
        """Write a bucket to disk; returns its path below the folder and its digest. Raises ResourceError."""
        name = f"v{version:07d}"
        if not self._written or not self._written[0].startswith(f"{name}/"):
            self._written = []
        self._written.append(f"{name}/bucket-{len(self._written) + 1:04d}.safetensors")
        path = self.path / self._written[-1]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, as_bytes(bucket.tensors))
        except OSError as error:
            raise ResourceError(
                f"weights: {path}: cannot be written ({error.strerror}); free some space, or use another folder"
            ) from error
        return {"path": str(path.relative_to(self.folder)), "digest": bucket.digest()}

    def update_ended(self, version: int, *, complete: bool) -> None:
        """End an update of a server; if it is complete, remove all but the last complete versions."""
        name = f"v{version:07d}"
        self._written = []
        if not complete:
            return
        self._complete = [*(kept for kept in self._complete if kept != name), name][-KEPT_VERSIONS:]
        for path in self.path.iterdir():
            if path.name not in self._complete:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Give the files up; the last `close` removes them, as other clients may have to send them again."""
        with _sharing:
            self.users -= 1
            if self.users == 0:
                del _runs[self.path]
                shutil.rmtree(self.path, ignore_errors=True)


_runs: dict[Path, RunFolder] = {}
_sharing = threading.Lock()


def open_run(folder: Path, run: str) -> RunFolder:
    """The files of a run, shared within this process; every call needs its own `close`."""
    folder = folder.resolve()
    with _sharing:
        shared = _runs.setdefault(folder / run, RunFolder(folder, run))
        shared.users += 1
        return shared


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears under its name when it is complete on disk."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inside(folder: Path | None, name: str) -> Path:
    """The file or folder `name`, absolute or below `folder`, with every link resolved.

    Raises ConfigError: no folder is configured, it lies elsewhere, or it does not exist.
    """
    if folder is None:
        raise ConfigError(f"path: {name}: this server takes no paths; start it with --weights_folder")
    root = folder.resolve()
    try:
        path = (root / name).resolve()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, or a loop of links
        raise ConfigError(f"path: {name[:80]}: is no path ({error}); use one below --weights_folder") from error
    if path == root or root not in path.parents:
        raise ConfigError(f"path: {name}: is not below the weights folder; use a path below --weights_folder")
    if not exists:
        raise ConfigError(f"path: {name}: does not exist below the weights folder; is the disk the same?")
    return path


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, by a path without links.

    Raises OSError: it does not exist, is a pipe, device or folder (reading may block), or the path has a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    regular, opened = stat.S_ISREG(os.fstat(descriptor).st_mode), Path(f"/proc/self/fd/{descriptor}").readlink()
    if regular and opened == path:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"it leads to {opened}" if regular else "it is no regular file")


def read_bucket(path: Path, wanted: Sequence[TensorInfo], digest: str | None) -> Bucket:
    """The tensors of a file, in the order of the manifest, memory-mapped.

    Args:
        path: of the file.
        wanted: tensors of the manifest that have not arrived; the file has the first of them.
        digest: expected digest of the content; None does not check it.

    Raises:
        SyncFailed: the file cannot be read, or has other content.
    """
    try:
        with open_regular(path) as opened, safe_open(f"/dev/fd/{opened.fileno()}", framework="pt") as file:
            bucket = in_order({name: file.get_tensor(name) for name in file.keys()}, path.name, wanted)  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SyncFailed(f"weights: {path.name}: cannot be read ({error})") from error
    if digest is not None and bucket.digest() != digest:
        raise SyncFailed(f"weights: {path.name}: its content has digest {bucket.digest()}; announced was {digest}")
    return bucket


def in_order(tensors: dict[str, Tensor], what: str, wanted: Sequence[TensorInfo]) -> Bucket:
    """A bucket in the order of the manifest. Raises SyncFailed: its tensors are not the next ones of the manifest."""
    following = [info.name for info in wanted[: len(tensors)]]
    unexpected = sorted(tensors.keys() - {info.name for info in wanted})
    if unexpected:
        raise SyncFailed(f"weights: {what}: {unexpected[0]}: is not expected, or came already")
    missing = [name for name in following if name not in tensors]
    if missing:
        raise SyncFailed(f"weights: {what}: {missing[0]}: is missing; the manifest has it before what came")
    return Bucket([(name, tensors[name]) for name in following])
