"""The engine that lives behind HTTP: one `swift rollout` server.

    submit* -> stream        a batch is one POST /infer/; completions come as lines while others are still sampled
    new weights              HTTP, a broadcast, or files where both sides see the same disk; the server's receipt counts
    a server that is gone    is waited for; then it gets the present weights, and its requests again with ids and seeds

What was requested comes back exactly once: a completion counts when its line has been read, and from then on its id is
unknown. Every batch names the version it counts on, so a server that was restarted never samples with its base weights
for a run that has published others. Failures without any progress in between are bounded; after that the engine is
dead, and `EnginePool` gives its requests to other servers.

`submit`, `abort`, `pause`, `health`, `info` and `close` may be called while another thread is in `stream`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from swift.errors import ConfigError, EngineAsleep, EngineDead, EngineError, RequestRefused, SwiftError, SyncFailed
from swift.rollout.engines import wire
from swift.rollout.engines.base import (
    ALL_TAGS,
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    Health,
    PauseMode,
    SleepLevel,
    SleepReport,
    Tag,
    TensorInfo,
    WeightUpdate,
)
from swift.rollout.engines.elsewhere import EngineElsewhere, Pending, fields_of, impossible
from swift.rollout.engines.remote_replies import (
    Busy,
    Failed,
    Lost,
    first_line,
    kind_of,
    problem_of,
    shut,
    without_secrets,
)
from swift.rollout.engines.remote_update import Kept, RemoteTransport, RemoteUpdate
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.engines.worker.protocol import completion_from_json
from swift.rollout.weight_sync import disk
from swift.rollout.weight_sync.broadcast import BroadcastSender
from swift.types import Completion, Request

LOOK_S = 1.0
"""How often a waiting stream looks at the clocks of its requests."""
BATCH = 1024
"""Most samples of one POST."""
BATCH_TOKENS = 4_000_000
"""Most prompt tokens of one POST: about half of what a body may hold."""
BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before the next try after a failure of the server; when they are used up, it is given up."""
BUSY_S = 1.0
"""Pause after the server said that its queue is full."""


@dataclass(frozen=True, slots=True)
class RemoteTimeouts:
    """Bounds on every wait for a server, in seconds; the defaults are those of the settings.

    server_s: until it can be reached and is healthy, at the start and after it was lost; poll_s: how often it is looked
    for. request_s: one request, from its submission to its completion; then it is aborted and tried once more. sync_s:
    one update. start_s: when it makes its engines anew. sleep_s: sleep or wake. pause_s: pause. reply_s: any other
    call, and silence of a stream. connect_s: a connection. beat_s: between signs of life that keep the lease.
    """

    server_s: float = 120.0
    poll_s: float = 2.0
    request_s: float = 600.0
    sync_s: float = 300.0
    start_s: float = 600.0
    sleep_s: float = 60.0
    pause_s: float = 60.0
    reply_s: float = 15.0
    connect_s: float = 5.0
    beat_s: float = 10.0


@dataclass(slots=True)
class _Pending(Pending):
    """batch: that it travelled with, and whose stream will bring it."""

    batch: _Batch | None = None


@dataclass(eq=False, slots=True)
class _Batch:
    """One POST /infer/. closed: nobody reads it any more."""

    ids: set[str]
    closed: bool = False
    response: httpx.Response | None = None


