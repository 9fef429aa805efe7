"""How much a client may ask for, and how it is told that it asked for too much.

Everything that is refused before it reaches an engine is a `Refused`: an HTTP status, and one line with the limit.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/health/")
"""Answered without a key."""
KNOWN = "swift.known"
"""Entry of a request's scope: it came with the key, or none is needed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client can make the server hold.

    body_bytes: of one request; more than that comes in pieces. prompts, samples_per_prompt: of one request.
    queue: samples that wait or run, of all clients together. adapter_bytes: of an adapter that is uploaded.
    upload_idle_s: after so long without the next piece an upload or an update is given up.
    """

    body_bytes: int = 64 << 20
    prompts: int = 4096
    samples_per_prompt: int = 1024
    queue: int = 20_000
    adapter_bytes: int = 8 << 30
    upload_idle_s: float = 300.0


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

    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        return {"error": {"message": self.problem, "type": "", "code": self.status, "kind": self.kind, **self.facts}}


class Gate:
    """ASGI middleware: the key first, then the length of the body, whatever the headers say about it.

    Args:
        app: what is behind it.
        api_key: bearer token, or None.
        body_bytes: longest body.
    """

    def __init__(self, app: Application, api_key: str | None, body_bytes: int) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode() if api_key else None
        self.body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scope[KNOWN] = self._knows_key(headers)
        problem = self._stranger(scope) or self._too_long(headers)
        if problem is not None:
            await _reply(send, problem)
            return
        body = _Body(receive, send, self)
        await self.app(scope, body.receive, body.send)

    def _knows_key(self, headers: dict[bytes, bytes]) -> bool:
        return self.expected is None or hmac.compare_digest(headers.get(b"authorization", b""), self.expected)

    def _stranger(self, scope: Scope) -> Refused | None:
        if scope[KNOWN] or scope["path"] in OPEN_PATHS:
            return None
        return Refused(401, "key", "Authorization: missing or wrong: this server needs its key as a bearer token")

    def _too_long(self, headers: dict[bytes, bytes]) -> Refused | None:
        said = headers.get(b"content-length", b"0")
        return self.refusal(said.decode(errors="replace")) if said.isdigit() and int(said) > self.body_bytes else None

    def refusal(self, seen: str) -> Refused:
        """What a longer body is told."""
        return Refused(
            413, "body", f"body: {seen} bytes: longer than the limit of {self.body_bytes} bytes; send it in parts"
        )


class _Body:
    """A request whose body is counted as it comes: chunked ones announce no length."""

    def __init__(self, receive: Receive, send: Send, gate: Gate) -> None:
        self._receive, self._send, self._gate = receive, send, gate
        self._seen = 0
        self._over: Refused | None = None
        self._answered = False

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._gate.body_bytes:
            self._over = self._gate.refusal(f"over {self._gate.body_bytes}")
            raise self._over
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Whatever the application makes of the broken body, the client learns why."""
        if self._over is None:
            await self._send(message)
        elif not self._answered:
            self._answered = True
            await _reply(self._send, self._over)


async def _reply(send: Send, refused: Refused) -> None:
    body = json.dumps(refused.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
