"""The new lines of a file that grows, and what a file that was replaced means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 8 << 20
"""Bytes that are read at a time; a longer line is read whole."""


@dataclass
class Tail:
    """Reads a file of lines from where it ended last.

    offset: of the first byte that is not read yet. A last line without its end waits for the rest.
    """

    path: Path
    offset: int = 0
    _inode: int = 0

    def size(self) -> int:
        """Bytes of the file; 0 if there is none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def replaced(self) -> bool:
        """Whether the file is another, or shorter, than the one that was read; then it is read from its start."""
        if not self.path.exists():
            return self._begin_again(0) if self.offset else False
        status = self.path.stat()
        if status.st_size >= self.offset and self._inode in (0, status.st_ino):
            self._inode = status.st_ino
            return False
        return self._begin_again(status.st_ino)

    def _begin_again(self, inode: int) -> bool:
        self.offset, self._inode = 0, inode
        return True

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines that are new: the offset of a block, and its bytes."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            wanted = BLOCK_BYTES
            while True:
                data = os.pread(file.fileno(), wanted, self.offset)
                end = data.rfind(b"\n") + 1
                if end:
                    start, self.offset, wanted = self.offset, self.offset + end, BLOCK_BYTES
                    yield start, data[:end]
                elif len(data) < wanted:
                    return
                else:
                    wanted *= 2
