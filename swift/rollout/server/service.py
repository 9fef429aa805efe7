"""The state that all routes share: the request queue of the engines, the lease, and what is loaded."""

from __future__ import annotations

import asyncio
import logging
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
from swift.rollout.engines.pool import in_parallel
from swift.rollout.engines.request_queue import RequestQueue
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.server.access import LIMITS, Lease, Refused
from swift.rollout.server.fingerprint import Fingerprint, take_fingerprint
from swift.rollout.server.ledger import VersionLedger
from swift.rollout.server.metrics import Meter
from swift.rollout.weights.base import AdapterWeights
from swift.rollout.weights.broadcast import BroadcastReceiver
from swift.rollout.weights.sync import REHEARSAL
from swift.types import Completion, Request

if TYPE_CHECKING:
    from swift.models.template import Template

logger = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_S = 1.0
HELD_S = 0.2
"""How often a request that is held back looks whether it may go on."""
HEALTH_S = 1.0
"""How old an answer about the engines' health may be."""
HEALTH_LIMIT_S = 4.0
"""Bound on such an answer; clients wait 5 s for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the server was started with.

    model: name under which clients know it. names: further ones. specs: one per engine. defaults: sampling settings for
    what a request leaves out. system: of chats without one, or None. weights_folder: below which paths may be named.
    sync_s: bound on one job. drain_s: how long a job waits for what runs. stall_s: without any progress for so long the
    engines are given up.
    """

    model: str
    names: tuple[str, ...] = ()
    specs: tuple[EngineSpec, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    api_key: str | None = None
    weights_folder: Path | None = None
    sync_s: float = 600.0
    drain_s: float = 600.0
    stall_s: float = 300.0


class RestartWanted(EngineDead):
    """The run that owns the server has asked for a new process."""


class Service:
    """See the module's docstring.

    Args:
        engine: the engines as one, started.
        template: tokenizer and chat template of the model.
        settings: see `Settings`.

    Attributes:
        adapter: name of the one that is loaded, or "".
        digest: of the present weights, "" while they are those of the start.
        ledger: versions of what was sampled for clients without a run.
        restart: why the process is to start anew, or None.
        meter: counts requests and tokens.
        held: requests of such clients wait, because the run that owns the server does not want older samples.
        large: held while a thread reads a large request; so others find a thread, and the interpreter.
    """

    def __init__(self, engine: InferenceEngine, template: Template, settings: Settings) -> None:
        self.engine = engine
        self.template = template
        self.settings = settings
        self.boot_id = secrets.token_hex(8)
        self.started_at = time.time()
        self.queue = RequestQueue(engine, limit=LIMITS.queue)
        self.lease = Lease()
        self.ledger = VersionLedger()
        self.meter = Meter()
        self.held = False
        self.large = asyncio.Lock()
        self.broadcast: BroadcastReceiver | None = None
        self.adapter = self.digest = ""
        self.restart: RestartWanted | None = None
        self._weights_came = False  # since the engines were built, under whichever version
        self._look: asyncio.Task[tuple[bool, dict[str, Any]]] | None = None
        self._looked_at = 0.0
        device, parts = engine.capabilities.devices[0], settings.specs[0].tensor_parallel_size * len(settings.specs)
        if device.startswith("cuda:") and parts == 1:
            self.queue.do(lambda engine: torch.cuda.set_device(device))  # torch has one for each thread
        self.probe = self._place_probe()
        prompt = template.tokenizer("A fingerprint of these weights:", add_special_tokens=True)["input_ids"]
        self._take_fingerprint = lambda engine: take_fingerprint(engine, list(prompt))
        self.fingerprint: Fingerprint = self.queue.do(self._take_fingerprint).result(settings.sync_s)

    # --- its state --------------------------------------------------------------------------------------------

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
        }

    @property
    def served(self) -> list[str]:
        """Names under which clients may ask for the model."""
        return [self.settings.model, *self.settings.names, *([self.adapter] if self.adapter else [])]

    @property
    def running_of(self) -> dict[str, int]:
        found = self.queue.running_by_owner
        return {"clients without a run" if own is None else f"run {own}": count for own, count in found.items()}

    async def state(self) -> dict[str, Any]:
        """What a client has to know after anything that changed the engines."""
        return {"version": self.engine.version, "asleep": await asyncio.to_thread(self._asleep)}

    def _asleep(self) -> str:
        return "; ".join(dict.fromkeys(one.detail for one in self._healths() if one.alive and one.detail))

    def _healths(self) -> list[Health]:
        """Of the engines that are not dead for good."""
        try:
            engines = self.engine.engines
        except EngineDead:
            return []
        return [
            one if isinstance(one, Health) else Health(False, str(one))
            for one in in_parallel([engine.health for engine in engines])
        ]

    def health(self) -> tuple[bool, dict[str, Any]]:
        """GET /health: whether all is well, and what to say. `alive` says whether it samples at all."""
        engines, void, dead = self._healths(), self.engine.void, self.queue.dead
        alive = any(one.alive for one in engines) and not void and dead is None
        complete = len(engines) == len(self.settings.specs)
        details = [str(dead or ""), void, *(one.detail for one in engines)]
        if not complete and all(one.alive for one in engines):  # the pool knows why the others are gone
            details = [str(dead or ""), self.engine.health().detail]
        good = alive and complete and all(one.alive for one in engines)
        return good, self._health_body(good, alive, "; ".join(dict.fromkeys(filter(None, details))))

    def _health_body(self, good: bool, alive: bool, detail: str) -> dict[str, Any]:
        return {
            "status": "ok" if good else "failing",
            "alive": alive,
            "version": self.engine.version,
            "boot_id": self.boot_id,
            "counters": asdict(self.engine.counters),
            "void": bool(self.engine.void),
            "detail": detail,
        }

    async def recent_health(self) -> tuple[bool, dict[str, Any]]:
        """`health` within `HEALTH_LIMIT_S`, by one look at a time, whoever asks.

        A look is good for `HEALTH_S`, unless a job has ended since.
        """
        look = self._look
        if look is None or (look.done() and time.monotonic() - self._looked_at > HEALTH_S):
            look = self._look = asyncio.create_task(self._look_at_health())
        await asyncio.wait([look], timeout=HEALTH_LIMIT_S)
        if look.done():
            return look.result()
        return False, self._health_body(False, False, f"engines: no answer within {HEALTH_LIMIT_S:g} s")

    async def _look_at_health(self) -> tuple[bool, dict[str, Any]]:
        try:
            return await asyncio.to_thread(self.health)
        finally:
            self._looked_at = time.monotonic()

    def _place_probe(self) -> str | None:
        """A file by which a client sees whether its disk is this one."""
        folder = self.settings.weights_folder
        if folder is None:
            return None
        name = wire.probe_name(self.boot_id)
        (folder / name).write_text(self.boot_id, encoding="utf-8")
        return name

    # --- requests ---------------------------------------------------------------------------------------------

    def open(self, requests: Sequence[Request], owner: str | None = None, *, grows: bool = False) -> Answers:
        """Queue requests; their answers come on the caller's event loop. Raises as `CompletionStream.submit`.

        grows: whether tokens are wanted before their completion has ended.
        """
        answers = Answers(self.queue, owner, self.meter, grows=grows)
        answers.stream.submit(requests)
        self.meter.asked(requests)
        return answers

    async def admitted(self, gone: Callable[[], Any]) -> None:
        """Wait while requests are held back, or the weights are none of the run's: a parity check changes them.

        Raises ClientDisconnect: the client is `gone`.
        """
        while self.held or self.engine.version == REHEARSAL:
            await asyncio.sleep(HELD_S)
            if await gone():
                raise ClientDisconnect

    async def all_of(self, requests: Sequence[Request], gone: Callable[[], Any]) -> list[Completion]:
        """Every completion, in the order of the requests; raises what an engine raised, and aborts the rest.

        gone: asks whether the client has hung up; then the rest is aborted, too.
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
            self.ledger.add(request.prompt_ids, done[request.request_id])
        return [done[request.request_id] for request in requests]

    # --- jobs -------------------------------------------------------------------------------------------------

    async def job(self, future: Future[T]) -> T:
        """Wait for a job of the queue, in a bounded time.

        Raises Refused: others' requests did not end in time; nothing was done (409).
        """
        settings = self.settings
        try:
            waited = asyncio.wrap_future(future)
            done, _ = await asyncio.wait([waited], timeout=settings.drain_s)
            if not done and future.cancel():
                running = ", ".join(f"{count} of {owner}" for owner, count in sorted(self.running_of.items()))
                raise Refused(
                    409,
                    "busy",
                    f"engine: requests still run after {settings.drain_s:g} s ({running or 'none now'}) and "
                    f"{self.queue.load[1]} wait; abort them, or pause with keep",
                )
            if not done:
                done, _ = await asyncio.wait([waited], timeout=settings.sync_s)
            if not done:
                raise EngineError(f"engine: it did not finish within {settings.sync_s:g} s")
            return waited.result()
        finally:
            self._look = None

    async def do(self, work: Callable[[InferenceEngine], T]) -> T:
        """Carry out `work` when nothing runs; see `job`."""
        return await self.job(self.queue.do(work))

    # --- ownership --------------------------------------------------------------------------------------------

    def authorize(self, run_id: str | None) -> None:
        """A request that may change things; see `Lease.renew`."""
        self.lease.renew(run_id, time.monotonic())

    async def reset(self, run_id: str, name: str, *, rebuild: bool) -> dict[str, Any]:
        """POST /reset: this run owns the server, and finds it as it was started."""
        before = self.lease.holder.run_id if self.lease.holder is not None else None
        is_new = self.lease.take(run_id, name, time.monotonic())
        if is_new:
            self.ledger.clear()
        if is_new or rebuild:
            try:
                with self.lease.during_reset():
                    await self._end_run(before)
                    await self.do(self._restore)
                    self.authorize(run_id)
            except BaseException:
                self.lease.release(run_id)  # whoever tries next begins anew
                raise
        return {"boot_id": self.boot_id, "new_run": is_new, **await self.state()}

    async def release(self, run_id: str) -> bool:
        """POST /release: the run gives the server back; returns whether it had it."""
        released = self.lease.release(run_id)
        if released:
            await self._end_run(run_id)
        return released

    async def _end_run(self, run_id: str | None) -> None:
        """Nothing of it runs, and the engines and other clients go on."""
        self.held = False
        if run_id is not None:
            self.queue.abort(lambda stream: stream.owner == run_id)
        if self.queue.updates.idle_s is not None:
            await self.job(self.queue.updates.abort())
        await self.job(self.queue.resume())

    def _restore(self, engine: InferenceEngine) -> None:
        """A job: base weights, no adapter, nothing computed; and proof of it."""
        self.disconnect()
        engine.wake()
        if self._weights_came or engine.version != 0 or not engine.health().alive or self._asleep():
            engine.rebuild()
            self._weights_came = False
        elif engine.capabilities.lora:
            engine.drop_adapter()
        engine.reset_caches()
        self.digest = self.adapter = ""
        problem = self.fingerprint.difference(self._take_fingerprint(engine), engine.capabilities.dtype)
        if problem:
            raise SyncFailed(f"engine: base weights: {problem}; restart the server")

    async def watch(self) -> EngineDead:
        """Give up what silent clients left, and replace engines that died while nobody asked.

        Returns why none is left that could be replaced, or why the process is to start anew; without end otherwise.
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
                if len(self.settings.specs) == 1:  # several watch themselves, one by one
                    self.queue.check_progress(self.settings.stall_s, self.settings.sync_s)
                _ = self.engine.engines
            except EngineDead as error:
                return error
            try:
                if (self.queue.updates.idle_s or 0.0) > LIMITS.update_idle_s:
                    logger.warning("a weight update fell silent and is aborted")
                    await self.job(self.queue.updates.abort())
                elif (self.queue.paused or self.held) and (silent := self.lease.silent(time.monotonic())) is not None:
                    logger.warning(
                        "run %s (%s) is silent and had paused the engines or held requests back; they go on",
                        silent.run_id,
                        silent.name,
                    )
                    await self.release(silent.run_id)
                elif not self.queue.load[0]:
                    healths = await asyncio.to_thread(self._healths)
                    if any("its actor" in one.detail for one in healths):
                        await self.do(lambda engine: engine.reset_caches())  # a call to a lost actor replaces it
            except (Refused, SwiftError) as error:
                logger.warning("%s", error)

    # --- weights ----------------------------------------------------------------------------------------------

    def weights_arrived(self, ack: Ack) -> None:
        """All weights were replaced; an adapter went with the old ones."""
        self.digest, self.adapter, self._weights_came = ack.digest, "", True

    async def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """Sample with this adapter of the run that owns the server from now on."""

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

    def disconnect(self) -> None:
        receiver, self.broadcast = self.broadcast, None
        if receiver is not None:
            receiver.close()

    def close(self) -> None:
        self.queue.close()
        self.disconnect()
        if self.probe is not None and self.settings.weights_folder is not None:
            (self.settings.weights_folder / self.probe).unlink(missing_ok=True)


class Answers:
    """A `CompletionStream` on the event loop; leaving the context aborts what is left."""

    def __init__(self, queue: RequestQueue, owner: str | None, meter: Meter, *, grows: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._meter, self._began = meter, time.monotonic()
        self.stream: CompletionStream = queue.open(owner, self._notify, grows=grows)

    def _notify(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._came.set)

    async def next(self, timeout_s: float) -> list[Arrival]:
        """Everything that came; [] when nothing did in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._came.wait()
        except TimeoutError:
            return []
        self._came.clear()
        arrivals = self.stream.take()
        self._meter.came(arrivals, time.monotonic() - self._began)
        return arrivals

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


class AnswersResponse(StreamingResponse):
    """A streamed reply that leaves nothing behind, also if the client is gone before its first byte.

    Args:
        answers: what it streams; closed at the end.
        content, media_type: of the reply.
    """

    def __init__(self, answers: Answers, content: AsyncIterator[bytes], media_type: str) -> None:
        super().__init__(content, media_type=media_type)
        self._answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        with self._answers:
            await super().__call__(scope, receive, send)
