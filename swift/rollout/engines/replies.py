"""HTTP replies with limits on size and time: the other process may be broken, hostile, or another program.

The timeout of a call holds for the headers and for the whole reply; in a stream of lines it holds for each line. A
reply is not decompressed unless the caller expects it, since a few bytes can expand to any size. Redirects are not
followed, since another host would get the API key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from swift.errors import EngineError, first_line
from swift.rollout.engines.events import Late, Lost
from swift.rollout.engines.process import on_thread

REPLY_BYTES = 64 << 20
"""Maximum size of a reply, in bytes."""
LEAST_RATE = 64 << 10
"""Minimum transfer rate of a long line or request, in bytes per second."""
HEADERS = {"Accept-Encoding": "identity"}
"""Headers of every request."""

Shape = TypeVar("Shape")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply."""

    status_code: int
    content: bytes

    def read(self, shape: type[Shape], name: str) -> Shape:
        """Decode its JSON. Raises EngineError, prefixed with the name of the server: the JSON is not of this type."""
        try:
            return msgspec.json.decode(self.content, type=shape)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise EngineError(f"{name}: {first_line(error)}; is this a `swift rollout` server?") from error


def whole(
    http: httpx.Client,
    method: str,
    path: str,
    timeout: httpx.Timeout,
    limit_bytes: int = REPLY_BYTES,
    *,
    decompress: bool = False,
    **options: Any,
) -> Reply:
    """Send a request and read the whole reply. Raises Lost: no reply in time, or more than `limit_bytes`."""
    limit_s = float(timeout.read or 0)

    def work() -> Reply:
        began = time.monotonic()
        request = http.build_request(method, path, timeout=timeout, **options)
        reply = http.send(request, stream=True)
        try:
            parts = reply.iter_bytes() if decompress else None
            return rest(reply, limit_s - (time.monotonic() - began), limit_bytes, parts)
        finally:
            reply.close()

    return _in_time(work, f"{method} {path}", limit_s, lambda future: None)


@contextmanager
def streamed(
    http: httpx.Client, path: str, timeout: httpx.Timeout, content: bytes, headers: dict[str, str]
) -> Iterator[httpx.Response]:
    """Send a POST and yield its reply for `lines`. Raises Lost: no headers in time."""
    request = http.build_request("POST", path, timeout=timeout, content=content, headers=headers)
    limit_s = float(timeout.read or 0) + len(content) / LEAST_RATE
    reply = _in_time(lambda: http.send(request, stream=True), f"POST {path}", limit_s, _close)
    try:
        yield reply
    finally:
        reply.close()


def rest(
    reply: httpx.Response, limit_s: float, limit_bytes: int = REPLY_BYTES, parts: Iterator[bytes] | None = None
) -> Reply:
    """Read the body of a reply. Raises Lost: it is not complete in time, or longer than `limit_bytes`.

    parts: parts of the body; None reads them without decompression.
    """
    content, deadline = bytearray(), time.monotonic() + limit_s
    for part in parts or _raw(reply):
        content += part
        if len(content) > limit_bytes:
            raise Lost(f"its reply is longer than {limit_bytes >> 20} MiB")
        if time.monotonic() > deadline:
            raise Late(f"no complete reply within {limit_s:g} s")
    return Reply(reply.status_code, bytes(content))


def lines(reply: httpx.Response, limit_bytes: int, limit_s: float) -> Iterator[bytes]:
    """Yield the lines of a reply, stripped; empty lines are skipped.

    Raises Lost: a line is longer than `limit_bytes`, or is not complete within `limit_s` (a long line at `LEAST_RATE`).
    """
    buffer, began = bytearray(), time.monotonic()
    for part in _raw(reply):
        searched = len(buffer)
        buffer += part
        while (end := buffer.find(b"\n", searched)) >= 0:
            line = bytes(buffer[:end]).strip()
            del buffer[: end + 1]
            searched = 0
            if line:
                yield line
                began = time.monotonic()
        if len(buffer) > limit_bytes:
            raise Lost(f"its reply has a line longer than {limit_bytes} bytes")
        if time.monotonic() - began > limit_s + len(buffer) / LEAST_RATE:
            raise Lost(f"its reply has stalled: no complete line within {limit_s:g} s")


def _raw(reply: httpx.Response) -> Iterator[bytes]:
    """Yield the parts of the body without decompression. Raises Lost."""
    if encoding := reply.headers.get("content-encoding", "").strip():
        raise Lost(f"its reply is compressed ({encoding[:20]}), against the Accept-Encoding of the request")
    try:
        yield from reply.iter_raw()
    except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:
        raise Lost(first_line(error)) from error


def _in_time(work: Callable[[], T], name: str, limit_s: float, on_late: Callable[[Future[T]], None]) -> T:
    """Run work on a thread with a total timeout; httpx has timeouts for each read only.

    on_late: called when work ends after the timeout.
    """
    future = on_thread(work, name)
    try:
        return future.result(limit_s)
    except httpx.TimeoutException as error:
        raise Late(first_line(error)) from error
    except TimeoutError:
        future.add_done_callback(on_late)
        raise Late(f"no answer within {limit_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
        raise Lost(first_line(error)) from error


def _close(future: Future[httpx.Response]) -> None:
    if future.exception() is None:
        future.result().close()
