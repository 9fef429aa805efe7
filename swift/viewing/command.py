"""The mode: finds the folders, binds the port, prints the ready line and serves until a signal comes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from swift.errors import ConfigError
from swift.observability.curves import LOGGING
from swift.observability.run_dir import ATTEMPTS, list_versions
from swift.rendezvous import bind, port_taken
from swift.signals import answered
from swift.viewing.app import make_app
from swift.viewing.index import COMPLETIONS
from swift.viewing.run import Reader, Run

if TYPE_CHECKING:
    from swift.arguments import Resolved

DRAIN_S = 2
"""Seconds that requests in flight may take after a signal."""


def run(resolved: Resolved) -> int:
    """The mode; returns 0 after a signal.

    Raises:
        ConfigError: a folder that is none of a run, or an address that this host does not have.
        ResourceError: another process has the port.
    """
    args: Any = resolved.args
    folders = find_runs(args.run)
    runs = [Run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    with contextlib.closing(bind(args.host, args.port)) as listener, Reader(runs):
        serve(runs, listener, args.host, as_json=args.json)
    return 0


def find_runs(given: Sequence[str]) -> list[Path]:
    """The folder of each run; of a folder of runs the newest one. Raises ConfigError: there is none."""
    found, problems = [], []
    for text in given:
        folder = Path(text).expanduser()
        candidates = (folder, *reversed(list_versions(folder)))
        runs = [one for one in candidates if any((one / name).is_file() for name in (LOGGING, COMPLETIONS, ATTEMPTS))]
        if runs:
            found.append(runs[0].resolve())
        else:
            problems.append(f"--run: {text}: no run in it; give the folder of a run, such as output/<model>/v0-...")
    if problems:
        raise ConfigError(*problems)
    return list(dict.fromkeys(found))


def names_of(folders: Sequence[Path]) -> list[str]:
    """What tells the folders apart: their paths from the first part in which they differ."""
    if len(folders) == 1:
        return [folders[0].name]
    shared = Path(os.path.commonpath(folders))
    return [str(folder.relative_to(shared)) if folder != shared else folder.name for folder in folders]


def serve(runs: Sequence[Run], listener: socket.socket, host: str, *, as_json: bool = False) -> None:
    """Serve until a signal comes; a second one does not wait for requests in flight."""
    token, port = secrets.token_urlsafe(24), listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}/{token}/"
    server = Server(make_app(runs, token), json.dumps({"url": url}) if as_json else f"ready {url}")
    try:
        listener.listen(server.config.backlog)
    except OSError as error:  # another process has bound and listens at the port
        raise port_taken(host, port, error) from error
    with answered(server.stop):
        server.run([listener])


class Server(uvicorn.Server):
    """Prints its ready line when it listens, and leaves signals to `answered`."""

    def __init__(self, app: Any, ready: str) -> None:
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,  # which would show the token
            server_header=False,
            timeout_graceful_shutdown=DRAIN_S,
        )
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Print the ready line when requests are answered."""
        await super().startup(sockets)
        print(self._ready, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Nothing: the caller handles signals."""
        yield

    def stop(self, _: int, __: FrameType | None) -> None:
        """The handler of signals."""
        self.force_exit = self.should_exit
        self.should_exit = True
