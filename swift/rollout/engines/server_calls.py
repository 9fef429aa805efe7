"""Calls to a `swift rollout` server with timeouts, errors in its replies, and the lease of the run that owns it."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from swift.errors import EngineDead, EngineError, SyncFailed, first_line
from swift.rollout.engines import replies, wire
from swift.rollout.engines.client import EngineClient
from swift.rollout.engines.events import Late, Lost, Timeouts
from swift.rollout.engines.process import on_thread
from swift.rollout.engines.replies import Reply
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.weights.disk import open_regular

Shape = TypeVar("Shape")


class Busy(Exception):
    """The request queue of the server is full."""


class ServerCalls(EngineClient):
    """Base class of `ServerClient`; see the module's docstring."""

    def __init__(
        self,
        url: str,
        spec: EngineSpec,
        api_key: str | None,
        timeouts: Timeouts,
        run_id: str,
        weight_transport: str | None,
    ) -> None:
        self.url = url.rstrip("/")
        super().__init__(f"server {without_secrets(self.url)}", timeouts, weight_transport=weight_transport)
        self.spec, self.run_id = spec, run_id
        key = api_key or os.environ.get("SWIFT_API_KEY")
        headers = {**replies.HEADERS, wire.RUN_HEADER: run_id, **({"Authorization": f"Bearer {key}"} if key else {})}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._http = httpx.Client(base_url=self.url, headers=headers, trust_env=False, limits=limits)
        self._ending = threading.Event()

    def _timeout(self, timeout_s: float) -> httpx.Timeout:
        return httpx.Timeout(timeout_s, connect=min(self.timeouts.connect_s, timeout_s))

    def _request(self, method: str, path: str, timeout_s: float, **options: Any) -> Reply:
        try:
            return replies.whole(self._http, method, path, self._timeout(timeout_s), **options)
        except Late as error:
            problem = f"no answer to {path.partition('?')[0]} within {timeout_s:.3g} s"
            raise Lost(problem + (self._running_requests() if timeout_s > self.timeouts.reply_s else "")) from error
        except Lost:
            self.check_alive()
            raise

    def _running_requests(self) -> str:
        """Requests of other clients that a call waits for, for messages; "" if there are none."""
        try:
            reply = replies.whole(self._http, "GET", "/info", self._timeout(min(5.0, self.timeouts.reply_s)))
            running = reply.read(wire.Load, self.name).running_of
        except (Lost, EngineError):
            return ""
        running.pop(f"run {self.run_id}", None)
        counts = ", ".join(f"{count} of {owner}" for owner, count in sorted(running.items()))
        return f"; it waits for requests of others: {counts}" if counts else ""

    def _call_route(self, method: str, path: str, timeout_s: float, shape: type[Shape], **options: Any) -> Shape:
        """Send a request and decode its reply. Raises Lost, or the error of a refusal; see `problem_of`."""
        return self._content(self._request(method, path, timeout_s, **options), shape)

    def _content(self, reply: Reply, shape: type[Shape]) -> Shape:
        if reply.status_code == 200:
            return reply.read(shape, self.name)
        raise problem_of(self.name, reply)

    def _info(self, timeout_s: float) -> wire.Info:
        return self._call_route("GET", "/info", timeout_s, wire.Info)

    def _upload(self, path: str, params: dict[str, Any], data: bytes, shape: type[Shape]) -> Shape:
        headers = {"Content-Type": wire.SAFETENSORS}
        return self._call_route("POST", path, self.timeouts.sync_s, shape, params=params, content=data, headers=headers)

    def _in_background(self, work: Callable[[], Any], timeout_s: float) -> Callable[[], Any]:
        """Start `work` on a thread; returns a function that waits for its result."""
        future = on_thread(work, f"call of {self.name}")

        def wait() -> Any:
            try:
                return future.result(timeout_s + self.timeouts.connect_s)
            except TimeoutError:
                raise SyncFailed(f"weights: {self.name}: no answer within {timeout_s:.3g} s") from None

        return wait

    def _await_server(self) -> None:
        """Wait until the server is healthy by /health. Raises EngineDead: not within `server_s`."""
        deadline = time.monotonic() + self.timeouts.server_s
        status = "no answer"
        while True:
            self.check_alive()
            try:
                reply = replies.whole(self._http, "GET", "/health", self._timeout(min(5.0, self.timeouts.reply_s)))
                state = reply.read(wire.State, self.name) if reply.status_code in (200, 503) else wire.State()
                if reply.status_code == 200 or state.alive or state.void:
                    return
                status = f"HTTP {reply.status_code} {state.detail}".strip()
            except (Lost, EngineError) as error:
                status = first_line(error).removeprefix(f"{self.name}: ")
            if time.monotonic() + self.timeouts.poll_s > deadline:
                break
            self._ending.wait(self.timeouts.poll_s)
        raise EngineDead(
            f"{self.name}: not healthy within {self.timeouts.server_s:g} s ({status}); start it with "
            f"`{self._start_line()}`, or raise --vllm_server_timeout"
        )

    def _start_line(self) -> str:
        """The command that starts the server, for messages."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", str(parts.port or 80)
        words = ["swift", "rollout", "--model", self.spec.model, "--host", host, "--port", port]
        local = host.startswith("127.") or host == "localhost"
        return shlex.join(words if local else [*words, "--api_key", "KEY"])

    def _take_lease(self, *, rebuild: bool = False) -> None:
        """Take the lease of the server, after that of another run has expired.

        Raises EngineError: the other run renews its lease, or it does not expire within `server_s`.
        """
        name = f"{socket.gethostname()}, process {os.getpid()}"
        deadline = time.monotonic() + self.timeouts.server_s
        left: float | None = None
        while True:
            body = {"run_id": self.run_id, "name": name, "rebuild": rebuild}
            reply = self._request("POST", "/reset", self.timeouts.start_s, json=body)
            refusal = refusal_of(reply)
            if not (reply.status_code == 409 and refusal.kind == "held"):
                self._content(reply, dict)
                return
            renewed = left is not None and refusal.expires_in_s > left
            if renewed or time.monotonic() + self.timeouts.poll_s > deadline:
                raise EngineError(f"{self.name}: {refusal.message}")
            left = refusal.expires_in_s
            self._ending.wait(self.timeouts.poll_s)
            self.check_alive()

    def _check_expected(self, info: wire.Info) -> None:
        """Raises EngineError: the server has another protocol, model, dtype or context length than this run needs."""
        if info.protocol != wire.PROTOCOL:
            raise EngineError(
                f"{self.name}: its protocol is {info.protocol}, that of this run {wire.PROTOCOL}; use the same version "
                "of swift on both sides"
            )
        differences = [
            f"{name} {info.architecture.get(name)} instead of {expected}"
            for name, expected in self._architecture.items()
            if info.architecture.get(name) != expected
        ]
        problems = []
        if differences:
            problems.append(f"its model is {info.model}, that of the run {self.spec.model} ({', '.join(differences)})")
        if info.dtype != self.spec.dtype:
            problems.append(f"it computes in {info.dtype}, the run in {self.spec.dtype}; give both --torch_dtype")
        if self.spec.max_model_len is not None and info.max_model_len < self.spec.max_model_len:
            problems.append(
                f"its --vllm_max_model_len is {info.max_model_len}, the run needs {self.spec.max_model_len} tokens; "
                f"start it with --vllm_max_model_len {self.spec.max_model_len}, or lower --max_length here"
            )
        if self.spec.sees and info.max_pixels != self.spec.max_pixels:
            given = [f"{value}" if value else "not given" for value in (info.max_pixels, self.spec.max_pixels)]
            problems.append(f"its --max_pixels is {given[0]}, that of the run {given[1]}; give both the same")
        if problems:
            raise EngineError(*(f"{self.name}: {problem}" for problem in problems))

    @functools.cached_property
    def _architecture(self) -> dict[str, Any]:
        return wire.architecture(self.spec.model)

    def _shared_folder(self, info: wire.Info) -> Path | None:
        """The weights folder of the server if this host shares it, else None."""
        if not info.weights_folder or info.weights_probe != wire.probe_name(info.boot_id):
            return None
        folder = Path(info.weights_folder)
        try:
            with open_regular(Path(os.path.realpath(folder)) / info.weights_probe) as file:
                same = file.read(wire.PROBE_BYTES).decode("utf-8", "replace") == info.boot_id
        except (OSError, ValueError):
            return None
        return folder if same and os.access(folder, os.W_OK) else None

    def _send_heartbeats(self) -> None:
        """Renew the lease while no other requests are sent."""
        while not self._ending.wait(self.timeouts.heartbeat_s):
            with contextlib.suppress(Lost):  # the next call raises it
                replies.whole(self._http, "GET", "/health", self._timeout(self.timeouts.reply_s))


def problem_of(name: str, reply: Reply) -> Exception:
    """The error of a reply with another status than 200.

    Lost: the server must be found again. Busy: its queue is full. Other errors are final.
    """
    refusal = refusal_of(reply)
    if (error := wire.error_from(refusal, name)) is not None:
        return Lost(str(error)) if isinstance(error, EngineDead) else error
    if refusal.kind in ("no_lease", "held", "version"):
        return Lost(refusal.message)
    if reply.status_code == 429:
        return Busy(refusal.message)
    if reply.status_code == 401:
        return EngineError(f"{name}: it does not accept the key; give its --api_key as --vllm_server_api_key")
    if reply.status_code >= 500:
        return Lost(f"HTTP {reply.status_code}{': ' + refusal.message if refusal.message else ''}")
    problem = refusal.message or f"HTTP {reply.status_code}; is this a `swift rollout` server?"
    return EngineError(f"{name}: {problem}")


def refusal_of(reply: Reply) -> wire.ErrorContent:
    """The error in a reply; an empty one if there is none."""
    try:
        return reply.read(wire.ErrorReply, "").error
    except EngineError:
        return wire.ErrorContent()


def without_secrets(url: str) -> str:
    """Returns the URL without user and password, for messages."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
