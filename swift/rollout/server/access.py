"""Who may ask what of the server: bearer token, limits of a request, and the lease of the run that owns the weights.

Everything that is refused before it reaches an engine is a `Refused`: an HTTP status, and one line for people.
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

Shape = TypeVar("Shape")

OPEN_PATHS = ("/health", "/health/")
"""Answered without a token."""
KNOWN = "swift.known"
"""Entry of a request's scope: it came with the token, or none is needed."""
HEADERS = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}, 411: {"Connection": "close"}}
"""Of refusals, by status."""
LARGE_BYTES = 1 << 20
"""A JSON body of this length is decoded beside the event loop."""
SILENCE_S = 60
"""Longest pause of a client: before the end of a head, within a body, in taking an answer."""
LEAST_RATE = 64 << 10
"""Bytes that have to come per second of a body, after the first `SILENCE_S`."""
LIFETIME_S = 60.0
"""How long a silent run keeps the lease. Clients send a sign of life several times in that time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client can make the server hold.

    body_bytes: of a JSON body. bodies_bytes: of all JSON bodies over `LARGE_BYTES` that are being read. prompts,
    samples_per_prompt: of one request. queue: samples that wait or run, of all clients together. adapter_bytes: of an
    adapter that is uploaded. update_idle_s: silence after which a weight update is aborted.
    """

    body_bytes: int = 64 << 20
    bodies_bytes: int = 256 << 20
    prompts: int = 4096
    samples_per_prompt: int = 1024
    queue: int = 20_000
    adapter_bytes: int = 8 << 30
    update_idle_s: float = 300.0


LIMITS = Limits()


class Refused(Exception):
    """A request that is not carried out.

    Args:
        status: HTTP status.
        kind: one word for programs.
        problem: one line for people.
        facts: more for programs, JSON-safe.
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
    """422 for a field; `problem` names it first."""
    return Refused(422, "field", problem)


def check_count(name: str, seen: int, limit: int) -> None:
    """Raises Refused unless 1 <= seen <= limit."""
    if seen < 1:
        raise Refused(422, "limit", f"{name}: {seen}: at least 1")
    if seen > limit:
        raise Refused(422, "limit", f"{name}: {seen}: over the limit of {limit}; send several requests", limit=limit)


class Gate:
    """ASGI middleware that asks for the bearer token, if there is one."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"")
            known = scope[KNOWN] = self.expected is None or hmac.compare_digest(given, self.expected)
            refused = None
            if not known and scope["path"] not in OPEN_PATHS:
                problem = "Authorization: missing or wrong: this server needs its key as a bearer token"
                refused = Refused(401, "key", problem)
            if not known and b"transfer-encoding" in headers:  # chunks of a byte cost much more than they hold
                refused = Refused(411, "body", "body: in chunks, without the key: send it whole")
            if refused is not None:
                await refused.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


# --- bodies -----------------------------------------------------------------------------------------------------------


class LargeBodies:
    """Bodies over `LARGE_BYTES`, of all clients: how much memory they may take together."""

    def __init__(self) -> None:
        self.held = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """For one body, until the end: what is to be called with its size as it grows. That raises Refused (429)."""
        own = 0

        def grow(size: int) -> None:
            nonlocal own
            if size <= LARGE_BYTES:
                return
            if self.held + size - own > LIMITS.bodies_bytes:
                limit = LIMITS.bodies_bytes
                raise Refused(429, "bodies", f"body: large ones would be over {limit} bytes together; try again later")
            self.held += size - own
            own = size

        try:
            yield grow
        finally:
            self.held -= own


