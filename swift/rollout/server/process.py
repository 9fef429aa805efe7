"""The web server as a process: its socket, its signals, and how it becomes a new process.

A signal that asks to stop ends the listening, gives what runs `DRAIN_S` seconds, and ends the engines; a second SIGTERM
or SIGINT does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
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

from swift.errors import ConfigError, EngineDead, ResourceError, first_line
from swift.rollout.server import access
from swift.rollout.server.app import make_app
from swift.rollout.server.service import Service
from swift.signals import INSISTING, answered

DRAIN_S = 10
"""How long requests in flight may take to end after a signal."""
HEAD_BYTES = 64 << 10
"""Longest request line and headers together."""
CONNECTIONS = 4096
"""Connections at the same time, where the process may open twice as many files; further ones are answered 503. From
three quarters on, a new one ends the one that is silent for longest."""
RESTART_WINDOW_S = 3600.0
STARTS, LISTENER_VARIABLE = "SWIFT_ROLLOUT_STARTS", "SWIFT_ROLLOUT_LISTENER"
"""Variables of a process that follows another: times of such starts, and the socket's descriptor."""
LISTENER = 3
"""That descriptor."""
MARKER = "SWIFT_ENGINE"
"""Variable of the processes that an engine starts."""


class Stopped(BaseException):
    """A signal came before the server was up; no library's `except Exception` keeps it."""


def bind(host: str, port: int) -> socket.socket:
    """The socket that will listen; that of the process before, if this one follows it.

    Raises ResourceError: somebody else has the port. Raises ConfigError: no such address here.
    """
    inherited = os.environ.pop(LISTENER_VARIABLE, None)
    if inherited is not None:
        return socket.socket(fileno=int(inherited))
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:  # a part of a name that is empty or too long
        raise _no_address(host, error) from error
    made = socket.socket(family, kind, number)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        known = error.errno != errno.EADDRNOTAVAIL
        raise (_taken(host, port, error) if known else _no_address(host, error)) from error
    return made


def _no_address(host: str, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return ConfigError(f"--host: {host}: no such address here ({reason}); use 127.0.0.1 or 0.0.0.0")


def _taken(host: str, port: int, error: OSError) -> ResourceError:
    return ResourceError(
        f"--port: {port}: cannot be used on {host} ({error.strerror}); use another one, or 0 for a free one"
    )


def listen(
    service: Service, listener: socket.socket, host: str, signals: Signals
) -> tuple[EngineDead, socket.socket] | None:
    """Serve until a signal comes (None), or no engine is left: why, and a copy of the socket, which uvicorn closes."""
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    ended: list[tuple[EngineDead, socket.socket]] = []

    def give_up(error: EngineDead) -> None:
        ended.append((error, listener.dup()))
        server.should_exit = True

    server = WebServer(service, f"ready http://{shown}:{port} model={service.settings.model} weight_version=0", give_up)
    try:
        listener.listen(server.config.backlog)
    except OSError as error:  # a server that was started at the same time was faster
        raise _taken(host, port, error) from error
    signals.server = server
    server.run([listener])
    return ended[0] if ended else None


class Connection(H11Protocol):
    """uvicorn's, which waits for its clients for ever. One that sends no head, or takes nothing of its answer, is ended
    after `access.SILENCE_S`, and earlier if others want its place.
    """

    _stalled: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock for the first head."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if len(self.connections) > (self.limit_concurrency or CONNECTIONS) * 3 // 4:
            others: set[Any] = self.connections - {self}
            silent = [one for one in others if one.timeout_keep_alive_task and not one.transport.is_closing()]
            for one in sorted(silent, key=lambda one: one.timeout_keep_alive_task.when())[:1]:
                one.transport.abort()

    def data_received(self, data: bytes) -> None:
        """The clock goes on until a head is complete."""
        self.conn.receive_data(data)
        self.handle_events()

    def pause_writing(self) -> None:
        """The clock for the rest of an answer."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled.cancel()

    def _await_reader(self, before: float = math.inf) -> None:
        left = self.transport.get_write_buffer_size()
        if left == before:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(access.SILENCE_S, self._await_reader, left)


class WebServer(uvicorn.Server):
    """Prints `ready` when it listens, and leaves signals to `Signals`.

    Args:
        service: what it serves.
        ready: the line.
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
        if self.force_exit:  # uvicorn leaves it out then, and prints how it was cancelled
            await self.lifespan.shutdown()

    def stop(self, insisting: bool) -> None:
        """First drain; a second signal that insists does not wait. Signals may come inside of this."""
        if insisting:
            self.force_exit = self.should_exit
        self.should_exit = True


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Whether it is anything but the traceback of a request that ends with the server."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _connections() -> int:
    """How many the process has files for, and as many again for everything else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS
    if soft < 2 * CONNECTIONS:
        soft = 2 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * CONNECTIONS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(CONNECTIONS, soft // 2)


class Signals(contextlib.ExitStack):
    """What signals that ask to stop do: before the server is up they end the start, then they end the serving.

    server: once it runs. closing: one has come, or the way out has begun, which is not interrupted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.server: WebServer | None = None
        self.closing = False

    def __enter__(self) -> Signals:
        self.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        tell = sys.unraisablehook  # of what was raised in a callback, where nobody can take it
        sys.unraisablehook = lambda event: None if event.exc_type is Stopped else tell(event)
        self.enter_context(answered(self._came))
        return super().__enter__()

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.closing:
            return
        if self.server is not None:
            self.server.stop(number in INSISTING)
            return
        self.closing = True
        raise Stopped


def may_start_again(restarts: int) -> bool:
    """Whether fewer than `restarts` new starts lie within an hour; counts this one."""
    now = time.monotonic()  # that of the machine, so it goes on where the process is replaced
    before = [float(one) for one in os.environ.get(STARTS, "").split()]
    recent = [one for one in before if now - one < RESTART_WINDOW_S]
    os.environ[STARTS] = " ".join(map(str, [*recent, now]))
    return len(recent) < restarts


def start_again(listener: socket.socket) -> NoReturn:
    """Become a new process of the same command, which goes on listening at this socket; never returns."""
    os.environ.pop(MARKER, None)
    os.environ[LISTENER_VARIABLE] = str(os.dup2(listener.fileno(), LISTENER))
    os.closerange(LISTENER + 1, os.sysconf("SC_OPEN_MAX"))  # whatever a library has opened without O_CLOEXEC
    os.execv(sys.executable, [sys.executable, "-m", "swift", *sys.argv[1:]])
