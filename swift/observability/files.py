"""Writing files so that a kill at any moment leaves the old content or the new, never half of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, ResourceError, first_line

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TORCH_WRITE_FAILED = ("inline_container.cc", "PytorchStreamWriter", "iostream error", "Parent directory")
_FULL_BYTES = 16 << 20


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system, torch or safetensors raise because they cannot write to `path` into a ResourceError."""
    try:
        yield
    except Exception as error:
        if (reason := _reason(error, path)) is None:
            raise
        raise ResourceError(f"disk: {path}: {reason}") from error


def _reason(error: Exception, path: Path) -> str | None:
    """The reason why a write failed; None if the error is not about writing.

    Safetensors quotes the system's message; torch's zip writer gives no cause, so the free space decides.
    """
    number: int | None = None
    if isinstance(error, OSError):
        number = error.errno
    elif type(error).__name__ == "SafetensorError" and (found := re.search(r"os error (\d+)", str(error))):
        number = int(found[1])
    elif not isinstance(error, RuntimeError) or not any(word in str(error) for word in _TORCH_WRITE_FAILED):
        return None
    elif free_bytes(path) < _FULL_BYTES:
        number = errno.ENOSPC
    if number in _NO_SPACE:
        return (
            f"no space left ({free_bytes(path)} bytes free); free some, lower --save_total_limit, or choose another "
            "--output_dir"
        )
    fix = "check its mount and ulimit -f" if path.parent.exists() else "its folder is gone"
    if number == errno.EMFILE:
        fix = "raise the limit of open files (ulimit -n)"
    return f"cannot be written ({os.strerror(number) if number else first_line(error)}); {fix}"


def check_writable(folder: Path) -> None:
    """Refuse an `--output_dir` that cannot be written, whether it exists yet or not; creates no file."""
    place = folder.expanduser().absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise
        reason = f"cannot be written ({error.strerror})" if place.is_dir() else f"{place} is a file"
        raise ConfigError(f"--output_dir: {folder}: {reason}; choose another folder") from error


def free_bytes(path: Path) -> int:
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
    """Replace a file by `text` (UTF-8) in one step: a reader sees the old content or the new; so after a full disk."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
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
    """Replace a file by `value` as JSON in one step; floats come back bit for bit (NaN and inf too)."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