async def read_body(http: HttpRequest, limit: int, came: Callable[[int], object] = lambda size: None) -> bytearray:
    """The body of a request.

    Args:
        http: the request.
        limit: longest allowed, in bytes, whatever its headers say.
        came: called as its parts arrive, with its size so far.

    Raises:
        Refused: it is longer (413), or stops on the way (408).
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
            problem = f"body: {SILENCE_S:g} s late at {LEAST_RATE >> 10} KiB/s; send it faster"
            raise Refused(408, "body", problem) from error
        if part is None:
            return data
        data += part
        if len(data) > limit:
            raise Refused(413, "body", f"body: {too_long}")
        came(len(data))


def kind_of(http: HttpRequest) -> str:
    """The content type of a request, "json" for all kinds of JSON."""
    kind = http.headers.get("content-type", "none").partition(";")[0].strip().lower()
    return "json" if kind.startswith("application/") and kind.endswith(("/json", "+json")) else kind


@contextlib.asynccontextmanager
async def json_of(http: HttpRequest, decode: Callable[[bytearray], Shape]) -> AsyncIterator[Shape]:
    """A JSON body, decoded; it counts among the large ones until the end.

    Raises Refused: it is too long (413), no JSON of this shape (422), or one large body too many (429).
    """
    if (kind := kind_of(http)) != "json":  # a page in somebody's browser may send others without asking
        raise Refused(422, "body", f"body: its content type is {kind}; send application/json")
    with http.app.state.bodies.room() as grow:
        data = await read_body(http, LIMITS.body_bytes, grow)
        if len(data) < LARGE_BYTES:
            shape = decode(data)
        else:
            async with http.app.state.large:
                shape = await asyncio.to_thread(decode, data)
        del data
        yield shape


def json_body(shape: type[Any], *, needed: bool = True) -> Any:
    """What annotates the parameter of a route that is its JSON body; None if it is not `needed` and there is none."""
    return body_by(lambda data: decoded(shape, data), needed=needed)


def body_by(decode: Callable[[bytearray], Any], *, needed: bool = True) -> Any:
    """As `json_body`, with what decodes it. A body that is streamed to counts no longer."""

    async def read(http: HttpRequest) -> AsyncIterator[Any]:
        if not needed and http.headers.get("content-length", "0") == "0" and "transfer-encoding" not in http.headers:
            yield None
            return
        async with json_of(http, decode) as body:
            yield body

    return Depends(read, scope="function")


def decoded(shape: type[Shape], data: bytes | bytearray) -> Shape:
    """JSON as an object of this shape. Raises Refused: it is no JSON, or does not have this shape."""
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        raise field_error(f"{where.strip('.`') or 'body'}: {problem}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(422, "body", f"body: not what its content type says ({error})") from error


# --- the lease --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Holder:
    """run_id: of the run. name: for people, such as host and process. expires_at: by the caller's clock."""

    run_id: str
    name: str
    expires_at: float


class Lease:
    """Which run owns the server's weights. Pure: callers pass the time.

    A run takes the lease with an id of its own, and everything it sends renews it; other runs are refused and told who
    holds it. A run that fell silent can be replaced; until then it may come back as if nothing was. Clients without a
    run id may change weights only while nobody holds the lease.
    """

    def __init__(self, lifetime_s: float = LIFETIME_S) -> None:
        self.lifetime_s = lifetime_s
        self.holder: Holder | None = None
        self._resets = 0

    @contextlib.contextmanager
    def during_reset(self) -> Iterator[None]:
        """The holder cannot give signs of life while it waits for the engines: until the end nothing expires."""
        self._resets += 1
        try:
            yield
        finally:
            self._resets -= 1

    def silent(self, now: float) -> Holder | None:
        holder = self.holder
        return holder if holder is not None and not self._lasts(holder, now) else None

    def _lasts(self, holder: Holder, now: float) -> bool:
        return self._resets > 0 or holder.expires_at > now

    def take(self, run_id: str, name: str, now: float) -> bool:
        """Become the holder; whether it was another run before (or none). Raises Refused: another run holds it."""
        before = self.holder
        if before is not None and before.run_id != run_id and self._lasts(before, now):
            raise self._held(before, now)
        self.holder = Holder(run_id, name, now + self.lifetime_s)
        return before is None or before.run_id != run_id

    def renew(self, run_id: str | None, now: float) -> None:
        """Check that a request may change things, and renew the lease of its run.

        Raises Refused: another run holds the lease, or this one never took it (409, "no_lease").
        """
        holder = self.holder
        if holder is not None and holder.run_id == run_id:
            holder.expires_at = now + self.lifetime_s
        elif holder is not None and self._lasts(holder, now):
            raise self._held(holder, now)
        elif run_id is not None:
            raise Refused(409, "no_lease", f"run {run_id}: does not hold this server; POST /reset first")

    def release(self, run_id: str) -> bool:
        """Give it back; returns whether this run held it."""
        if self.holder is None or self.holder.run_id != run_id:
            return False
        self.holder = None
        return True

    def _held(self, holder: Holder, now: float) -> Refused:
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
