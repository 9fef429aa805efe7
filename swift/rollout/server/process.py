"""The process of the web server: its socket, its signals and its restart.

A signal closes the socket, waits `DRAIN_S` seconds for requests in flight, and ends the engines; a second SIGTERM or
SIGINT does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from swift import rendezvous
from swift.errors import EngineDead
from swift.rollout.server import access
from swift.rollout.server.app import make_app
from swift.rollout.server.service import Service
from swift.signals import INSISTING, answered

DRAIN_S = 10
"""Timeout of requests in flight after a signal, in seconds."""
HEAD_BYTES = 64 << 10
"""Maximum size of the request line and the headers together."""
CONNECTIONS = 4096
"""Maximum number of connections if the process may open twice as many files; further connections get 503. From three
quarters of it, a new connection closes the one that has been silent for longest.
"""
RESTART_WINDOW_S = 3600.0
"""Time in which `--engine_restarts` limits the restarts, in seconds."""
STARTS, LISTENER_VARIABLE = "SWIFT_ROLLOUT_STARTS", "SWIFT_ROLLOUT_LISTENER"
"""Environment variables of a restarted process: times of the restarts, and file descriptor of the socket."""
LISTENER = 3
"""File descriptor of the socket in a restarted process."""
MARKER = "SWIFT_ENGINE"
"""Environment variable of all processes that an engine starts."""


class Stopped(BaseException):
    """A signal arrived before the server was ready. No `except Exception` of a library catches it."""


def bind(host: str, port: int) -> socket.socket:
    """The socket of the server, see `rendezvous.bind`; a restarted process inherits it."""
    inherited = os.environ.pop(LISTENER_VARIABLE, None)
    if inherited is not None:
        return socket.socket(fileno=int(inherited))
    return rendezvous.bind(host, port)


def listen(
    service: Service, listener: socket.socket, host: str, signals: Signals
) -> tuple[EngineDead, socket.socket] | None:
    """Serve until a signal arrives or no engine is left.

    Returns:
        None after a signal; else why no engine is left, and a copy of the socket, since uvicorn closes the socket.
    """
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    ended: list[tuple[EngineDead, socket.socket]] = []

    def give_up(error: EngineDead) -> None:
        ended.append((error, listener.dup()))
        server.should_exit = True

    server = WebServer(service, f"ready http://{shown}:{port} model={service.settings.model} weight_version=0", give_up)
    try:
        listener.listen(server.config.backlog)
    except OSError as error:  # another process has bound and listens at the port
        raise rendezvous.port_taken(host, port, error) from error
    signals.server = server
    server.run([listener])
    return ended[0] if ended else None


class Connection(H11Protocol):
    """A connection of uvicorn with a timeout for silent clients.

    A client that does not complete its headers, or does not read its reply, is disconnected after `access.SILENCE_S`;
    earlier if there are too many connections, see `CONNECTIONS`.
    """

    _stalled: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first headers."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if len(self.connections) > (self.limit_concurrency or CONNECTIONS) * 3 // 4:
            others: set[Any] = self.connections - {self}
            silent = [other for other in others if other.timeout_keep_alive_task and not other.transport.is_closing()]
            if silent:
                min(silent, key=lambda other: other.timeout_keep_alive_task.when()).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Unlike uvicorn, do not stop the timeout before the headers are complete."""
        self.conn.receive_data(data)
        self.handle_events()

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read its reply."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled.cancel()

    def _await_reader(self, before: float = math.inf) -> None:
        """Abort the connection if the client has read nothing since the last check. before: bytes left then."""
        left = self.transport.get_write_buffer_size()
        if left == before:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(access.SILENCE_S, self._await_reader, left)


class WebServer(uvicorn.Server):
    """Prints `ready` when it listens, and leaves signals to `Signals`.

    Args:
        service: state of the server.
        ready: the line to print.
        give_up: see `make_app`.
    """

    def __init__(self, service: Service, ready: str, give_up: Callable[[EngineDead], None]) -> None:
        limit = _connections()
        super().__init__(
            uvicorn.Config(
                make_app(service, give_up),
                http=Connection,
                ws="none",
                h11_max_incomplete_event_size=HEAD_BYTES,
                limit_concurrency=limit,
                backlog=limit // 2,
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=DRAIN_S,
                timeout_keep_alive=access.SILENCE_S,
                server_header=False,
            )
        )
        self._ready = ready
        logging.getLogger("uvicorn.error").addFilter(_not_cancelled)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips it then, and prints the traceback of the cancellation
            await self.lifespan.shutdown()

    def stop(self, insisting: bool) -> None:
        """Wait for requests in flight; a second, insisting signal does not wait. A signal may interrupt this method."""
        if insisting:
            self.force_exit = self.should_exit
        self.should_exit = True


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Log filter: drop the tracebacks of requests that are cancelled when the server stops."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _connections() -> int:
    """Maximum number of connections: half of the files that the process may open; raises the soft limit if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS
    if soft < 2 * CONNECTIONS:
        soft = 2 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * CONNECTIONS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(CONNECTIONS, soft // 2)


class Signals(contextlib.ExitStack):
    """Handler of the signals that stop the process: during the start it raises `Stopped`, later it stops the server.

    server: the running server. closing: whether the process ends already; further signals are ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.server: WebServer | None = None
        self.closing = False

    def __enter__(self) -> Signals:
        self.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        report = sys.unraisablehook  # gets exceptions of callbacks, `Stopped` among them
        sys.unraisablehook = lambda event: None if event.exc_type is Stopped else report(event)
        self.enter_context(answered(self._on_signal))
        return super().__enter__()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.closing:
            return
        if self.server is not None:
            self.server.stop(number in INSISTING)
            return
        self.closing = True
        raise Stopped


def may_start_again(restarts: int) -> bool:
    """Record a restart; returns whether there were fewer than `restarts` in the last hour."""
    now = time.monotonic()  # the clock of the machine, which a restart of the process does not reset
    starts = [float(start) for start in os.environ.get(STARTS, "").split()]
    recent = [start for start in starts if now - start < RESTART_WINDOW_S]
    os.environ[STARTS] = " ".join(map(str, [*recent, now]))
    return len(recent) < restarts


def start_again(listener: socket.socket) -> NoReturn:
    """Replace this process by a new one of the same command, which inherits the socket; never returns."""
    os.environ.pop(MARKER, None)
    os.environ[LISTENER_VARIABLE] = str(os.dup2(listener.fileno(), LISTENER))
    os.closerange(LISTENER + 1, os.sysconf("SC_OPEN_MAX"))  # files that a library has opened without O_CLOEXEC
    os.execv(sys.executable, [sys.executable, "-m", "swift", *sys.argv[1:]])
