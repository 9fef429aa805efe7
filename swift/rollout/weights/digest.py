"""A digest of weights, computed on their device and equal on all devices."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ROW_WORDS = 1 << 10
"""Number of 8-byte words in a row."""
BLOCK_ROWS = {"cpu": 1 << 7}
"""Number of rows summed at once: 1 MiB on a CPU, so that the second of the two sums reads the core's cache."""
DEVICE_ROWS = 1 << 17
"""The same on other devices."""
MIX = 0x9E3779B97F4A7C15
STEP = 2 * MIX


class StreamDigest:
    """Digest of names, dtypes, shapes and bytes of tensors, in order.

    Each tensor contributes an exact 64-bit checksum: sum of (8-byte word * odd multiplier of its position) modulo 2^64,
    which changes with a changed, moved or missing word. The digest is BLAKE2b over all of them.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, name: str, tensor: Tensor, known: int | None = None) -> None:
        """Append a tensor; known: its checksum if the caller has computed it."""
        number = checksum(tensor) if known is None else known
        dtype, shape = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
        self._hash.update(f"{name}\x1f{dtype}\x1f{shape}\x1f{number:016x}\x1e".encode())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of tensors in this order."""
    stream = StreamDigest()
    for name, tensor in tensors:
        stream.add(name, tensor)
    return stream.hexdigest()


def checksum(tensor: Tensor) -> int:
    """Exact 64-bit checksum of a tensor's bytes in logical order, computed on its device."""
    return checksums([tensor])[0]


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """`checksum` of several tensors, with one synchronization per device.

    The multiplier of word i of a tensor is 2 m i + 1. In rows of equal length, i is row * length + column, so the sums
    of all rows and of all columns suffice, and sums run at memory bandwidth.
    """
    parts = [_sums(tensor) for tensor in tensors]
    on_device: dict[torch.device, list[Tensor]] = {}
    for words, _ in parts:
        on_device.setdefault(words.device, []).append(words)
    numbers = {device: iter(torch.stack(found).tolist()) for device, found in on_device.items()}
    return [(next(numbers[words.device]) + rest) & (2**64 - 1) for words, rest in parts]


def _sums(tensor: Tensor) -> tuple[Tensor, int]:
    """The checksum of a tensor's whole words, a scalar on its device, and that of the bytes after them."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    rest = sum((byte + 1) * (MIX * (place + 3) | 1) for place, byte in enumerate(data[whole:].tolist()))
    body = data[:whole]
    aligned = body.data_ptr() % 8 == 0 and body.storage_offset() % 8 == 0
    words = (body if aligned else body.clone()).view(torch.int64)
    rows = words.numel() // ROW_WORDS
    end = words[rows * ROW_WORDS :]
    total = _dot(end, _multipliers(words.device)[: end.numel()]) + end.sum() * _signed(STEP * rows * ROW_WORDS)
    if rows:
        total = total + _of_rows(words[: rows * ROW_WORDS].view(rows, ROW_WORDS))
    return total, rest


def _of_rows(words: Tensor) -> Tensor:
    """The checksum of words that fill whole rows."""
    by_column, by_row = torch.zeros_like(words[0]), []
    for part in words.split(BLOCK_ROWS.get(words.device.type, DEVICE_ROWS)):
        by_column += part.sum(0)
        by_row.append(part.sum(1))
    place = torch.arange(len(words), dtype=torch.int64, device=words.device)
    return _dot(by_column, _multipliers(words.device)) + _dot(torch.cat(by_row), place) * _signed(STEP * ROW_WORDS)


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    """[ROW_WORDS] the odd multipliers of the words of the first row."""
    return torch.arange(ROW_WORDS, dtype=torch.int64, device=device) * _signed(STEP) + 1


def _dot(words: Tensor, numbers: Tensor) -> Tensor:
    """Dot product modulo 2^64; torch.dot does not support integers on a GPU."""
    return (words * numbers).sum()


def _signed(word: int) -> int:
    """An integer modulo 2^64 as a signed 64-bit one."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word
