"""Access control: the bearer token, size limits of requests, and the lease of the run that owns the weights.

A request that is refused before it reaches an engine raises `Refused`: an HTTP status and a message of one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Depends
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from swift.data.images import MAX_PIXELS

Shape = TypeVar("Shape")

OPEN_PATHS = ("/health", "/health/")
"""Paths that need no token."""
AUTHENTICATED = "swift.authenticated"
"""Key of an ASGI scope: whether the request has the token, or the server needs none."""
HEADERS = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}, 411: {"Connection": "close"}}
"""Response headers of refusals, by status."""
LARGE_BYTES = 1 << 20
"""Size from which a JSON body is decoded on a thread, in bytes."""
SILENCE_S = 60
"""Timeout of a silent client, in seconds: before the end of the headers, within a body, and while it reads a reply."""
LEAST_RATE = 64 << 10
"""Minimum upload rate of a body after the first `SILENCE_S`, in bytes per second."""
LIFETIME_S = 60.0
"""Time without a request after which the lease of a run expires, in seconds. Clients send heartbeats more often."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the resources of the server that clients can use.

    body_bytes: size of a JSON body. bodies_bytes: total size of the JSON bodies over `LARGE_BYTES` that are being read.
    prompts, samples_per_prompt: per request. images, pixels: of a chat, all its images together. queue: waiting and
    running samples of all clients. queue_image_bytes: size of their images. adapter_bytes: size of an uploaded adapter.
    """

    body_bytes: int = 64 << 20
    bodies_bytes: int = 256 << 20
    prompts: int = 4096
    samples_per_prompt: int = 1024
    images: int = 64
    pixels: int = MAX_PIXELS
    queue: int = 20_000
    queue_image_bytes: int = 4 << 30
    adapter_bytes: int = 8 << 30


LIMITS = Limits()


class Refused(Exception):
    """The server refuses a request.

    Args:
        status: HTTP status.
        kind: machine-readable reason, one word.
        problem: message for people, one line.
        facts: further fields of the reply, JSON-safe.
    """

    def __init__(self, status: int, kind: str, problem: str, **facts: Any) -> None:
        super().__init__(problem)
        self.status, self.kind, self.problem, self.facts = status, kind, problem, facts

    def response(self) -> Response:
        headers = HEADERS.get(self.status)
        error = {"message": self.problem, "type": "", "code": self.status, "kind": self.kind, **self.facts}
        return json_response({"error": error}, self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON reply."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def field_error(problem: str) -> Refused:
    """Returns a refusal (422) of a field; `problem` begins with the name of the field."""
    return Refused(422, "field", problem)


def check_count(name: str, count: int, limit: int) -> None:
    """Raises Refused unless 1 <= count <= limit."""
    if count < 1:
        raise Refused(422, "limit", f"{name}: {count}: at least 1")
    if count > limit:
        raise Refused(422, "limit", f"{name}: {count}: over the limit of {limit}; send several requests", limit=limit)


class Gate:
    """ASGI middleware that checks the bearer token if the server has one."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"")
            authenticated = self.expected is None or hmac.compare_digest(given, self.expected)
            scope[AUTHENTICATED] = authenticated
            refused = None
            if not authenticated and scope["path"] not in OPEN_PATHS:
                problem = "Authorization: missing or wrong: this server needs its key as a bearer token"
                refused = Refused(401, "key", problem)
            if not authenticated and b"transfer-encoding" in headers:  # the overhead of one-byte chunks is large
                refused = Refused(411, "body", "body: chunked transfer encoding without the key: send Content-Length")
            if refused is not None:
                await refused.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


# --- bodies -----------------------------------------------------------------------------------------------------------


class LargeBodies:
    """Memory budget of the bodies over `LARGE_BYTES` of all clients."""

    def __init__(self) -> None:
        self.reserved = 0

    @contextlib.contextmanager
    def reservation(self) -> Iterator[Callable[[int], None]]:
        """Reserve memory for one body.

        Yields:
            A function to call with the size of the body as it grows; raises Refused (429).
        """
        own = 0

        def grow(size: int) -> None:
            nonlocal own
            if size <= LARGE_BYTES:
                return
            if self.reserved + size - own > LIMITS.bodies_bytes:
                limit = LIMITS.bodies_bytes
                raise Refused(429, "bodies", f"body: the large bodies would exceed {limit} bytes; try again later")
            self.reserved += size - own
            own = size

        try:
            yield grow
        finally:
            self.reserved -= own


async def read_body(http: HttpRequest, limit: int, on_size: Callable[[int], object] = lambda size: None) -> bytearray:
    """Read the body of a request.

    Args:
        http: the request.
        limit: maximum size, in bytes; also holds without a Content-Length.
        on_size: called after each part with the size so far.

    Raises:
        Refused: the body is longer (413), or its upload is too slow (408).
    """
    declared = http.headers.get("content-length", "")
    too_long = f"longer than the limit of {limit} bytes"
    if declared.isdigit() and int(declared) > limit:
        raise Refused(413, "body", f"body: {declared} bytes: {too_long}")
    data = bytearray()
    parts, began = http.stream(), time.monotonic()
    while True:
        late_s = max(0.0, time.monotonic() - began - len(data) / LEAST_RATE)
        try:
            async with asyncio.timeout(SILENCE_S - late_s):
                part = await anext(parts, None)
        except TimeoutError as error:
            problem = f"body: {SILENCE_S:g} s behind an upload rate of {LEAST_RATE >> 10} KiB/s; send it faster"
            raise Refused(408, "body", problem) from error
        if part is None:
            return data
        data += part
        if len(data) > limit:
            raise Refused(413, "body", f"body: {too_long}")
        on_size(len(data))


