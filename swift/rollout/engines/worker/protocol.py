"""What travels between a worker and its parent: frames of JSON over a Unix socket, with file descriptors beside them.

A frame is 4 bytes of length (big endian) and that many bytes of UTF-8 JSON. `"fds": n` in it says that n descriptors
(SCM_RIGHTS) belong to it. JSON carries float32 exactly, and NaN as such, so that the parent sees what the engine said.

    parent -> worker    {"id": n, "call": name, ...}
    worker -> parent    {"id": n, "reply": value}  or  {"id": n, "error": ...}       once for every call
                        {"event": "completion" | "refused" | "failed" | ..., ...}     unasked, in order

No pickle, and nothing that would let one side run code in the other: calls are looked up in a table.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import swift.errors
from swift.errors import EngineError, SwiftError
from swift.types import Completion, Request, SamplingParams

MAX_FRAME_BYTES = 64 << 20
"""Longest frame; a bucket's table of contents takes some hundred bytes per tensor."""
MAX_FDS = 8
"""Most descriptors with one frame."""
READ_BYTES = 1 << 20
_HEADER = struct.Struct(">I")

Message = dict[str, Any]


class ProtocolError(EngineError):
    """The other side sent something that is no frame."""


def encode(message: Message) -> bytes:
    """One frame.

    Raises:
        ProtocolError: it would be longer than `MAX_FRAME_BYTES`.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"worker: frame: {len(body)} bytes: longer than {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Cuts a stream into messages, whatever pieces it arrives in, and hands each its descriptors.

    Descriptors that were received but belong to no complete message are closed with `close`.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Sequence[int] = ()) -> Iterator[tuple[Message, list[int]]]:
        """Adds what came and yields every message that is complete now.

        Raises:
            ProtocolError: no JSON object, too long, or without the descriptors it names.
        """
        self._buffer += data
        self._descriptors.extend(descriptors)
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"worker: frame: {length} bytes: longer than {MAX_FRAME_BYTES}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield self._message(body)

    def _message(self, body: bytes) -> tuple[Message, list[int]]:
        try:
            message = json.loads(body)
            count = int(message.get("fds", 0))
        except (ValueError, AttributeError, TypeError) as error:
            raise ProtocolError(f"worker: frame: {body[:80]!r}: no JSON object") from error
        if not 0 <= count <= len(self._descriptors):
            raise ProtocolError(f"worker: frame: {count} descriptors named, {len(self._descriptors)} came")
        return message, [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close descriptors that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.popleft())


def read(connection: socket.socket) -> tuple[bytes, list[int]]:
    """What can be read now; b"" at the end of the stream."""
    width = array.array("i").itemsize
    data, ancillary, _, _ = connection.recvmsg(READ_BYTES, socket.CMSG_LEN(MAX_FDS * width))
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % width])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data, list(descriptors)


def write(connection: socket.socket, data: bytes | memoryview, descriptors: Sequence[int] = ()) -> int:
    """Send some of the data, the descriptors with its first byte; returns how many bytes went."""
    if not descriptors:
        return connection.send(data)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return connection.sendmsg([data], [rights])


# --- what frames hold ---------------------------------------------------------------------------------------------


def request_to_json(request: Request) -> Message:
    """A request as JSON."""
    return {"id": request.request_id, "prompt": list(request.prompt_ids), "sampling": asdict(request.sampling)}


def request_from_json(state: Message) -> Request:
    """The inverse of `request_to_json`."""
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in state["sampling"].items()
    }
    return Request(state["id"], state["prompt"], SamplingParams(**sampling))


def completion_to_json(completion: Completion) -> Message:
    """A completion as JSON."""
    return asdict(completion)


def completion_from_json(state: Message) -> Completion:
    """The inverse of `completion_to_json`."""
    versions = [(version, start, end) for version, start, end in state["versions"]]
    return Completion(**{**state, "versions": versions})


def error_to_json(error: BaseException) -> Message:
    """An error as JSON; what is not a `SwiftError` is named by its type."""
    if not isinstance(error, SwiftError):
        line = (str(error).strip().splitlines() or [""])[0]
        return {"type": "", "problems": [f"{type(error).__name__}: {line}"], "state": {}}
    state = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
    return {"type": type(error).__name__, "problems": error.problems, "state": state}


def error_from_json(state: Message, name: str) -> SwiftError:
    """The same type of error, in the worker's name; a type that is not ours becomes `EngineError`."""
    kind = getattr(swift.errors, str(state["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, SwiftError)):
        kind = EngineError
    error: SwiftError = kind.__new__(kind)
    first, *rest = state["problems"]
    SwiftError.__init__(error, f"{name}: {first}", *rest)
    error.__dict__.update(state["state"])
    return error
