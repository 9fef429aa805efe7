"""Writing files so that a kill at any moment leaves the old content or the new, never half of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swift.errors import ResourceError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TORCH_WRITE_FAILED = ("inline_container.cc", "PytorchStreamWriter", "iostream error")
_FULL_BYTES = 16 << 20


@contextlib.contextmanager
def disk_full_is_an_error(path: Path) -> Iterator[None]:
    """Turn "no space left" on the file system of `path` into a ResourceError that names the free bytes.

    For ENOSPC and EDQUOT, also as torch and safetensors report them; anything else travels on.
    """
    try:
        yield
    except Exception as error:
        if not _is_no_space(error, path):
            raise
        raise ResourceError(
            f"disk: {path}: no space left ({_free(path)} bytes free); free some, lower --save_total_limit, "
            "or choose another --output_dir"
        ) from error


def _is_no_space(error: Exception, path: Path) -> bool:
    """Safetensors quotes the system's message; torch's zip writer only says that it failed, so the disk is asked."""
    if isinstance(error, OSError):
        return error.errno in _NO_SPACE
    if type(error).__name__ == "SafetensorError":
        return any(f"os error {number}" in str(error) for number in _NO_SPACE)
    if isinstance(error, RuntimeError) and any(word in str(error) for word in _TORCH_WRITE_FAILED):
        return _free(path) < _FULL_BYTES
    return False


def _free(path: Path) -> int:
    """Free bytes of the file system of `path`, which need not exist."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def fsync_file(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text` (UTF-8) in one step: a reader sees the old content or the new.

    Raises:
        ResourceError: when the disk is full; the old content is then intact.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_full_is_an_error(path):
        try:
            with staging.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)
        fsync_file(path.parent)


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Replace a file by `value` as JSON in one step; floats come back bit for bit (NaN and inf too).

    Raises:
        ResourceError: when the disk is full.
    """
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
