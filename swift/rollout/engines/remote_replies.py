"""What the answers of a `swift rollout` server mean to the engine at the other end, and their absence."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import httpx

from swift.errors import EngineDead, EngineError
from swift.rollout.engines import wire
from swift.rollout.engines.transport import Busy, Lost


class Failed(Lost):
    """The server answered that it failed, not saying how."""


def problem_of(name: str, reply: httpx.Response) -> Exception:
    """What an answer other than 200 means.

    Args:
        name: of the server, for messages.
        reply: read already.
    """
    try:
        body = reply.json()
    except ValueError:
        body = None
    error = wire.error_from_body(body, name)
    if error is not None:
        return Lost(str(error)) if isinstance(error, EngineDead) else error
    said = body.get("error", {}) if isinstance(body, dict) else {}
    kind = said.get("kind") if isinstance(said, dict) else None
    message = said.get("message") if isinstance(said, dict) else None
    if kind in ("no_lease", "held", "version"):
        return Lost(str(message))
    if reply.status_code == 429:
        return Busy(str(message))
    if reply.status_code == 401:
        return EngineError(f"{name}: it does not accept the key; give its --api_key as --vllm_server_api_key")
    if reply.status_code >= 500:
        return Failed(f"HTTP {reply.status_code}{': ' + str(message) if message else ''}")
    what = message or f"HTTP {reply.status_code}; is this a `swift rollout` server?"
    return EngineError(f"{name}: {what}")


def kind_of(reply: httpx.Response) -> str:
    """The word for programs in a refusal; "" without one."""
    try:
        return str(reply.json()["error"].get("kind", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def shut(response: httpx.Response) -> None:
    """End a stream that another thread may be reading: its socket is shut, and that thread sees the end."""
    stream = response.extensions.get("network_stream")
    raw = stream.get_extra_info("socket") if stream is not None else None
    if raw is not None:
        raw.shutdown(socket.SHUT_RDWR)


def without_secrets(url: str) -> str:
    """A URL for messages, without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0] or type(error).__name__
