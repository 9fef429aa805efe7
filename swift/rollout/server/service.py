"""The state that all routes share: the request queue of the engines, the lease, and the loaded weights."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from swift.errors import EngineDead, EngineError, SwiftError, SyncFailed
from swift.rollout.engines import wire
from swift.rollout.engines.base import Ack, Health, InferenceEngine
from swift.rollout.engines.completion_stream import Arrival, CompletionStream, Failure
from swift.rollout.engines.events import DRAIN_S, START_S
from swift.rollout.engines.pool import in_parallel
from swift.rollout.engines.request_queue import RequestQueue
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.server.access import LIMITS, Lease, Refused
from swift.rollout.server.fingerprint import Fingerprint, take_fingerprint
from swift.rollout.server.metrics import Meter
from swift.rollout.server.sampled_versions import SampledVersions
from swift.rollout.weights.base import AdapterWeights
from swift.rollout.weights.sync import TRIAL_VERSION
from swift.types import Completion, Request

if TYPE_CHECKING:
    from swift.models.template import Template

logger = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_S = 1.0
HELD_S = 0.2
"""Interval at which a held-back request checks whether it may continue, in seconds."""
HEALTH_S = 1.0
"""Maximum age of a result of a health check, in seconds."""
HEALTH_LIMIT_S = 4.0
"""Timeout of a health check, in seconds; clients wait 5 s for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the server.

    model: name of the model for clients. names: further names. specs: one per engine. defaults: default sampling
    settings of requests. system: system message of chats without one, or None. weights_folder: folder in which clients
    may name paths. drain_s: maximum wait of a job for running requests. stall_s: time without progress after which the
    engines count as hung.
    """

    model: str
    names: tuple[str, ...] = ()
    specs: tuple[EngineSpec, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    api_key: str | None = None
    weights_folder: Path | None = None
    drain_s: float = DRAIN_S
    stall_s: float = 300.0
    request_s: float = math.inf

    @property
    def job_s(self) -> float:
        """Timeout of a job, in seconds; the longest job rebuilds the engines."""
        return START_S + self.specs[0].limit_s

    @property
    def silence_s(self) -> float:
        """Time without a bucket after which a weight update is aborted: other servers of the run may drain first."""
        return self.drain_s + self.specs[0].limit_s


class RestartWanted(EngineDead):
    """The run that owns the server has requested a new process."""


class Service:
    """See the module's docstring.

    Args:
        engine: the started engines, as one.
        template: tokenizer and chat template of the model.
        settings: see `Settings`.

    Attributes:
        adapter: name of the loaded adapter, or "".
        digest: digest of the present weights; "" for those of the start.
        sampled_versions: policy versions of completions for clients without a run.
        restart: reason of a requested restart of the process, or None.
        meter: counts requests and tokens.
        held: whether requests of clients without a run are held back, so that their samples do not get too old.
        large: lock while a thread decodes a large request, so that others get a thread and the GIL.
    """

    def __init__(self, engine: InferenceEngine, template: Template, settings: Settings) -> None:
        self.engine = engine
        self.template = template
        self.settings = settings
        self.boot_id = secrets.token_hex(8)
        self.started_at = time.time()
        self.queue = RequestQueue(
            engine,
            limit=LIMITS.queue,
            image_limit=LIMITS.queue_image_bytes,
            request_limit_s=settings.request_s,
            silence_s=settings.silence_s,
        )
        self.lease = Lease()
        self.sampled_versions = SampledVersions()
        self.meter = Meter()
        self.held = False
        self.large = asyncio.Lock()
        self.adapter = self.digest = ""
        self.restart: RestartWanted | None = None
        self._weights_changed = False  # since the engines were built
        self._health_check: asyncio.Task[tuple[bool, dict[str, Any]]] | None = None
        self._checked_at = 0.0
        device, parts = engine.capabilities.devices[0], settings.specs[0].tensor_parallel_size * len(settings.specs)
        if device.startswith("cuda:") and parts == 1:
            self.queue.do(lambda engine: torch.cuda.set_device(device))  # the current device is per thread
        self.probe = self._write_probe()
        prompt = template.tokenizer("A fingerprint of these weights:", add_special_tokens=True)["input_ids"]
        self._take_fingerprint = lambda engine: take_fingerprint(engine, list(prompt))
        self.fingerprint: Fingerprint = self.queue.do(self._take_fingerprint).result(settings.job_s)

    # --- state ------------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        holder, settings, can = self.lease.holder, self.settings, self.engine.capabilities
        spec = settings.specs[0]
        running, waiting = self.queue.load
        return {
            "protocol": wire.PROTOCOL,
            "boot_id": self.boot_id,
            "model": settings.model,
            "architecture": wire.architecture(spec.model),
            "dtype": can.dtype,
            "max_model_len": can.max_model_len,
            "max_pixels": spec.max_pixels,
            "tp": spec.tensor_parallel_size,
            "dp": len(settings.specs),
            "run_id": holder.run_id if holder is not None else None,
            "version": self.engine.version,
            "checksum": self.digest or self.fingerprint.digest,
            "adapter": self.adapter or None,
            "capabilities": asdict(can),
            "weights_folder": str(settings.weights_folder) if settings.weights_folder else None,
            "weights_probe": self.probe,
            "stop_token_ids": list(self.template.stop_token_ids),
            "limits": asdict(LIMITS),
            "running": running,
            "running_of": self.running_of,
            "waiting": waiting,
            "paused": self.queue.paused,
            "held": self.held,
            "counters": asdict(self.engine.counters),
            "receivers": self.engine.receivers,
        }

    @property
    def served(self) -> list[str]:
        """Names of the model for clients."""
        return [self.settings.model, *self.settings.names, *([self.adapter] if self.adapter else [])]

    @property
    def running_of(self) -> dict[str, int]:
        """Number of running requests by client, for messages."""
        counts = self.queue.running_by_owner
        return {"clients without a run" if owner is None else f"run {owner}": count for owner, count in counts.items()}

    async def state(self) -> dict[str, Any]:
        """State of the engines after a change, for clients."""
        return {"version": self.engine.version, "asleep": await asyncio.to_thread(self._asleep)}

    def _asleep(self) -> str:
        return "; ".join(dict.fromkeys(health.detail for health in self._healths() if health.alive and health.detail))

    def _healths(self) -> list[Health]:
        """Health of the engines that can still be used."""
        try:
            engines = self.engine.engines
        except EngineDead:
            return []
        return [
            health if isinstance(health, Health) else Health(False, str(health))
            for health in in_parallel([engine.health for engine in engines])
        ]

    def health(self) -> tuple[bool, dict[str, Any]]:
        """GET /health: whether all engines are healthy, and the body. `alive`: whether the server can sample."""
        healths, invalid, dead = self._healths(), self.engine.invalid, self.queue.dead
        all_alive = all(health.alive for health in healths)
        alive = any(health.alive for health in healths) and not invalid and dead is None
        complete = len(healths) == len(self.settings.specs)
        details = [str(dead or ""), invalid, *(health.detail for health in healths)]
        if not complete and all_alive:  # the pool has the reason why the others are gone
            details = [str(dead or ""), self.engine.health().detail]
        good = alive and complete and all_alive
        return good, self._health_body(good, alive, "; ".join(dict.fromkeys(filter(None, details))))

    def _health_body(self, good: bool, alive: bool, detail: str) -> dict[str, Any]:
        return {
            "status": "ok" if good else "failing",
            "alive": alive,
            "version": self.engine.version,
            "boot_id": self.boot_id,
            "counters": asdict(self.engine.counters),
            "receivers": self.engine.receivers,
            "void": bool(self.engine.invalid),
            "detail": detail,
        }

    async def recent_health(self) -> tuple[bool, dict[str, Any]]:
        """`health` within `HEALTH_LIMIT_S`, with one check at a time for all clients.

        A result is valid for `HEALTH_S`, unless a job has ended since.
        """
        check = self._health_check
        if check is None or (check.done() and time.monotonic() - self._checked_at > HEALTH_S):
            check = self._health_check = asyncio.create_task(self._check_health())
        await asyncio.wait([check], timeout=HEALTH_LIMIT_S)
        if check.done():
            return check.result()
        return False, self._health_body(False, False, f"engines: no answer within {HEALTH_LIMIT_S:g} s")

    async def _check_health(self) -> tuple[bool, dict[str, Any]]:
        try:
            return await asyncio.to_thread(self.health)
        finally:
            self._checked_at = time.monotonic()

    def _write_probe(self) -> str | None:
        """Write a file that shows a client whether it shares a disk with the server; returns its name."""
        folder = self.settings.weights_folder
        if folder is None:
            return None
        name = wire.probe_name(self.boot_id)
        (folder / name).write_text(self.boot_id, encoding="utf-8")
        return name

    # --- requests ---------------------------------------------------------------------------------------------

    def open(self, requests: Sequence[Request], owner: str | None = None, *, grows: bool = False) -> Answers:
        """Queue requests; their answers arrive on the caller's event loop. Raises as `CompletionStream.submit`.

        grows: whether tokens are streamed before the end of their completion.
        """
        answers = Answers(self.queue, owner, self.meter, grows=grows)
        answers.stream.submit(requests)
        self.meter.add_requests(requests)
        return answers

    async def admitted(self, gone: Callable[[], Any]) -> None:
        """Wait while requests are held back, or a parity check has changed the weights.

        Raises ClientDisconnect: the client is `gone`.
        """
        while self.held or self.engine.version == TRIAL_VERSION:
            await asyncio.sleep(HELD_S)
            if await gone():
                raise ClientDisconnect

    async def all_of(self, requests: Sequence[Request], gone: Callable[[], Any]) -> list[Completion]:
        """All completions, in the order of the requests; raises the error of an engine, and aborts the others.

        gone: returns whether the client has disconnected, which aborts the requests, too.
        """
        await self.admitted(gone)
        done: dict[str, Completion] = {}
        with self.open(requests) as answers:
            while len(done) < len(requests):
                arrivals = await answers.next(WATCH_S)
                if not arrivals and await gone():
                    raise ClientDisconnect
                for arrival in arrivals:
                    if isinstance(arrival, Failure):
                        raise arrival.error
                    done[arrival.request_id] = arrival
        for request in requests:
            self.sampled_versions.add(request.prompt_ids, done[request.request_id])
        return [done[request.request_id] for request in requests]

    # --- jobs -------------------------------------------------------------------------------------------------

    async def job(self, future: Future[T], cancel: Callable[[], bool] | None = None) -> T:
        """Wait for a job of the queue, with a timeout. cancel: keeps it from being started; that of the future if None.

        Raises Refused (409): requests of other clients did not end in time; the job was not started.
        """
        settings = self.settings
        try:
            waited = asyncio.wrap_future(future)
            done, _ = await asyncio.wait([waited], timeout=settings.drain_s)
            if not done and (cancel or future.cancel)():
                running = ", ".join(f"{count} of {owner}" for owner, count in sorted(self.running_of.items()))
                raise Refused(
                    409,
                    "busy",
                    f"engine: requests still run after {settings.drain_s:g} s ({running or 'none now'}) and "
                    f"{self.queue.load[1]} wait; abort them, or pause with keep",
                )
            if not done:
                done, _ = await asyncio.wait([waited], timeout=settings.job_s)
            if not done:
                raise EngineError(f"engine: it did not finish within {settings.job_s:g} s")
            return waited.result()
        finally:
            self._health_check = None

    async def do(self, work: Callable[[InferenceEngine], Any]) -> Any:
        """Call `work` while no request runs; see `job`."""
        return await self.job(self.queue.do(work))

    # --- ownership --------------------------------------------------------------------------------------------

    def authorize(self, run_id: str | None) -> None:
        """Check and renew the lease for a request that changes the state; see `Lease.renew`."""
        self.lease.renew(run_id, time.monotonic())

    async def reset(self, run_id: str, name: str, *, rebuild: bool) -> dict[str, Any]:
        """POST /reset: give this run the lease, and restore the state of the start."""
        before = self.lease.holder.run_id if self.lease.holder is not None else None
        is_new = self.lease.take(run_id, name, time.monotonic())
        if is_new:
            self.sampled_versions.clear()
        if is_new or rebuild:
            try:
                with self.lease.during_reset():
                    await self._end_run(before)
                    await self.do(self._restore)
                    self.authorize(run_id)
            except BaseException:
                self.lease.release(run_id)  # the next run starts from the beginning
                raise
        return {"boot_id": self.boot_id, "new_run": is_new, **await self.state()}

    async def release(self, run_id: str) -> bool:
        """POST /release: release the lease of the run; returns whether the run had it."""
        released = self.lease.release(run_id)
        if released:
            await self._end_run(run_id)
        return released

    async def _end_run(self, run_id: str | None) -> None:
        """Abort the requests and update of a run, and resume the engines for other clients."""
        self.held = False
        if run_id is not None:
            self.queue.abort(lambda stream: stream.owner == run_id)
        await self.job(self.queue.updates.abort())
        await self.job(self.queue.resume())

    async def _restore(self, engine: InferenceEngine) -> None:
        """A job: restore the base weights, without adapter and caches, and check the fingerprint."""
        engine.leave_broadcast()
        engine.wake()
        if self._weights_changed or engine.version != 0 or not engine.health().alive or self._asleep():
            engine.rebuild()
            self._weights_changed = False
        elif engine.capabilities.lora:
            engine.drop_adapter()
        engine.reset_caches()
        self.digest = self.adapter = ""
        problem = self.fingerprint.difference(await self._take_fingerprint(engine), engine.capabilities.dtype)
        if problem:
            raise SyncFailed(f"engine: base weights: {problem}; restart the server")

    async def watch(self) -> EngineDead:
        """End leases of silent clients, and replace dead engines; runs until an error.

        Returns the error if no engine is left, or the reason of a requested restart of the process.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if line := self.meter.line(time.monotonic(), self.queue.load):
                print(f"swift: {line}", file=sys.stderr, flush=True)
            if self.restart is not None:
                return self.restart
            try:
                if self.queue.dead is not None:
                    return self.queue.dead
                if len(self.settings.specs) == 1:  # a pool of several engines checks each of them
                    self.queue.check_progress(self.settings.stall_s, self.settings.job_s)
                _ = self.engine.engines
            except EngineDead as error:
                return error
            try:
                if (self.queue.paused or self.held) and (holder := self.lease.expired(time.monotonic())) is not None:
                    logger.warning(
                        "run %s (%s): its lease has expired; the engines that it had paused or held back resume",
                        holder.run_id,
                        holder.name,
                    )
                    await self.release(holder.run_id)
                elif not self.queue.load[0]:
                    healths = await asyncio.to_thread(self._healths)
                    if any("its actor" in health.detail for health in healths):
                        await self.do(lambda engine: engine.reset_caches())  # a call to a lost actor replaces it
            except (Refused, SwiftError) as error:
                logger.warning("%s", error)

    # --- weights ----------------------------------------------------------------------------------------------

    def weights_arrived(self, ack: Ack) -> None:
        """Record new base weights, without adapter."""
        self.digest, self.adapter, self._weights_changed = ack.digest, "", True

    async def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """Load an adapter of the run that owns the server."""

        def load(engine: InferenceEngine) -> Ack:
            ack = engine.load_adapter(adapter, version)
            self.adapter, self.digest = f"policy-v{version}", ack.digest
            return ack

        return await self.do(load)

    async def drop_adapter(self) -> None:
        def drop(engine: InferenceEngine) -> None:
            engine.drop_adapter()
            self.adapter = self.digest = ""

        await self.do(drop)

    def close(self) -> None:
        self.queue.close()
        if self.probe is not None and self.settings.weights_folder is not None:
            (self.settings.weights_folder / self.probe).unlink(missing_ok=True)


class Answers:
    """A `CompletionStream` on the event loop; leaving the context aborts unfinished requests."""

    def __init__(self, queue: RequestQueue, owner: str | None, meter: Meter, *, grows: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._meter, self._began = meter, time.monotonic()
        self.stream: CompletionStream = queue.open(owner, self._notify, grows=grows)

    def _notify(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def next(self, timeout_s: float) -> list[Arrival]:
        """The arrivals since the last call; [] after a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        self._arrived.clear()
        arrivals = self.stream.take()
        self._meter.add_arrivals(arrivals, time.monotonic() - self._began)
        return arrivals

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


class AnswersResponse(StreamingResponse):
    """A streamed reply that closes its answers in any case, also if the client disconnects before the first byte.

    Args:
        answers: the streamed answers.
        content, media_type: those of the reply.
    """

    def __init__(self, answers: Answers, content: AsyncIterator[bytes], media_type: str) -> None:
        super().__init__(content, media_type=media_type)
        self._answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        with self._answers:
            await super().__call__(scope, receive, send)
