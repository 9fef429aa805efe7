"""Client of the engines behind a `swift rollout` server, over HTTP.

    requests      POST /infer/; each completion is a line of the streamed reply
    weight sync   files on a shared disk, a broadcast, or HTTP; complete with the ack of the server
    recovery      wait for a lost server, send the weights, then the requests again
    memory        managed by the server: the client sends neither sleep nor the removal of its adapter

Every POST has the expected policy version, so that a restarted server does not sample with its base weights. The
number of consecutive failures without progress is limited; after that the engine is dead.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx
import msgspec
import torch

from swift.data.images import encoded
from swift.errors import ConfigError, EngineDead, EngineError, RequestRefused, SwiftError, SyncFailed, first_line
from swift.rollout.engines import replies, wire
from swift.rollout.engines.base import Ack, AdapterWeights, Capabilities, EngineCounters, Health
from swift.rollout.engines.completion_stream import Failure
from swift.rollout.engines.events import Event, Lost, Returned, Timeouts
from swift.rollout.engines.process import on_thread
from swift.rollout.engines.server_calls import Busy, ServerCalls, problem_of
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.weights import disk
from swift.rollout.weights.base import Bucket
from swift.types import Completion, Request

BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before the tries after a failure of the server, in seconds; after the last try the engine is dead."""
BATCH = 1024
"""Maximum number of requests in one POST."""
BATCH_TOKENS = 4_000_000
"""Maximum number of prompt tokens in one POST."""
IMAGE_BYTES = 6
"""Bytes of an image that are as long in a POST as a token."""
LONGEST = 1 << 22
"""Upper bound on the context length of a server, which limits the length of lines."""

PATHS = {"commit": "weights/commit"}
"""Routes of calls, if they differ from the name."""
SHAPES: dict[str, Any] = {"commit": wire.AckReply, "versions": wire.VersionsReply}
"""Types of replies that are read."""


