"""Replies of another process over HTTP, bounded in size and time: it may be broken, hostile, or another program.

A head has to come within the time of the call, and so does a whole reply. Lines have to come one after the other.
Nothing is decompressed unless a caller expects it, and no redirect is followed: a few bytes could stand for any number,
and the key for anybody.
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
"""Longest reply to one call."""
LEAST_RATE = 64 << 10
"""Bytes per second that a long line, or a long request, has to travel at."""
HEADERS = {"Accept-Encoding": "identity"}
"""Of every request."""

Shape = TypeVar("Shape")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that came whole."""

    status_code: int
    content: bytes

    def read(self, shape: type[Shape], name: str) -> Shape:
        """Its JSON. Raises EngineError, in the name of the server: it has another shape."""
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
    """One request and its reply. Raises Lost: none came, or not in time, or more than `limit_bytes`."""
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

    return _in_time(work, f"{method} {path}", limit_s, lambda late: None)


@contextmanager
def streamed(
    http: httpx.Client, path: str, timeout: httpx.Timeout, content: bytes, headers: dict[str, str]
) -> Iterator[httpx.Response]:
    """A POST whose reply is read by `lines`. Raises Lost: no head came in time."""
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
    """All of a reply whose head has come. Raises Lost: it does not come in time, or is more than `limit_bytes`.

    parts: of its body, by default as they came.
    """
    content, deadline = bytearray(), time.monotonic() + limit_s
    for part in parts or _raw(reply):
        content += part
        if len(content) > limit_bytes:
            raise Lost(f"its reply is longer than {limit_bytes >> 20} MiB")
        if time.monotonic() > deadline:
            raise Late(f"no whole answer within {limit_s:g} s")
    return Reply(reply.status_code, bytes(content))


def lines(reply: httpx.Response, limit_bytes: int, limit_s: float) -> Iterator[bytes]:
    """Lines that are not empty, without their ends.

    Raises Lost: one is longer than `limit_bytes`, or does not come within `limit_s` (a long one at `LEAST_RATE`).
    """
    begun, began = bytearray(), time.monotonic()
    for part in _raw(reply):
        seen = len(begun)
        begun += part
        while (end := begun.find(b"\n", seen)) >= 0:
            line = bytes(begun[:end]).strip()
            del begun[: end + 1]
            seen = 0
            if line:
                yield line
                began = time.monotonic()
        if len(begun) > limit_bytes:
            raise Lost(f"its reply has a line longer than {limit_bytes} bytes")
        if time.monotonic() - began > limit_s + len(begun) / LEAST_RATE:
            raise Lost(f"its reply stands still: no whole line within {limit_s:g} s")


def _raw(reply: httpx.Response) -> Iterator[bytes]:
    """The body as it came, or Lost."""
    if encoding := reply.headers.get("content-encoding", "").strip():
        raise Lost(f"its reply is compressed ({encoding[:20]}), which nobody asked for")
    try:
        yield from reply.iter_raw()
    except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:
        raise Lost(first_line(error)) from error


def _in_time(work: Callable[[], T], name: str, limit_s: float, late: Callable[[Future[T]], None]) -> T:
    """What comes of work on a thread; a client's time limits are for each piece of a head, not for all of it."""
    future = on_thread(work, name)
    try:
        return future.result(limit_s)
    except httpx.TimeoutException as error:
        raise Late(first_line(error)) from error
    except TimeoutError:
        future.add_done_callback(late)
        raise Late(f"no answer within {limit_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
        raise Lost(first_line(error)) from error


def _close(late: Future[httpx.Response]) -> None:
    if late.exception() is None:
        late.result().close()