class RemoteEngine(EngineElsewhere):
    """See the module's docstring; connects when it is first needed.

    Args:
        url: of the server.
        spec: what this run expects of it; None takes any.
        api_key: its key; None takes SWIFT_API_KEY from the environment, if set.
        timeouts: see `RemoteTimeouts`.
        run_id: of this run, the same for all its servers; None makes one.
        transport: how weights travel; None takes the disk where it is shared, and HTTP elsewhere.
        keeps_weights: hold the last update for a server that is restarted; False makes that final.
    """

    def __init__(
        self,
        url: str,
        *,
        spec: EngineSpec | None = None,
        api_key: str | None = None,
        timeouts: RemoteTimeouts | None = None,
        run_id: str | None = None,
        transport: RemoteTransport | None = None,
        keeps_weights: bool = True,
    ) -> None:
        self.url = url.rstrip("/")
        super().__init__(f"server {without_secrets(self.url)}")
        self.spec = spec
        self.timeouts = timeouts or RemoteTimeouts()
        self.run_id = run_id or secrets.token_hex(8)
        self.transport = transport
        self.keeps_weights = keeps_weights
        self.weights_folder: Path | None = None
        self.files: disk.RunFolder | None = None
        self.broadcaster: BroadcastSender | None = None
        key = api_key or os.environ.get("SWIFT_API_KEY")
        headers = {wire.RUN_HEADER: self.run_id, **({"Authorization": f"Bearer {key}"} if key else {})}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._http = httpx.Client(base_url=self.url, headers=headers, trust_env=False, limits=limits)
        self._capabilities: Capabilities | None = None
        self._boot = ""
        self._changed = threading.Condition()
        self._connecting = threading.RLock()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._outstanding: dict[str, _Pending] = {}
        self._batches: set[_Batch] = set()
        self._events: deque[tuple[_Batch, Any]] = deque()
        self._base = EngineCounters()
        self._failures = 0
        self._kept: Kept | None = None
        self._adapter: tuple[int, AdapterWeights] | None = None
        self._published = False
        self._asleep = ""
        self._slept: tuple[SleepLevel, set[Tag]] = (0, set())
        self._paused_there = False
        self._ending = threading.Event()
        self._beating: threading.Thread | None = None

    # --- start ------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Of the server's engines; waits until it can be reached."""
        if self._capabilities is None:
            with self._connecting:
                if self._capabilities is None:
                    self._check_alive()
                    self._connect()
        assert self._capabilities is not None
        return self._capabilities

    def _connect(self) -> None:
        """Wait for the server, take its lease, and see whether it is the one we expect.

        Raises:
            EngineDead: it cannot be reached in time.
            EngineError: it belongs to another run, does not accept the key, or serves something else.
        """
        self._await_server()
        info = self._call("GET", "/info", self.timeouts.reply_s)
        self._check_expected(info)
        self._take_lease()
        self._boot = info["boot_id"]
        fields = fields_of(info["capabilities"])
        limit = info["max_model_len"]
        if self.spec is not None and self.spec.max_model_len is not None:
            limit = min(limit, self.spec.max_model_len)
        self.weights_folder = self._shared_folder(info)
        if self.weights_folder is not None and self.files is None:
            self.files = disk.open_run(self.weights_folder, self.run_folder)
        ways = ("disk", "http", "broadcast") if self.weights_folder is not None else ("http", "broadcast")
        self._capabilities = replace(Capabilities(**fields), max_model_len=limit, transports=ways, shares_weights=False)
        self._count_from(info["counters"])
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name=f"lease of {self.name}", daemon=True)
            self._beating.start()

    def _await_server(self) -> None:
        """Until /health says that it samples.

        Raises:
            EngineDead: not within `server_s`.
        """
        deadline = time.monotonic() + self.timeouts.server_s
        seen = "no answer"
        while True:
            self._check_open()
            try:
                reply = self._http.get("/health", timeout=_bounds(min(5.0, self.timeouts.reply_s), self.timeouts))
                state = reply.json() if reply.status_code in (200, 503) else {}
                if reply.status_code == 200 or state.get("alive") or state.get("void"):
                    return
                seen = f"HTTP {reply.status_code} {state.get('detail', '')}".strip()
            except (httpx.HTTPError, ValueError) as error:
                seen = first_line(error)
            if time.monotonic() + self.timeouts.poll_s > deadline:
                break
            self._ending.wait(self.timeouts.poll_s)
        raise self._die(
            f"not healthy within {self.timeouts.server_s:g} s ({seen}); start it with `{self._start_line()}`, or raise "
            "--vllm_server_timeout"
        )

    def _start_line(self) -> str:
        model = self.spec.model if self.spec is not None else "MODEL"
        parts = urlsplit(self.url)
        words = ["swift", "rollout", "--model", model, "--host", parts.hostname or "", "--port", str(parts.port or 80)]
        local = (parts.hostname or "").startswith("127.") or parts.hostname == "localhost"
        return shlex.join(words if local else [*words, "--api_key", "KEY"])

    def _take_lease(self, *, rebuild: bool = False) -> None:
        """Own the server. Whoever holds it is waited for while it seems gone, not while it lives."""
        me = f"{socket.gethostname()}, process {os.getpid()}"
        deadline = time.monotonic() + self.timeouts.server_s
        left: float | None = None
        while True:
            body = {"run_id": self.run_id, "name": me, "rebuild": rebuild}
            reply = self._request("POST", "/reset", self.timeouts.start_s, json=body)
            if not (reply.status_code == 409 and kind_of(reply) == "held"):
                self._asleep = self._answer(reply)["asleep"]
                return
            now = float(reply.json()["error"]["expires_in_s"])
            if (left is not None and now > left) or time.monotonic() + self.timeouts.poll_s > deadline:
                raise EngineError(f"{self.name}: {reply.json()['error']['message']}")
            left = now
            self._ending.wait(self.timeouts.poll_s)
            self._check_open()

    def _check_expected(self, info: dict[str, Any]) -> None:
        """Raises EngineError when the server is not what this run needs."""
        if info.get("protocol") != wire.PROTOCOL:
            raise EngineError(
                f"{self.name}: it speaks protocol {info.get('protocol')}, this is {wire.PROTOCOL}; use the same "
                "version of swift on both sides"
            )
        if self.spec is None:
            return
        mine, theirs = wire.architecture(self.spec.model), info["architecture"]
        other = [
            f"{name} {theirs.get(name)} instead of {mine[name]}" for name in mine if theirs.get(name) != mine[name]
        ]
        problems = []
        if other:
            problems.append(f"it serves {info['model']}, the run has {self.spec.model} ({', '.join(other)})")
        if info["dtype"] != self.spec.dtype:
            problems.append(f"it computes in {info['dtype']}, the run in {self.spec.dtype}; give both --torch_dtype")
        if self.spec.max_model_len is not None and info["max_model_len"] < self.spec.max_model_len:
            problems.append(
                f"its --vllm_max_model_len is {info['max_model_len']}, the run needs {self.spec.max_model_len} tokens; "
                f"start it with --vllm_max_model_len {self.spec.max_model_len}, or lower --max_length here"
            )
        if problems:
            raise EngineError(*(f"{self.name}: {problem}" for problem in problems))

    def _shared_folder(self, info: dict[str, Any]) -> Path | None:
        """The server's weights folder, if this host sees the very same one."""
        if not info.get("weights_folder") or not info.get("weights_probe"):
            return None
        folder = Path(info["weights_folder"])
        try:
            same = (folder / info["weights_probe"]).read_text(encoding="utf-8") == info["boot_id"]
        except OSError:
            return None
        return folder if same and os.access(folder, os.W_OK) else None

    def _beat(self) -> None:
        """Signs of life that keep the lease while nothing else is sent."""
        while not self._ending.wait(self.timeouts.beat_s):
            with contextlib.suppress(httpx.HTTPError, ValueError):  # whoever needs the server will see
                self._http.get("/health", timeout=_bounds(self.timeouts.reply_s, self.timeouts))

    # --- sampling ---------------------------------------------------------------------------------------------

    @property
    def _pending(self) -> Mapping[str, Pending]:
        return self._outstanding

    def submit(self, request: Request) -> None:
        """See `InferenceEngine.submit`; it travels when `stream` is asked for."""
        self._check_alive()
        self.check_length(request)
        self._check_awake()
        self._check_whole()
        with self._changed:
            if request.request_id in self._outstanding:
                raise EngineError(f"request: {request.request_id}: is outstanding already; give each an id of its own")
            self._outstanding[request.request_id] = _Pending(request)
            self._waiting[request.request_id] = request
            self._changed.notify_all()

    def stream(self) -> Iterator[Completion]:
        """See `InferenceEngine.stream`.

        Raises:
            EngineDead: the server is gone, or failed too often.
            RequestRefused: an engine does not take one request; another `stream` goes on with the rest.
            EngineError: what an engine raised there; a completion that cannot be.
            SyncFailed: requests wait, but the weights are void.
        """
        while True:
            while self._ready:
                yield self._ready.popleft()
            self._between()
            if not self._outstanding or self._paused_at is not None:
                return
            self._check_alive()
            self._check_whole()
            try:
                self._post_waiting()
                self._take_events()
                self._check_clocks()
            except (Lost, Failed) as lost:
                try:
                    self._recover(str(lost))
                except SyncFailed as error:  # others may take its requests
                    raise self._die(error.problems[0].removeprefix(f"{self.name}: ")) from error
            except Busy:
                self._wait_streaming(BUSY_S)

    def _wait_streaming(self, seconds: float) -> None:
        """A pause of a stream, which `close` ends."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._ending.wait(self._patience(left)):
            self._between()

    def _post_waiting(self) -> None:
        """Everything that waits, in as few batches as fit, each read by a thread of its own."""
        while True:
            with self._changed:
                chosen = self._next_batch()
                if not chosen:
                    return
                batch = _Batch({request.request_id for request in chosen})
                now = time.monotonic()
                for request in chosen:
                    del self._waiting[request.request_id]
                    pending = self._outstanding[request.request_id]
                    pending.batch, pending.sent_at, pending.expired_at = batch, now, None
                self._batches.add(batch)
            body = wire.encode(wire.InferRequest.of([self._with_ends(request) for request in chosen], self.version))
            threading.Thread(target=self._read, args=(batch, body), name=f"stream of {self.name}", daemon=True).start()

    def _next_batch(self) -> list[Request]:
        chosen: list[Request] = []
        tokens, last = 0, None
        for request in self._waiting.values():
            same = last is not None and last.prompt_ids == request.prompt_ids
            tokens += 0 if same else len(request.prompt_ids)
            if chosen and (len(chosen) >= BATCH or tokens > BATCH_TOKENS):
                break
            chosen.append(request)
            last = request
        return chosen

    def _with_ends(self, request: Request) -> Request:
        """The run's end tokens are told with every request: those of the server's model are its own affair."""
        ends = self.spec.eos_token_ids if self.spec is not None else ()
        stops = tuple(sorted({*request.sampling.stop_token_ids, *ends}))
        return replace(request, sampling=replace(request.sampling, stop_token_ids=stops))

    def _read(self, batch: _Batch, content: bytes) -> None:
        """The thread of one batch: lines become events, and so does its end."""
        try:
            headers = {"Content-Type": "application/json"}
            timeout = _bounds(self.timeouts.reply_s, self.timeouts)
            with self._http.stream("POST", "/infer/", content=content, headers=headers, timeout=timeout) as reply:
                batch.response = reply
                if reply.status_code != 200:
                    reply.read()
                    self._event(batch, problem_of(self.name, reply))
                    return
                for text in reply.iter_lines():
                    if batch.closed:
                        return
                    if text:
                        self._event(batch, json.loads(text))
            self._event(batch, Lost("its stream was cut off"))
        except (httpx.HTTPError, httpx.StreamError, ValueError, RuntimeError) as error:
            self._event(batch, Lost(first_line(error)))

    def _event(self, batch: _Batch, content: Any) -> None:
        with self._changed:
            self._events.append((batch, content))
            self._changed.notify_all()

    def _take_events(self) -> None:
        """What came; waits a moment for the first of it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._events or self._waiting or self._closed or self._paused_at is not None or self._ready,
                self._patience(LOOK_S),
            )
            events = list(self._events)
            self._events.clear()
        for index, (batch, content) in enumerate(events):
            try:
                self._take(batch, content)
            except BaseException:
                with self._changed:
                    self._events.extendleft(reversed(events[index + 1 :]))
                raise

    def _take(self, batch: _Batch, content: Any) -> None:
        if batch not in self._batches:
            return  # given up meanwhile
        if isinstance(content, Exception):
            self._end_batch(batch)
            if isinstance(content, RequestRefused):
                with self._changed:
                    self._outstanding.pop(content.request_id, None)
                    self._waiting.pop(content.request_id, None)
            raise content
        if "counters" in content:
            self._count(content["counters"])
        if content["event"] == "completion":
            self._failures = 0
            self._arrive(batch, completion_from_json(content["completion"]))
        elif content["event"] == "failed":
            self._refused(batch, content)
        elif content["event"] == "end":
            self._end_batch(batch)

    def _refused(self, batch: _Batch, content: dict[str, Any]) -> None:
        """Requests that an engine did not take, or lost."""
        error = wire.error_from_body(content, self.name)
        if error is None or isinstance(error, EngineDead):
            what = content["error"].get("message", "it failed")
            with self._changed:
                for name in content["ids"]:
                    if name in self._outstanding and self._outstanding[name].batch is batch:
                        self._again(self._outstanding[name])
            raise Lost(f"failed: {what}")
        with self._changed:
            for name in content["ids"]:
                self._outstanding.pop(name, None)
        if isinstance(error, SyncFailed):
            self._void = error.problems[0]
        if isinstance(error, RequestRefused):
            error.request_id = content["ids"][0]  # by its name here
        raise error

    def _arrive(self, batch: _Batch, completion: Completion) -> None:
        """Accept a completion once, if anybody waits for it."""
        with self._changed:
            pending = self._outstanding.get(completion.request_id)
            if pending is None or pending.batch is not batch:
                return
            if completion.finish_reason == "abort" and pending.expired:
                if self._comes_again(pending, completion):
                    self._again(pending)
                    return
            elif completion.finish_reason == "abort" and not pending.aborted:
                self._again(pending)  # somebody else's doing
                return
            del self._outstanding[completion.request_id]
        problem = impossible(completion)
        if problem:
            raise EngineError(f"{self.name}: request {completion.request_id}: {problem}")
        self._ready.append(completion)

    def _again(self, pending: _Pending) -> None:
        """Same id, same seed; the tokens so far are dropped."""
        request = pending.request
        pending.batch = None
        if pending.aborted:
            del self._outstanding[request.request_id]
            self._ready.append(Completion(request.request_id, [], [], "abort"))
        else:
            self._waiting[request.request_id] = request

    def _end_batch(self, batch: _Batch) -> None:
        """A batch whose stream is over; what it still owes begins anew."""
        with self._changed:
            self._batches.discard(batch)
            for pending in [one for one in self._outstanding.values() if one.batch is batch]:
                self._again(pending)

    def _drop_batches(self) -> None:
        """Nobody reads the present streams any more: the server sees them closed, and aborts."""
        with self._changed:
            batches = list(self._batches)
        for batch in batches:
            self._end_batch(batch)
            batch.closed = True
            if batch.response is not None:
                with contextlib.suppress(httpx.HTTPError, RuntimeError, OSError):  # its thread may be in it
                    shut(batch.response)

    def _check_clocks(self) -> None:
        """Requests that take too long are aborted; a server that does not even do that is given up."""
        now = time.monotonic()
        with self._changed:
            running = [one for one in self._outstanding.values() if one.batch is not None]
            late = [one for one in running if one.expired_at is None and now - one.sent_at > self.timeouts.request_s]
            deaf = [one for one in running if one.expired_at and now - one.expired_at > 2 * self.timeouts.reply_s]
            for one in late:
                one.expired_at = now
        if deaf:
            raise self._die(f"does not abort request {deaf[0].request.request_id}")
        if late:
            self._tell_abort([one.request.request_id for one in late])

    def _tell_abort(self, ids: list[str]) -> None:
        with contextlib.suppress(Lost, Failed, EngineError):  # then the stream sees it, or the clock
            self._call("POST", "/abort_requests", self.timeouts.reply_s, json={"request_ids": ids})

    def _count(self, said: dict[str, Any]) -> None:
        """What the server counted for this run, and the servers before it."""
        for name, value in said.items():
            setattr(self.counters, name, getattr(self._before, name) + value - getattr(self._base, name))

    def _count_from(self, said: dict[str, Any]) -> None:
        """Another server, or the same one for the first time, counts from here on."""
        self._before, self._base = replace(self.counters), EngineCounters(**said)

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `InferenceEngine.abort`; from any thread."""
        with self._changed:
            names = [name for name in self._outstanding if request_ids is None or name in set(request_ids)]
            there = []
            for name in names:
                pending = self._outstanding[name]
                pending.aborted = True
                if name in self._waiting:
                    del self._waiting[name]
                    self._again(pending)
                elif pending.batch is not None:
                    there.append(name)
            self._changed.notify_all()
        if there:
            self._tell_abort(there)

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `InferenceEngine.pause`; "keep" also from another thread than that of `stream`."""
        self._check_alive()
        if mode == "abort":
            self.abort()
        if mode in ("abort", "wait"):
            self._finish_outstanding()
        else:
            with self._changed:
                travelled = any(one.batch is not None for one in self._outstanding.values())
            if travelled:
                self._guarded(lambda: self._call("POST", "/pause?mode=keep", self.timeouts.pause_s))
                self._paused_there = True
        with self._changed:
            self._paused_at = self._paused_at or time.monotonic()
            self._changed.notify_all()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._check_alive()
        if self._paused_there:
            self._guarded(lambda: self._call("POST", "/resume", self.timeouts.pause_s))
        paused_at, self._paused_at, self._paused_there = self._paused_at, None, False
        with self._changed:
            for pending in self._outstanding.values() if paused_at is not None else ():
                pending.sent_at += time.monotonic() - (paused_at or 0)

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """See `InferenceEngine.begin_update`."""
        self._check_alive()
        self._check_at_rest("new weights")
        assert self.capabilities is not None
        update = RemoteUpdate(self, manifest, version)
        self._guarded(update.begin)
        return update

    def weights_change(self, why: str) -> None:
        """For `RemoteUpdate`: the server's weights are void from now on, and those kept are out of date."""
        self._void = why
        self._kept = self._adapter = None

    def weights_arrived(self, kept: Kept, asleep: str) -> None:
        """For `RemoteUpdate`: they are whole again."""
        self._kept = kept if self.keeps_weights else None
        self._adapter = None
        self._published = True
        self._void, self._asleep = "", asleep
        level, tags = self._slept
        self._slept = (1 if level == 2 and tags else 0 if level == 2 else level, tags)
        self.version = kept.version

    def rebuild(self) -> None:
        """See `InferenceEngine.rebuild`; outstanding requests stay so, and begin anew."""
        self._check_alive()
        assert self.capabilities is not None
        self._drop_batches()
        self._kept = self._adapter = None
        self._published = False
        self.version, self._void = 0, ""
        self._slept = (0, set())
        self._guarded(lambda: self._take_lease(rebuild=True))

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """See `InferenceEngine.load_adapter`."""
        self._check_alive()
        self._check_whole()
        self._check_at_rest("an adapter")
        if not self.capabilities.lora:
            raise self._unsupported("LoRA adapters")
        ack = self._guarded(lambda: self._send_adapter(adapter, version))
        if self.keeps_weights:
            self._adapter = (
                version,
                replace(adapter, tensors={k: t.detach().clone() for k, t in adapter.tensors.items()}),
            )
        self._published, self.version = True, version
        return cast("Ack", ack)

    def _send_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        names = sorted(adapter.tensors)
        metadata = {"adapter_config": json.dumps(adapter.config, default=_plain)}
        data = disk.as_bytes([(name, adapter.tensors[name]) for name in names], metadata)
        reply = self._upload("/v1/load_lora_adapter", {"lora_name": f"policy-v{version}", "version": version}, data)
        ack = Ack(**reply["ack"])
        if (ack.version, ack.tensors, ack.digest) != (version, len(names), adapter.digest()):
            raise SyncFailed(
                f"weights: adapter version {version} for {self.name}: it confirms version {ack.version}, digest "
                f"{ack.digest}; sent was digest {adapter.digest()}"
            )
        return ack

    def drop_adapter(self) -> None:
        """See `InferenceEngine.drop_adapter`."""
        self._check_alive()
        self._check_at_rest("a change of adapter")
        state = self._guarded(lambda: self._call("POST", "/v1/unload_lora_adapter", self.timeouts.sync_s, json={}))
        self._adapter = None
        self.version = state["version"]

    def reset_caches(self) -> None:
        """See `InferenceEngine.reset_caches`."""
        self._check_alive()
        self._guarded(lambda: self._call("POST", "/reset_prefix_cache", self.timeouts.sync_s))

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """See `InferenceEngine.sleep`."""
        self._check_alive()
        if level == 0:
            return SleepReport()
        self._check_idle("sleep")
        path = f"/sleep?level={level}&mode=wait"
        state = self._guarded(lambda: self._call("POST", path, self.timeouts.sleep_s))
        self._asleep = state["asleep"]
        self._slept = (max(level, self._slept[0]), set(ALL_TAGS))
        return SleepReport(state["freed_bytes"], state["note"])

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """See `InferenceEngine.wake`."""
        self._check_alive()
        path = "/wake_up?" + "&".join(f"tags={tag}" for tag in tags)
        state = self._guarded(lambda: self._call("POST", path, self.timeouts.sleep_s))
        self._asleep = state["asleep"]
        level, asleep = self._slept
        asleep = asleep - set(tags)
        self._slept = (level if asleep or level == 2 else 0, asleep)
        return bool(state["fully_awake"])

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """See `InferenceEngine.health`."""
        if (known := self._no_health()) is not None:
            return known
        try:
            reply = self._http.get("/health", timeout=_bounds(5.0, self.timeouts))
            state = reply.json()
            return Health(bool(state["alive"]), self.version, str(state["detail"]))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return Health(False, self.version, f"{self.name}: {first_line(error)}")

    def info(self) -> dict[str, Any]:
        """See `InferenceEngine.info`; what the server says of itself as far as it answers."""
        facts: dict[str, Any] = {"engine": "remote", "server": without_secrets(self.url), "run_id": self.run_id}
        if not self._closed and self._dead is None:
            try:
                facts |= {"state": self._call("GET", "/info", 5.0)}
            except (Lost, Failed, EngineError) as error:
                facts["state"] = str(error)
        return {**facts, "version": self.version, "outstanding": len(self._outstanding)}

    def close(self) -> None:
        """See `InferenceEngine.close`: the lease is given back; a stream in another thread ends with `EngineDead`."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify_all()
        self._ending.set()
        if not first:
            return
        self._drop_batches()
        if self._boot and self._dead is None:
            with contextlib.suppress(httpx.HTTPError):  # a server that is gone has no lease to give back
                self._http.post("/release", json={"run_id": self.run_id}, timeout=_bounds(5.0, self.timeouts))
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join(self.timeouts.reply_s + self.timeouts.connect_s)
        self._http.close()
        if self.broadcaster is not None:
            self.broadcaster.close()
        if self.files is not None:
            self.files.close()
        self._kept = self._adapter = None

    @property
    def run_folder(self) -> str:
        """Below the weights folder, what belongs to this run."""
        return f"run-{self.run_id}"

    # --- calls ------------------------------------------------------------------------------------------------

    def _request(self, method: str, path: str, timeout_s: float, **options: Any) -> httpx.Response:
        """One request.

        Raises:
            Lost: no answer.
        """
        try:
            return self._http.request(method, path, timeout=_bounds(timeout_s, self.timeouts), **options)
        except httpx.TimeoutException as error:
            problem = f"no answer to {path.partition('?')[0]} within {timeout_s:g} s"
            raise Lost(problem + (self._in_the_way() if timeout_s > self.timeouts.reply_s else "")) from error
        except (httpx.HTTPError, RuntimeError) as error:
            self._check_open()
            raise Lost(first_line(error)) from error

    def _in_the_way(self) -> str:
        """What a call that is carried out at rest waits for, if that are requests of others."""
        try:
            reply = self._http.get("/info", timeout=_bounds(min(5.0, self.timeouts.reply_s), self.timeouts))
            running = dict(reply.json()["running_of"])
        except (httpx.HTTPError, RuntimeError, ValueError, KeyError, TypeError):
            return ""
        running.pop(f"run {self.run_id}", None)
        said = ", ".join(f"{count} of {owner}" for owner, count in sorted(running.items()))
        return f"; it waits for requests of others: {said}" if said else ""

    def _call(self, method: str, path: str, timeout_s: float, **options: Any) -> dict[str, Any]:
        """One request and its answer.

        Raises:
            Lost, Failed.
            SwiftError: what the server raised, or that it refuses us.
        """
        return self._answer(self._request(method, path, timeout_s, **options))

    def _upload(self, path: str, params: dict[str, Any], data: bytes) -> dict[str, Any]:
        headers = {"Content-Type": wire.SAFETENSORS}
        return self._call("POST", path, self.timeouts.sync_s, params=params, content=data, headers=headers)

    def _answer(self, reply: httpx.Response) -> dict[str, Any]:
        if reply.status_code == 200:
            answer: dict[str, Any] = reply.json()
            return answer
        raise problem_of(self.name, reply)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """A call that may be repeated on the server that replaced this one."""
        while True:
            try:
                done = work()
            except (Lost, Failed) as lost:
                self._recover(str(lost))
            else:
                self._failures = 0
                return done

    # --- a server that was lost -----------------------------------------------------------------------------------

    def _recover(self, how: str) -> None:
        """Find the server again, bring it up to date, and have everything sent anew.

        Raises:
            EngineDead: it does not come back, or fails again and again.
            SyncFailed: it cannot be given the weights.
        """
        self._check_alive()
        self._drop_batches()
        while True:
            self._failures += 1
            if self._failures > len(BACKOFF_S):
                raise self._die(f"failed {self._failures} times without any progress ({how})")
            self._ending.wait(BACKOFF_S[self._failures - 1])
            self._check_alive()
            try:
                self._find_again()
                return
            except (Lost, Failed) as lost:
                how = str(lost)

    def _find_again(self) -> None:
        """Raises EngineDead also when what is found there is not what this run needs, or serves another run now."""
        with self._connecting:
            self._await_server()
            try:
                self._take_back(self._call("GET", "/info", self.timeouts.reply_s))
            except (EngineDead, SyncFailed):
                raise
            except (EngineError, ConfigError) as error:
                problem = error.problems[0].removeprefix(f"{self.name}: ")
                raise self._die(f"cannot be used again: {problem}") from error

    def _take_back(self, info: dict[str, Any]) -> None:
        """Bring a server up to date, unless it is the one of before, with all it had."""
        same = info["boot_id"] == self._boot and info["run_id"] == self.run_id
        if same and info["version"] == self.version and not self._void:
            return
        if info["boot_id"] != self._boot:
            self.counters.restarts += 1
        self._check_expected(info)
        self._take_lease(rebuild=same)
        self._boot = info["boot_id"]
        self._count_from(info["counters"])
        self._restore()

    def _restore(self) -> None:
        """Weights, adapter, sleep and pause of the server before."""
        if self._void:
            return
        if self._kept is not None:
            self._resend(self._kept)
        if self._adapter is not None:
            version, adapter = self._adapter
            self._send_adapter(adapter, version)
        if self._published and self._kept is None and self._adapter is None:
            self._void = f"the server has its base weights, and version {self.version} was not kept"
            return
        level, asleep = self._slept
        if level and (asleep or level == 2):
            self._asleep = self._call("POST", f"/sleep?level={level}&mode=wait", self.timeouts.sleep_s)["asleep"]
            awake = "&".join(f"tags={tag}" for tag in ALL_TAGS if tag not in asleep)
            if awake:
                self._asleep = self._call("POST", f"/wake_up?{awake}", self.timeouts.sleep_s)["asleep"]
        self._paused_there = False

    def _resend(self, kept: Kept) -> None:
        number = self.begin_there(kept.manifest, kept.version)
        for part in kept.parts:
            part(number)
        ack, self._asleep = self.commit_there(number)
        if (ack.version, ack.digest) != (kept.version, kept.digest):
            raise SyncFailed(
                f"weights: version {kept.version} for {self.name}: after its restart it has version {ack.version}, "
                f"digest {ack.digest}; before, it had digest {kept.digest}"
            )

    # --- for updates ------------------------------------------------------------------------------------------

    def begin_there(self, manifest: Sequence[TensorInfo], version: int) -> int:
        """POST /weights/begin; the number of the update."""
        body = wire.encode(wire.BeginUpdate.of(manifest, version))
        headers = {"Content-Type": "application/json"}
        return int(self._call("POST", "/weights/begin", self.timeouts.sync_s, content=body, headers=headers)["update"])

    def send_bytes(self, number: int, data: bytes) -> None:
        """One bucket as a safetensors file."""
        self._upload("/weights/bucket", {"update": number}, data)

    def send_file(self, number: int, entry: dict[str, str]) -> None:
        """One bucket that lies on the shared disk."""
        body = {"update": number, **entry}
        self._call("POST", "/weights/bucket", self.timeouts.sync_s, json=body)

    def commit_there(self, number: int) -> tuple[Ack, str]:
        """POST /weights/commit; the receipt, and what sleeps."""
        reply = self._call("POST", "/weights/commit", self.timeouts.sync_s, json={"update": number})
        return Ack(**reply["ack"]), reply["asleep"]

    def abort_there(self, number: int) -> None:
        """POST /weights/abort; never raises."""
        with contextlib.suppress(Lost, Failed, SwiftError):
            self._call("POST", "/weights/abort", self.timeouts.reply_s, json={"update": number})

    def post_aside(self, path: str, body: dict[str, Any]) -> Callable[[], Any]:
        """Send on a thread of its own; the result waits for the answer and raises what came of it."""
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append(self._call("POST", path, self.timeouts.sync_s, json=body))
            except Exception as error:  # raised in the thread that waits
                outcome.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def wait() -> Any:
            thread.join(self.timeouts.sync_s + self.timeouts.connect_s)
            if not outcome:
                raise SyncFailed(f"weights: {self.name}: no answer to {path} within {self.timeouts.sync_s:g} s")
            if isinstance(outcome[0], Exception):
                raise outcome[0]
            return outcome[0]

        return wait

    # --- states -----------------------------------------------------------------------------------------------

    def _check_awake(self) -> None:
        if self._asleep:
            raise EngineAsleep(f"{self.name}: {self._asleep}; wake it, and publish what it dropped")

    def _die(self, problem: str) -> EngineDead:
        """Nothing more is expected of this server."""
        error = EngineDead(f"{self.name}: {problem}")
        self._dead = error
        self._ending.set()
        return error


def _bounds(timeout_s: float, timeouts: RemoteTimeouts) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeouts.connect_s, timeout_s))


def _plain(value: Any) -> Any:
    """Sets and enums of a peft config as JSON."""
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    return getattr(value, "value", str(value))
