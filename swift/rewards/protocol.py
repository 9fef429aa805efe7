"""Messages between the pool and its workers: length-prefixed pickles over a socket pair.

Both ends are processes of this program on this machine; nothing from outside reaches the socket. A frame
is 8 bytes of length (big endian), then the pickle.

| pool to worker | |
|---|---|
| ("load", LoadSpec) | first message: plugins to import, entries to build |
| ("call", call_id, functions, payload, samples, seed) | run these functions on these samples of a payload |

| worker to pool | |
|---|---|
| ("ready",) | loaded; may be called |
| ("failed", kind, problems) | loading failed for good: kind "config" or "reward" |
| ("started", call_id, function) | the clock of this function's call starts now |
| ("done", call_id, function, Outcome) | its result |
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

_HEADER = struct.Struct(">Q")

OutcomeKind = Literal["ok", "exception", "contract", "timeout", "crash"]


@dataclass
class Outcome:
    """What one call of one function gave.

    `values` has one entry per sample when `kind` is "ok"; otherwise `detail` is one line that says what
    happened. `seconds` is the duration; `counters` what the function counted (gold answers without a parse).
    """

    kind: OutcomeKind
    values: list[float | None] = field(default_factory=list)
    detail: str = ""
    seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class LoadSpec:
    """What a worker builds before its first call.

    Attributes:
        functions: names in the registry; calls refer to them by position.
        plugins: plugin files, absolute.
        flags: all flags of the run by canonical name.
        aliases: alias -> canonical name, readable on `args` too.
        tokenizer: folder of the policy's tokenizer, for classes that ask for it.
        timeout_s: limit of an awaited call, which the worker itself cancels.
        memory_bytes: limit of the worker's own memory; None means no limit.
    """

    functions: list[str]
    plugins: list[str]
    flags: dict[str, Any]
    aliases: dict[str, str]
    tokenizer: str | None
    timeout_s: float
    memory_bytes: int | None


def encode(message: Any) -> bytes:
    """One frame, ready to be written."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages, whatever pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Adds `data` and yields every message that is complete now."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield pickle.loads(body)