def kind_of(http: HttpRequest) -> str:
    """Returns the content type of a request; "json" for every JSON type."""
    kind = http.headers.get("content-type", "none").partition(";")[0].strip().lower()
    return "json" if kind.startswith("application/") and kind.endswith(("/json", "+json")) else kind


@contextlib.asynccontextmanager
async def json_of(http: HttpRequest, decode: Callable[[bytearray], Shape]) -> AsyncIterator[Shape]:
    """Read and decode a JSON body; its memory is reserved until the context ends.

    Raises Refused: the body is too long (413), is not valid (422), or exceeds the memory budget (429).
    """
    if (kind := kind_of(http)) != "json":  # browsers send other types to any site without a CORS preflight
        raise Refused(422, "body", f"body: its content type is {kind}; send application/json")
    with http.app.state.bodies.reservation() as grow:
        data = await read_body(http, LIMITS.body_bytes, grow)
        if len(data) < LARGE_BYTES:
            shape = decode(data)
        else:
            async with http.app.state.large:
                shape = await asyncio.to_thread(decode, data)
        del data
        yield shape


def json_body(shape: type[Any], *, needed: bool = True) -> Any:
    """Returns the dependency of a route on its JSON body; None if the body is absent and not `needed`."""
    return body_by(lambda data: decoded(shape, data), needed=needed)


def body_by(decode: Callable[[bytearray], Any], *, needed: bool = True) -> Any:
    """Same as `json_body`, with a decoder. The memory is released before a streamed reply begins."""

    async def read(http: HttpRequest) -> AsyncIterator[Any]:
        if not needed and http.headers.get("content-length", "0") == "0" and "transfer-encoding" not in http.headers:
            yield None
            return
        async with json_of(http, decode) as body:
            yield body

    return Depends(read, scope="function")


def decoded(shape: type[Shape], data: bytes | bytearray) -> Shape:
    """Decode JSON to this type. Raises Refused (422): the data is not valid."""
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        raise field_error(f"{where.strip('.`') or 'body'}: {problem}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(422, "body", f"body: is not valid JSON ({error})") from error


# --- the lease --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Holder:
    """The run that holds the lease. name: for messages, such as host and process. expires_at: on the caller's clock."""

    run_id: str
    name: str
    expires_at: float


class Lease:
    """The lease of the run that owns the server's weights. Pure: callers pass the time.

    A run takes the lease with its run id, and each of its requests that needs the lease renews it. Other runs are
    refused until it expires, with the name of the holder. The holder can renew an expired lease until another run takes
    it. Clients without a run id may change weights only while no run holds the lease.
    """

    def __init__(self, lifetime_s: float = LIFETIME_S) -> None:
        self.lifetime_s = lifetime_s
        self.holder: Holder | None = None
        self._resets = 0

    @contextlib.contextmanager
    def during_reset(self) -> Iterator[None]:
        """Context in which the lease does not expire: its holder waits for the engines and sends no requests."""
        self._resets += 1
        try:
            yield
        finally:
            self._resets -= 1

    def expired(self, now: float) -> Holder | None:
        """The holder if its lease has expired."""
        holder = self.holder
        return holder if holder is not None and not self._is_valid(holder, now) else None

    def _is_valid(self, holder: Holder, now: float) -> bool:
        return self._resets > 0 or holder.expires_at > now

    def take(self, run_id: str, name: str, now: float) -> bool:
        """Take the lease; returns whether the run did not hold it before. Raises Refused: another run holds it."""
        before = self.holder
        if before is not None and before.run_id != run_id and self._is_valid(before, now):
            raise self._held_by(before, now)
        self.holder = Holder(run_id, name, now + self.lifetime_s)
        return before is None or before.run_id != run_id

    def renew(self, run_id: str | None, now: float) -> None:
        """Check that a request may change the state, and renew the lease of its run.

        Raises Refused (409): another run holds the lease ("held"), or this run does not ("no_lease").
        """
        holder = self.holder
        if holder is not None and holder.run_id == run_id:
            holder.expires_at = now + self.lifetime_s
        elif holder is not None and self._is_valid(holder, now):
            raise self._held_by(holder, now)
        elif run_id is not None:
            raise Refused(409, "no_lease", f"run {run_id}: does not hold this server; POST /reset first")

    def release(self, run_id: str) -> bool:
        """Release the lease; returns whether this run held it."""
        if self.holder is None or self.holder.run_id != run_id:
            return False
        self.holder = None
        return True

    def _held_by(self, holder: Holder, now: float) -> Refused:
        left = max(0.0, holder.expires_at - now)
        return Refused(
            409,
            "held",
            f"server: held by run {holder.run_id} ({holder.name}): its lease lasts {left:.0f} s more unless it is "
            "renewed; wait for that run, end it, or use another server",
            run_id=holder.run_id,
            holder=holder.name,
            expires_in_s=left,
        )