class ServerClient(ServerCalls):
    """See the module's docstring.

    Args:
        url: URL of the server.
        spec: model, dtype and context length that this run requires.
        timeouts: see `Timeouts`.
        api_key: API key of the server; None is SWIFT_API_KEY from the environment, if set.
        run_id: id of this run, the same for all its servers; None generates one.
        weight_transport: "disk", "http" or "broadcast"; None is "disk" if the disk is shared, else "http".
        force_restart: whether to restart the server before the adapter of the next version.
    """

    restartable = False
    devices: tuple[str, ...] = ("cpu",)

    def __init__(
        self,
        url: str,
        *,
        spec: EngineSpec,
        timeouts: Timeouts,
        api_key: str | None = None,
        run_id: str | None = None,
        weight_transport: str | None = None,
        force_restart: bool = False,
    ) -> None:
        timeouts = replace(timeouts, stall_s=math.inf)  # the server checks the progress of its engines
        super().__init__(url, spec, api_key, timeouts, run_id or secrets.token_hex(8), weight_transport)
        self.force_restart = force_restart
        self.instance: object = object()
        self.weights_folder: Path | None = None
        self.files: disk.RunFolder | None = None
        self._boot_id = ""
        self._base_counters = EngineCounters()
        self._failures = self._line_bytes = 0
        self._writing: int | None = None  # version of the files being written
        self._heartbeats: threading.Thread | None = None

    @property
    def stored(self) -> str:  # type: ignore[override]
        """See `EngineClient`: "disk" if the weights folder is shared."""
        return "http" if self.weights_folder is None else "disk"

    # --- start ------------------------------------------------------------------------------------------------

    def connect(self) -> Capabilities:
        """Wait for the server, check its model, and take its lease.

        Raises:
            EngineDead: the server cannot be reached in time.
            EngineError: another run holds it, it does not accept the key, or it serves another model.
        """
        try:
            self._await_server()
            info = self._info(self.timeouts.reply_s)
            self._check_expected(info)
            self._boot_id = info.boot_id
            self._take_lease()
        except Lost as lost:
            raise EngineDead(f"{self.name}: {lost}") from lost
        limit = min(info.max_model_len, self.spec.max_model_len or math.inf)
        self.weights_folder = self._shared_folder(info)
        if self.weights_folder is not None and self.files is None:
            self.files = disk.open_run(self.weights_folder, f"run-{self.run_id}")
        self._line_bytes = wire.line_bytes(int(min(limit, LONGEST)))
        self._base_counters, self.devices = info.counters, info.capabilities.devices
        if self._heartbeats is None:
            self._heartbeats = threading.Thread(target=self._send_heartbeats, name=f"lease of {self.name}", daemon=True)
            self._heartbeats.start()
        return replace(info.capabilities, max_model_len=int(limit), shares_weights=False, sleep_levels=(0,))

    def replace(self, how: str) -> EngineCounters | None:
        """Wait for the server after a failure; take the lease again if it was restarted or has lost its state."""
        self.instance = object()
        self._failures += 1
        if self._failures > len(BACKOFF_S):
            raise EngineDead(f"{self.name}: failed {self._failures} times without any progress ({how})")
        self._ending.wait(BACKOFF_S[self._failures - 1])
        self.check_alive()
        self._await_server()
        try:
            info = self._info(self.timeouts.reply_s)
            same = info.boot_id == self._boot_id and info.run_id == self.run_id
            if same and info.version == self.version and not self.invalid:
                return None
            self._check_expected(info)
            self._take_lease(rebuild=same)
        except (EngineDead, SyncFailed):
            raise
        except (EngineError, ConfigError) as error:
            problem = error.problems[0].removeprefix(f"{self.name}: ")
            raise EngineDead(f"{self.name}: cannot be used any more: {problem}") from error
        if info.boot_id == self._boot_id:
            more = info.counters - self._base_counters - self.instance_counters
        else:
            more = EngineCounters(restarts=1)
        self._boot_id, self._base_counters = info.boot_id, info.counters
        return more

    def progress(self) -> None:
        self._failures = 0

    # --- requests ---------------------------------------------------------------------------------------------

    def post(self, instance: object, requests: Sequence[Request]) -> None:
        if instance is not self.instance:
            raise Lost("its requests were abandoned")
        for part in _parts([self._with_stop_tokens(request) for request in requests]):
            asked = {request.request_id: request for request in part}
            content = wire.encode(wire.InferRequest.of(part, self.version))
            name = f"stream of {self.name}"
            threading.Thread(target=self._read, args=(instance, asked, content), name=name, daemon=True).start()

    def _with_stop_tokens(self, request: Request) -> Request:
        """Add the end tokens of this run's model; the server may have others."""
        stops = tuple(sorted({*self.spec.eos_token_ids, *request.sampling.stop_token_ids}))
        return replace(request, sampling=replace(request.sampling, stop_token_ids=stops))

    def _read(self, instance: object, asked: Mapping[str, Request], content: bytes) -> None:
        left = set(asked)
        try:
            for event in self._events(asked, left, content):
                if instance is not self.instance:  # abandoned: the server aborts when the stream is closed
                    return
                if isinstance(event, Completion):
                    left.discard(event.request_id)
                elif isinstance(event, Failure):
                    left.difference_update(event.request_ids)
                if isinstance(event, EngineCounters):
                    self.instance_counters = event - self._base_counters
                else:
                    self.deliver(instance, event)
        except Exception as error:  # for example, no thread can be started
            self.deliver(instance, Lost(f"{type(error).__name__}: {first_line(error)}"))

    def _events(self, asked: Mapping[str, Request], left: set[str], content: bytes) -> Iterator[Event | EngineCounters]:
        """Send one POST; yields the events of its requests, and counters. left: ids of requests that have not ended."""
        headers, timeout = {"Content-Type": "application/json"}, self._timeout(self.timeouts.reply_s)
        try:
            with replies.streamed(self._http, "/infer/", timeout, content, headers) as reply:
                if reply.status_code != 200:
                    refusal = replies.rest(reply, self.timeouts.reply_s)
                    yield from self._refusal(left, problem_of(self.name, refusal))
                    return
                for text in replies.lines(reply, self._line_bytes, self.timeouts.reply_s):
                    line: wire.Line = msgspec.json.decode(text, type=wire.Line)
                    if isinstance(line, wire.CompletionLine):
                        self._check_completion(line.completion, asked)
                        yield line.completion
                    elif isinstance(line, wire.FailedLine):
                        error = wire.error_from(line.error, self.name)
                        yield Failure(line.ids, error or EngineDead(f"{self.name}: {line.error.message}"))
                    elif isinstance(line, wire.AliveLine):
                        yield line.counters
                    else:
                        yield Returned(list(left))
                        return
            yield Lost("its stream ended early")
        except Lost as lost:
            yield lost
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            yield Lost(first_line(error))

    def _check_completion(self, completion: Completion, asked: Mapping[str, Request]) -> None:
        """Raises Lost: the completion cannot belong to a request, so the server does not have the model of this run."""
        name = completion.request_id
        if name not in asked:
            raise Lost(f"it answers an unknown request: {name[:80]!r}")
        if problem := wire.mismatch(completion, asked[name], self._architecture.get("vocab_size")):
            raise Lost(f"its answer to request {name} is invalid: {problem}")

    def _refusal(self, left: set[str], problem: Exception) -> Iterator[Event]:
        """Yield the events of a POST that the server refused."""
        if isinstance(problem, Lost):
            yield problem
        elif isinstance(problem, Busy):
            yield Returned(list(left), busy=True)
        elif isinstance(problem, RequestRefused) and problem.request_id in left:  # the others are sent again
            yield Failure([problem.request_id], problem)
            yield Returned([name for name in left if name != problem.request_id])
        elif isinstance(problem, SwiftError):
            yield Failure(list(left), problem)
        else:
            yield Lost(first_line(problem))

    def abort(self, request_ids: Sequence[str]) -> None:
        def abort() -> None:
            body = {"request_ids": list(request_ids)}
            with contextlib.suppress(Lost, EngineError):  # the stream raises it
                self._call_route("POST", "/abort_requests", self.timeouts.reply_s, dict, json=body)

        on_thread(abort, f"aborts at {self.name}")

    # --- calls ------------------------------------------------------------------------------------------------

    def call(self, name: str, timeout_s: float, **fields: Any) -> Any:
        match name:
            case "rebuild":
                self._take_lease(rebuild=True)
                self.instance = object()
                return None
            case "begin_update":
                body = wire.encode(wire.BeginUpdate.of(**fields))
                headers = {"Content-Type": "application/json"}
                return self._call_route(
                    "POST", "/weights/begin", timeout_s, wire.BeginReply, content=body, headers=headers
                ).update
            case "load_adapter":
                return self._upload_adapter(**fields)
        shape = SHAPES.get(name, dict)
        reply = self._call_route("POST", f"/{PATHS.get(name, name)}", timeout_s, shape, json=fields or None)
        match name:
            case "commit":
                return {"ack": reply.ack, "asleep": reply.asleep}
            case "versions":
                return reply.versions
        return reply

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        if self.force_restart and self._adapter is not None and version == self._adapter[0] + 1:
            self.check_alive()
            instance = self.instance
            try:
                self._restart()
            except Lost as lost:
                self.recover(instance, str(lost))
                self.progress()
        return super().load_adapter(adapter, version)

    def _restart(self) -> NoReturn:
        """Restart the server; raises Lost when its new process is ready."""
        boot_id = self._call_route("POST", "/restart", self.timeouts.reply_s, wire.RestartReply).boot_id
        deadline = time.monotonic() + self.timeouts.server_s
        while self._info(self.timeouts.start_s).boot_id == boot_id:
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name}: it has not restarted within {self.timeouts.server_s:g} s; see its log")
            self._ending.wait(self.timeouts.poll_s)
        raise Lost("it was restarted by --force_restart")

    def _upload_adapter(self, adapter: AdapterWeights, version: int) -> dict[str, Any]:
        metadata = {"adapter_config": json.dumps(adapter.config)}
        data = disk.as_bytes([(name, adapter.tensors[name]) for name in sorted(adapter.tensors)], metadata)
        return {"result": self._upload("/v1/load_lora_adapter", {"version": version}, data, wire.AckReply).ack}

    # --- weights ----------------------------------------------------------------------------------------------

    def default_transport(self, device: torch.device) -> str:
        """Files on a shared disk, else HTTP; a broadcast, whose server must connect back, is never chosen."""
        return self.stored

    def receivers(self) -> int:
        return self._info(self.timeouts.reply_s).receivers

    def receiving_processes(self) -> object:
        info = self._info(self.timeouts.reply_s)
        return self.instance, info.receivers, info.counters.restarts

    def payload(self, way: str, bucket: Bucket, version: int) -> Any:
        if way == "http":
            return bucket.once("safetensors", lambda: disk.as_bytes(bucket.tensors))
        if self.files is None:
            raise SyncFailed(
                f"weights: {self.name}: --weight_transport disk: it has no weights folder that this host shares"
            )
        files = self.files
        self._writing = version
        return bucket.once(f"disk {files.path}", lambda: files.add(bucket, version))

    def send_bucket(self, update: int, way: str, payload: Any, timeout_s: float) -> Callable[[], Any]:
        if way == "http":
            return self._in_background(
                lambda: self._upload("/weights/bucket", {"update": update}, payload, dict), timeout_s
            )
        body = {"update": update, **({"broadcast": payload} if way == "broadcast" else payload)}
        return self._in_background(
            lambda: self._call_route("POST", "/weights/bucket", self.timeouts.sync_s, dict, json=body), timeout_s
        )

    def abort_update(self, update: int) -> None:
        with contextlib.suppress(Lost, SwiftError):
            self._call_route("POST", "/weights/abort", self.timeouts.reply_s, dict, json={"update": update})

    def update_ended(self, *, complete: bool) -> None:
        """Mark the files of the update as complete, or as abandoned."""
        version, self._writing = self._writing, None
        if self.files is not None and version is not None:
            self.files.update_ended(version, complete=complete)

    def address(self) -> str:
        parts = urlsplit(self.url)
        with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=5.0) as connection:
            return str(connection.getsockname()[0])

    # --- watching ---------------------------------------------------------------------------------------------

    def ask_health(self) -> Health:
        try:
            state = replies.whole(self._http, "GET", "/health", self._timeout(5.0)).read(wire.State, self.name)
            return Health(state.alive, state.detail)
        except (Lost, EngineError) as error:
            return Health(False, f"{self.name}: {first_line(error).removeprefix(f'{self.name}: ')}")

    def end(self) -> None:
        self._ending.set()
        self.instance = object()
        if self._boot_id:
            with contextlib.suppress(Lost):  # a lost server has no lease to release
                replies.whole(self._http, "POST", "/release", self._timeout(5.0), json={"run_id": self.run_id})
        if self._heartbeats is not None and self._heartbeats is not threading.current_thread():
            self._heartbeats.join(self.timeouts.reply_s + self.timeouts.connect_s)
        self._http.close()
        if self.files is not None:
            self.files.close()


def _parts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Split requests into POSTs; consecutive equal prompts count once."""
    part: list[Request] = []
    tokens = 0
    for request in requests:
        whole = len(request.prompt_ids) + sum(len(encoded(shown.image)) // IMAGE_BYTES for shown in request.images)
        new = 0 if part and part[-1].prompt_ids == request.prompt_ids else whole
        if part and (len(part) >= BATCH or tokens + new > BATCH_TOKENS):
            yield part
            part, tokens, new = [], 0, whole
        part.append(request)
        tokens += new
    if part:
        yield part
