"""Weights as safetensors files on a disk that trainer and engine share, and safetensors as bytes for the wire.

    <folder>/<run>/v0000007/bucket-0001.safetensors ...      written beside, synced, renamed: a name is a whole file
    <folder>/<run>/v0000007/manifest.json                    once all buckets are there

The writer keeps the last two versions of a run. The reader takes paths below one folder only, with links resolved, and
reads plain tensors: nothing in these files can run code.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swift.errors import ConfigError, ResourceError, SyncFailed
from swift.rollout.weights.base import AdapterWeights, Bucket, StreamDigest, TensorInfo

KEPT_VERSIONS = 2
"""Versions of a run that stay on disk: the present one, and the one that an engine may still be reading."""

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The format's names of types."""

ALIGNMENT = 8
"""The header is padded to this, so that tensors can be read where they lie."""


# --- the format -----------------------------------------------------------------------------------------------------


def encoded(
    tensors: Sequence[tuple[str, Tensor]], metadata: dict[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file, in order. Tied tensors are written under each of their names.

    Raises:
        SyncFailed: a type that the format does not have.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors:
        kind = NAMES.get(tensor.dtype)
        if kind is None:
            raise SyncFailed(f"weights: {name}: safetensors has no type for {tensor.dtype}")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        yield flat.cpu().numpy().data


def as_bytes(tensors: Sequence[tuple[str, Tensor]], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file in memory."""
    return b"".join(encoded(tensors, metadata))


def from_bytes(data: bytes | bytearray, what: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file in memory.

    Raises:
        SyncFailed: it is none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(bytes(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise SyncFailed(f"weights: {what}: is no safetensors file ({error})") from error


def metadata_of(data: bytes | bytearray | memoryview) -> dict[str, str]:
    """The `__metadata__` of a safetensors file in memory; {} when there is none."""
    (length,) = struct.unpack("<Q", bytes(data[:8]))
    found = json.loads(bytes(data[8 : 8 + length])).get("__metadata__")
    return found if isinstance(found, dict) else {}


def digest_of(tensors: Sequence[tuple[str, Tensor]], checksums: dict[str, int] | None = None) -> str:
    """Digest over names and bytes in order; `checksums` are those that are known already."""
    stream = StreamDigest()
    for name, tensor in tensors:
        stream.add(name, tensor, (checksums or {}).get(name))
    return stream.hexdigest()


# --- writing --------------------------------------------------------------------------------------------------------


class VersionWriter:
    """One version of the weights on its way to the disk; threads of several updates may share it.

    Args:
        folder: that both sides see.
        run: id of the run; a folder of its own.
        version: of the policy.

    Raises:
        ResourceError: the folder cannot be written.
    """

    def __init__(self, folder: Path, run: str, version: int) -> None:
        self.root = folder / run
        self.path = self.root / f"v{version:07d}"
        self.version = version
        self.over = False
        self._entries: list[dict[str, str]] = []
        self._lock = threading.Lock()
        with _writing(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)

    def add(self, bucket: Bucket) -> dict[str, str]:
        """Write a bucket; returns its path below the folder and its digest, once the disk has it."""
        with self._lock:
            name = f"bucket-{len(self._entries) + 1:04d}.safetensors"
            with _writing(self.path / name):
                write_whole(self.path / name, encoded(bucket.tensors))
            entry = {
                "path": str((self.path / name).relative_to(self.root.parent)),
                "digest": digest_of(bucket.tensors, bucket.staged.get("checksums")),
            }
            self._entries.append(entry)
            return entry

    def finish(self, manifest: Sequence[TensorInfo]) -> None:
        """All buckets are there: say so once, and forget the versions before the last ones."""
        listed = [[info.name, info.dtype, list(info.shape)] for info in manifest]
        with self._lock:
            if self.over:
                return
            text = json.dumps({"version": self.version, "buckets": self._entries, "manifest": listed})
            with _writing(self.path / "manifest.json"):
                write_whole(self.path / "manifest.json", [text.encode()])
            _forget_old(self.root)
            self.over = True

    def abandon(self) -> None:
        """It will not be finished; one that is stays, for the servers that have confirmed it."""
        with self._lock:
            if not self.over:
                self.over = True
                shutil.rmtree(self.path, ignore_errors=True)


class RunFolder:
    """What a run has below a weights folder. All its servers that see the folder share one; see `open_run`.

    Args:
        folder: that both sides see.
        run: id of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self.users = 0
        self._writer: VersionWriter | None = None

    def writer(self, version: int) -> VersionWriter:
        """Of the update to this version, the same for every server that takes part in it.

        Raises:
            ResourceError: the folder cannot be written.
        """
        with _sharing:
            if self._writer is None or self._writer.over or self._writer.version != version:
                self._writer = VersionWriter(self.folder, self.run, version)
            return self._writer

    def close(self) -> None:
        """The last one to close removes the files: the others may have to send them again."""
        with _sharing:
            self.users -= 1
            if self.users == 0:
                del _runs[self.folder, self.run]
                shutil.rmtree(self.folder / self.run, ignore_errors=True)


_runs: dict[tuple[Path, str], RunFolder] = {}
_sharing = threading.Lock()


def open_run(folder: Path, run: str) -> RunFolder:
    """The files of a run, shared within this process; every call needs a `close` of its own."""
    key = (folder.resolve(), run)
    with _sharing:
        shared = _runs.setdefault(key, RunFolder(*key))
        shared.users += 1
        return shared


def _forget_old(root: Path) -> None:
    """Keep the newest versions that are whole; what was never finished is older than they are, or in progress."""
    manifests = sorted(root.glob("v*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    whole = [path.parent for path in manifests]  # by time: rehearsals have high numbers
    for path in whole[:-KEPT_VERSIONS]:
        shutil.rmtree(path, ignore_errors=True)


def write_whole(path: Path, parts: Iterator[bytes | memoryview] | Sequence[bytes]) -> None:
    """A file that has its name only once the disk has all of it."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _writing:  # noqa: N801 - reads as a statement
    """Turns what the disk refuses into one line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise ResourceError(
                f"weights: {self.path}: cannot be written ({error.strerror}); free some space, or use another folder"
            ) from error


# --- reading --------------------------------------------------------------------------------------------------------


def inside(folder: Path | None, name: str) -> Path:
    """The file or folder `name`, absolute or below `folder`, with every link resolved.

    Raises:
        ConfigError: no folder is configured, it lies elsewhere, or it does not exist.
    """
    if folder is None:
        raise ConfigError(f"path: {name}: this server takes no paths; start it with --weights_folder")
    root = folder.resolve()
    path = root if "\0" in name else (root / name).resolve()
    if path == root or root not in path.parents:
        raise ConfigError(f"path: {name}: is not below the weights folder; use a path below --weights_folder")
    if not path.exists():
        raise ConfigError(f"path: {name}: does not exist below the weights folder; is the disk the same?")
    return path


def read_bucket(path: Path, wanted: Sequence[TensorInfo], digest: str | None) -> Bucket:
    """The tensors of a file, in the order of the manifest, mapped and not copied.

    Args:
        path: of the file.
        wanted: what it should hold next; it may hold fewer.
        digest: of its content, compared when given.

    Raises:
        SyncFailed: it holds something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            tensors = [(info.name, file.get_tensor(info.name)) for info in wanted if info.name in held]
    except (SafetensorError, OSError) as error:
        raise SyncFailed(f"weights: {path.name}: cannot be read ({error})") from error
    check_order(path.name, held, [name for name, _ in tensors], wanted)
    if digest is not None and digest_of(tensors) != digest:
        raise SyncFailed(f"weights: {path.name}: its content has digest {digest_of(tensors)}; announced was {digest}")
    return Bucket(tensors)


def in_order(tensors: dict[str, Tensor], what: str, wanted: Sequence[TensorInfo]) -> Bucket:
    """A bucket in the order of the manifest.

    Raises:
        SyncFailed: it is not what the manifest has next.
    """
    ordered = [(info.name, tensors[info.name]) for info in wanted if info.name in tensors]
    check_order(what, set(tensors), [name for name, _ in ordered], wanted)
    return Bucket(ordered)


def check_order(what: str, held: set[str], found: Sequence[str], wanted: Sequence[TensorInfo]) -> None:
    """Raises SyncFailed unless a file holds exactly the next tensors of the manifest."""
    strangers = sorted(held - set(found))
    if strangers:
        raise SyncFailed(f"weights: {what}: {strangers[0]}: is not expected, or came already")
    following = [info.name for info in wanted[: len(found)]]
    missing = [name for name in following if name not in held]
    if missing:
        raise SyncFailed(f"weights: {what}: {missing[0]}: is missing; the manifest has it before what came")


def read_adapter_folder(path: Path) -> AdapterWeights:
    """A LoRA adapter as peft saves it.

    Raises:
        ConfigError: the folder lacks a file, or holds something else.
    """
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    for file in (config, weights):
        if not file.is_file() or path.resolve() not in file.resolve().parents:
            raise ConfigError(f"adapter: {path.name}: has no {file.name} of its own; give the folder that peft saved")
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"adapter: {path.name}: adapter_config.json: is not valid JSON ({error})") from error
    tensors = from_bytes(weights.read_bytes(), f"{path.name}/{weights.name}")
    return AdapterWeights(parsed, tensors)
