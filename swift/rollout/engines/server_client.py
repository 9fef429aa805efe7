"""The client of the engine behind a `swift rollout` server, over HTTP.

    requests go out in POST /infer/; completions come as lines while others are still sampled
    new weights travel as files where both sides see the same disk, as a broadcast, or over HTTP; the ack counts
    a server that is gone is waited for; then it gets the present weights, and its requests again
    memory is its own business: a client neither puts it to sleep nor drops its adapter

Every POST names the version it counts on, so that a restarted server never samples with its base weights for a
run that has sent others. Failures without any progress in between are bounded; after that the engine is dead.
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
"""Pauses before the next try after a failure of the server; when they are used up, it is given up."""
BATCH = 1024
"""Largest number of requests in one POST."""
BATCH_TOKENS = 4_000_000
"""Largest number of prompt tokens in one POST."""
LONGEST = 1 << 22
"""Longest context that a server is believed to have."""

PATHS = {"commit": "weights/commit"}
"""Of calls whose routes have other names."""
SHAPES: dict[str, Any] = {"commit": wire.Acknowledged, "versions": wire.VersionsReply}
"""Of replies that hold something."""


class ServerClient(ServerCalls):
    """See the module's docstring.

    Args:
        url: of the server.
        spec: what this run expects of it.
        timeouts: see `Timeouts`.
        api_key: its key; None takes SWIFT_API_KEY from the environment, if set.
        run_id: of this run, the same for all its servers; None makes one.
        weight_transport: "disk", "http" or "broadcast"; None takes the disk where it is shared, and HTTP elsewhere.
        force_restart: have the server start anew before the adapter of the next version.
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
        bounds = replace(timeouts, stall_s=math.inf)  # a server watches its engines itself
        super().__init__(url, spec, api_key, bounds, run_id or secrets.token_hex(8), weight_transport)
        self.force_restart = force_restart
        self.instance: object = object()
        self.weights_folder: Path | None = None
        self.files: disk.RunFolder | None = None
        self._boot = ""
        self._base = EngineCounters()
        self._failures = self._line_bytes = 0
        self._writing: int | None = None  # version
        self._beating: threading.Thread | None = None

    @property
    def stored(self) -> str:  # type: ignore[override]
        """Files only where both sides see the same folder."""
        return "http" if self.weights_folder is None else "disk"

    # --- start ------------------------------------------------------------------------------------------------

    def connect(self) -> Capabilities:
        """Wait for the server, take its lease, and see whether it is the one we expect.

        Raises EngineDead when it cannot be reached in time; EngineError when it belongs to another run, does not accept
        the key, or serves something else.
        """
        try:
            self._await_server()
            info = self._info(self.timeouts.reply_s)
            self._check_expected(info)
            self._boot = info.boot_id
            self._take_lease()
        except Lost as lost:
            raise EngineDead(f"{self.name}: {lost}") from lost
        limit = min(info.max_model_len, self.spec.max_model_len or math.inf)
        self.weights_folder = self._shared_folder(info)
        if self.weights_folder is not None and self.files is None:
            self.files = disk.open_run(self.weights_folder, f"run-{self.run_id}")
        self._line_bytes = wire.line_bytes(int(min(limit, LONGEST)))
        self._base, self.devices = info.counters, info.capabilities.devices
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name=f"lease of {self.name}", daemon=True)
            self._beating.start()
        return replace(info.capabilities, max_model_len=int(limit), shares_weights=False, sleep_levels=(0,))

    def replace(self, how: str) -> EngineCounters | None:
        """Find the server again, after a pause; one that was restarted is taken over anew."""
        self.instance = object()
        self._failures += 1
        if self._failures > len(BACKOFF_S):
            raise EngineDead(f"{self.name}: failed {self._failures} times without any progress ({how})")
        self._ending.wait(BACKOFF_S[self._failures - 1])
        self.check_alive()
        self._await_server()
        try:
            info = self._info(self.timeouts.reply_s)
            same = info.boot_id == self._boot and info.run_id == self.run_id
            if same and info.version == self.version and not self.invalid:
                return None
            self._check_expected(info)
            self._take_lease(rebuild=same)
        except (EngineDead, SyncFailed):
            raise
        except (EngineError, ConfigError) as error:
            problem = error.problems[0].removeprefix(f"{self.name}: ")
            raise EngineDead(f"{self.name}: cannot be used again: {problem}") from error
        now = info.counters
        more = now - self._base - self.instance_counters if info.boot_id == self._boot else EngineCounters(restarts=1)
        self._boot, self._base = info.boot_id, now
        return more

    def progress(self) -> None:
        self._failures = 0

    # --- requests ---------------------------------------------------------------------------------------------

    def post(self, instance: object, requests: Sequence[Request]) -> None:
        if instance is not self.instance:
            raise Lost("its requests were given up")
        for part in _parts([self._with_ends(request) for request in requests]):
            asked = {request.request_id: request for request in part}
            content = wire.encode(wire.InferRequest.of(part, self.version))
            name = f"stream of {self.name}"
            threading.Thread(target=self._read, args=(instance, asked, content), name=name, daemon=True).start()

    def _with_ends(self, request: Request) -> Request:
        """With the ids that end a completion: the server may know others."""
        stops = tuple(sorted({*self.spec.eos_token_ids, *request.sampling.stop_token_ids}))
        return replace(request, sampling=replace(request.sampling, stop_token_ids=stops))

    def _read(self, instance: object, asked: Mapping[str, Request], content: bytes) -> None:
        left = set(asked)
        try:
            for event in self._events(asked, left, content):
                if instance is not self.instance:  # given up: the server sees the stream closed, and aborts
                    return
                if isinstance(event, Completion):
                    left.discard(event.request_id)
                elif isinstance(event, Failure):
                    left.difference_update(event.request_ids)
                if isinstance(event, EngineCounters):
                    self.instance_counters = event - self._base
                else:
                    self.deliver(instance, event)
        except Exception as error:  # such as a thread that cannot be started
            self.deliver(instance, Lost(f"{type(error).__name__}: {first_line(error)}"))

    def _events(self, asked: Mapping[str, Request], left: set[str], content: bytes) -> Iterator[Event | EngineCounters]:
        """What comes of the requests of one POST, and what the engines did by then. left: ids that have not come."""
        headers, timeout = {"Content-Type": "application/json"}, self._bounds(self.timeouts.reply_s)
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
            yield Lost("its stream was cut off")
        except Lost as lost:
            yield lost
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            yield Lost(first_line(error))

    def _check_completion(self, completion: Completion, asked: Mapping[str, Request]) -> None:
        """Raises Lost: it cannot be what was asked for, so that this is no engine of the run's model."""
        name = completion.request_id
        if name not in asked:
            raise Lost(f"it answers a request that it was not sent: {name[:80]!r}")
        if problem := wire.not_of(completion, asked[name], self._architecture.get("vocab_size")):
            raise Lost(f"its answer to request {name} is none: {problem}")

    def _refusal(self, left: set[str], problem: Exception) -> Iterator[Event]:
        """Nothing of a POST was taken."""
        if isinstance(problem, Lost):
            yield problem
        elif isinstance(problem, Busy):
            yield Returned(list(left), busy=True)
        elif isinstance(problem, RequestRefused) and problem.request_id in left:  # the others come again
            yield Failure([problem.request_id], problem)
            yield Returned([name for name in left if name != problem.request_id])
        elif isinstance(problem, SwiftError):
            yield Failure(list(left), problem)
        else:
            yield Lost(first_line(problem))

    def abort(self, request_ids: Sequence[str]) -> None:
        def abort() -> None:
            body = {"request_ids": list(request_ids)}
            with contextlib.suppress(Lost, EngineError):  # then the stream sees it
                self._get("POST", "/abort_requests", self.timeouts.reply_s, dict, json=body)

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
                began = self._get("POST", "/weights/begin", timeout_s, wire.Began, content=body, headers=headers)
                return began.update
            case "load_adapter":
                return self._upload_adapter(**fields)
        shape = SHAPES.get(name, dict)
        said = self._get("POST", f"/{PATHS.get(name, name)}", timeout_s, shape, json=fields or None)
        match name:
            case "commit":
                return {"ack": said.ack, "asleep": said.asleep}
            case "versions":
                return said.versions
        return said

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
        """Raises Lost as soon as the server is another process."""
        boot = self._get("POST", "/restart", self.timeouts.reply_s, wire.Boot).boot_id
        deadline = time.monotonic() + self.timeouts.server_s
        while self._info(self.timeouts.start_s).boot_id == boot:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.name}: it has not started anew within {self.timeouts.server_s:g} s; see its log"
                )
            self._ending.wait(self.timeouts.poll_s)
        raise Lost("it started anew, as --force_restart wants")

    def _upload_adapter(self, adapter: AdapterWeights, version: int) -> dict[str, Any]:
        metadata = {"adapter_config": json.dumps(adapter.config)}
        data = disk.as_bytes([(name, adapter.tensors[name]) for name in sorted(adapter.tensors)], metadata)
        return {"result": self._upload("/v1/load_lora_adapter", {"version": version}, data, wire.Acknowledged).ack}

    # --- weights ----------------------------------------------------------------------------------------------

    def choose(self, device: torch.device) -> str:
        """Files on a shared disk, else HTTP; a broadcast must be asked for, since it needs a way back to here."""
        return self.stored

    def receivers(self) -> int:
        return self._info(self.timeouts.reply_s).receivers

    def payload(self, way: str, bucket: Bucket, version: int) -> Any:
        if way == "http":
            return bucket.once("safetensors", lambda: disk.as_bytes(bucket.tensors))
        if self.files is None:
            raise SyncFailed(
                f"weights: {self.name}: --weight_transport disk: it has no weights folder that is seen here"
            )
        files = self.files
        self._writing = version
        return bucket.once(f"disk {files.path}", lambda: files.add(bucket, version))

    def send_bucket(self, update: int, way: str, payload: Any, timeout_s: float) -> Callable[[], Any]:
        if way == "http":
            return self._aside(lambda: self._upload("/weights/bucket", {"update": update}, payload, dict), timeout_s)
        body = {"update": update, **({"broadcast": payload} if way == "broadcast" else payload)}
        return self._aside(
            lambda: self._get("POST", "/weights/bucket", self.timeouts.sync_s, dict, json=body), timeout_s
        )

    def abort_update(self, update: int) -> None:
        with contextlib.suppress(Lost, SwiftError):
            self._get("POST", "/weights/abort", self.timeouts.reply_s, dict, json={"update": update})

    def update_ended(self, *, complete: bool) -> None:
        """Files that were written are complete, or given up."""
        version, self._writing = self._writing, None
        if self.files is not None and version is not None:
            self.files.update_ended(version, complete=complete)

    def address(self) -> str:
        parts = urlsplit(self.url)
        with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=5.0) as one:
            return str(one.getsockname()[0])

    # --- watching ---------------------------------------------------------------------------------------------

    def ask_health(self) -> Health:
        try:
            state = replies.whole(self._http, "GET", "/health", self._bounds(5.0)).read(wire.State, self.name)
            return Health(state.alive, state.detail)
        except (Lost, EngineError) as error:
            return Health(False, f"{self.name}: {first_line(error).removeprefix(f'{self.name}: ')}")

    def end(self) -> None:
        self._ending.set()
        self.instance = object()
        if self._boot:
            with contextlib.suppress(Lost):  # a server that is gone has no lease to give back
                replies.whole(self._http, "POST", "/release", self._bounds(5.0), json={"run_id": self.run_id})
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join(self.timeouts.reply_s + self.timeouts.connect_s)
        self._http.close()
        if self.files is not None:
            self.files.close()


def _parts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Requests for one POST each; equal prompts in a row count once."""
    part: list[Request] = []
    tokens = 0
    for request in requests:
        new = 0 if part and part[-1].prompt_ids == request.prompt_ids else len(request.prompt_ids)
        if part and (len(part) >= BATCH or tokens + new > BATCH_TOKENS):
            yield part
            part, tokens, new = [], 0, len(request.prompt_ids)
        part.append(request)
        tokens += new
    if part:
        yield part
