"""Several engines of other processes, used as one engine.

    generate        choose an engine (`EngineChoice`), await its completion; if that engine is lost, another engine
                    samples with the same id and seed, while the lost engine is replaced
    everything else runs in parallel on all engines; the capabilities are those common to all engines

An engine that is dead after its own restarts is removed from the pool; after the last engine the pool is dead. Engines
never sample with different versions: an update that did not reach all engines makes the weights invalid until another
update or `rebuild` has reached all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from swift.errors import ConfigError, EngineAsleep, EngineDead, EngineError, SwiftError, SyncFailed, Unsupported
from swift.rollout.engines.base import (
    ALL_TAGS,
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    Health,
    InferenceEngine,
    SleepLevel,
    SleepReport,
    Tag,
)
from swift.rollout.engines.choice import EngineChoice
from swift.rollout.engines.client import EngineClient
from swift.rollout.engines.events import Late, Lost
from swift.rollout.engines.process import on_thread
from swift.rollout.engines.wire import ReturnedCompletion, Spans, digest_of
from swift.rollout.weights.base import WeightStream
from swift.rollout.weights.broadcast import Announcement, BroadcastSender
from swift.rollout.weights.feed import Feed
from swift.rollout.weights.sending import new_sender, send_update
from swift.types import Completion, Request

T = TypeVar("T")
POLL_S = 0.05
"""Interval, in seconds, at which the pool checks for a usable engine while requests wait."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that is outstanding."""

    aborted: bool = False


class EnginePool(InferenceEngine):
    """See the module's docstring; waits for its engines at the first use."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.version = 0
        self._clients = list(clients)
        for client in clients:
            client.alone = len(clients) == 1
        self._gone: list[EngineClient] = []  # dead engines
        self._choose = EngineChoice()
        self._pending: dict[str, _Pending] = {}
        self._held = self._paused = self._closed = False
        self._pruning = threading.Lock()
        self._ending: list[Future[None]] = []  # ends of dead engines
        self._waiting: list[asyncio.Future[None]] = []  # for `release`, or an engine that is usable
        self._polling: asyncio.Task[None] | None = None
        self._capabilities: Capabilities | None = None
        self._sender: BroadcastSender | None = None
        self._in_group: dict[EngineClient, object] = {}  # members and their `receiving_processes`

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        if self._capabilities is None:
            self._capabilities = common_capabilities([client.capabilities for client in self._clients])
        return self._capabilities

    @property
    def counters(self) -> EngineCounters:  # type: ignore[override]
        return sum((client.counters for client in [*self._clients, *self._gone]), EngineCounters())

    @property
    def invalid(self) -> str:  # type: ignore[override]
        return next((client.invalid for client in self._clients if client.invalid), "")

    @property
    def engines(self) -> list[EngineClient]:
        with self._pruning:
            dead = [client for client in self._clients if client.dead is not None]
            self._gone += dead
            self._clients = alive = [client for client in self._clients if client.dead is None]
        self._ending += [on_thread(client.close, f"end of {client.name}") for client in dead]
        for client in alive if dead else ():
            client.alone = len(alive) == 1
        if not alive and (last := self._gone[-1].dead) is not None:
            raise last
        return alive

    @property
    def receivers(self) -> int:
        return sum(client.receivers() for client in self._clients)

    # --- sampling ---------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self._check_open()
        self.check_length(request)
        name = request.request_id
        if name in self._pending:
            raise EngineError(f"request: {name}: is outstanding already; give each an id of its own")
        asked = self._pending[name] = _Pending()
        try:
            while (client := await self._engine_for(request, asked)) is not None:
                with contextlib.suppress(Lost):
                    completion = await client.generate(request)
                    if completion.finish_reason != "abort" or asked.aborted:
                        return completion
            return Completion(name, [], [], "abort")
        finally:
            del self._pending[name]

    async def _engine_for(self, request: Request, asked: _Pending) -> EngineClient | None:
        """The engine that samples a request; waits until an engine is usable. None: the request was aborted."""
        while not asked.aborted:
            if self._held:
                await self._wait_for_change()
                continue
            self._check_open()
            self._check_valid()
            for client in self._clients:
                if client.asleep:
                    raise EngineAsleep(f"{client.name}: {client.asleep}; wake it, and send what it dropped")
            if usable := [client for client in self._clients if client.usable]:
                return self._choose(request, usable)
            if all(client.outdated for client in self._clients):
                raise EngineDead(
                    f"engine: each was lost since version {self.version} was sent, and none of them has it; "
                    "--weight_transport object_store keeps a copy for restarts"
                )
            await self._wait_for_change()
        return None

    async def _wait_for_change(self) -> None:
        """Wait until a request may continue; one task checks for all requests."""
        loop = asyncio.get_running_loop()
        self._waiting.append(loop.create_future())
        if not self._held and (self._polling is None or self._polling.done()):
            self._polling = loop.create_task(self._poll())
        await self._waiting[-1]

    async def _poll(self) -> None:
        while not (self._held or self._closed or self.invalid):
            clients = self._clients
            any_changed = any(client.usable or client.dead is not None for client in clients)
            if any_changed or all(client.outdated for client in clients):
                break
            await asyncio.sleep(POLL_S)
        if not self._held:
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        wanted = None if request_ids is None else set(request_ids)
        chosen = {name: asked for name, asked in list(self._pending.items()) if wanted is None or name in wanted}
        for asked in chosen.values():
            asked.aborted = True
        for client in list(self._clients):
            client.abort_those(list(chosen))
        for future in list(self._waiting)[:1]:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(self._wake)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        self._wake()

    def pause(self) -> None:
        """Pause all engines. A timeout aborts the requests of the engine; after a second timeout the engine is lost."""
        self._check_open()
        if self._paused:
            return
        try:
            self._call_all(self._pause_there)
        except BaseException:
            with contextlib.suppress(SwiftError):  # paused engines continue
                self.resume()
            raise
        self._paused = True

    def _pause_there(self, client: EngineClient) -> None:
        def pause() -> None:
            try:
                client.pause()
            except Late:
                self.abort(client.outstanding)
                client.pause()

        if client.outstanding:
            client.with_recovery(pause)

    def resume(self) -> None:
        self._check_open()
        self._call_all(lambda client: client.resume())
        self._paused = False

    # --- requests of environments to the servers --------------------------------------------------------------

    def versions_of(self, samples: Sequence[ReturnedCompletion]) -> list[Spans | None]:
        """The versions of the weights that sampled completions which environments got from these servers.

        Returns for each completion its spans as in `Completion.versions`: of the same tokens and log-probs, else of the
        latest completion with the same tokens; None if no server has a record of the tokens.
        """
        digests = [digest for ids in samples for digest in (digest_of(*ids), digest_of(*ids[:2]))]
        replies = self._call_all(lambda client: client.safe_call("versions", client.timeouts.reply_s, digests=digests))
        found = [next((spans for spans in each if spans is not None), None) for each in zip(*replies, strict=True)]
        return [exact or known for exact, known in zip(found[::2], found[1::2], strict=True)]

    def hold_back(self, held: bool) -> None:
        """Hold back generation requests of clients without a run at the servers, or release them.

        Applies until the next call, or until this run's lease ends. A restarted server holds nothing back.
        """
        self._call_all(lambda client: client.safe_call("hold", client.timeouts.reply_s, held=held))

    # --- weights ----------------------------------------------------------------------------------------------

    def update(self, stream: WeightStream) -> Ack:
        """Read the stream, and send it to each engine on a thread of its own."""
        self._check_at_rest("new weights")
        feeds = {client: Feed() for client in self.engines}
        updates: dict[EngineClient, Future[Ack]] = {}
        all_sent = False
        try:
            for client, feed in feeds.items():
                fed = WeightStream(stream.manifest, feed, stream.version)
                updates[client] = on_thread(partial(send_update, client, fed), f"weights of {client.name}")
                updates[client].add_done_callback(feed.leave)
            self._await_begun(feeds)
            self._prepare_broadcast(list(feeds), stream)
            for bucket in stream:
                taken = [feed.give(bucket) for feed in feeds.values()]
                del bucket  # before the next bucket is gathered
                raise_first([outcome_of(future.result) for future in taken])
            all_sent = True
        finally:
            for feed in feeds.values():
                feed.end() if all_sent else feed.fail(SyncFailed("the update was given up"))
            outcomes = [outcome_of(update.result) for client, update in updates.items() if client in feeds]
        try:
            acks = raise_first(outcomes)
            for client, ack in zip(feeds, acks, strict=True):
                stream.check(ack, client.name)
                if ack != acks[0]:  # in a server, which does not have the tensors of a broadcast
                    raise SyncFailed(f"weights: {client.name} has digest {ack.digest}, others have {acks[0].digest}")
        except SwiftError:  # some engines may have the new weights
            self.invalidate(f"the update to version {stream.version} has not reached every engine")
            raise
        self.version = stream.version
        return acks[0]

    def _await_begun(self, feeds: dict[EngineClient, Feed]) -> None:
        """Wait until every engine takes weights; a dead engine is left out."""
        outcomes = {client: outcome_of(feed.ready.result) for client, feed in feeds.items()}
        alive = self.engines
        for client, outcome in outcomes.items():
            if client not in alive:
                feeds.pop(client).fail(SyncFailed("the engine is dead"))
            elif isinstance(outcome, Exception):
                raise outcome

    def _prepare_broadcast(self, clients: list[EngineClient], stream: WeightStream) -> None:
        """Set the sender of the engines that receive by a broadcast; a new sender if these engines have changed.

        In a server the trainer is the sender, and this sets the ranks of each engine.
        """
        first = stream.first()
        if isinstance(first, Announcement):
            offsets = itertools.accumulate((client.receivers() for client in clients), initial=0)
            for client, offset in zip(clients, offsets, strict=False):
                client.rank_offset = offset
            return
        members = [client for client in clients if first.infos and client.way_of(first) == "broadcast"]
        if not members:
            return
        try:
            processes = {client: client.receiving_processes() for client in members}
            if self._sender is None or not self._sender.is_open or processes != self._in_group:
                self._leave_broadcast()
                self._sender, self._in_group = new_sender(members, first.tensors[0][1].device), processes
        except (Lost, OSError) as error:
            raise SyncFailed(f"weights: version {stream.version}: broadcast: {error}") from error
        for client in members:
            client.broadcaster = self._sender

    def _leave_broadcast(self) -> None:
        sender, self._sender, self._in_group = self._sender, None, {}
        if sender is not None:
            sender.close()

    def leave_broadcast(self) -> None:
        """Release the groups that the engines are in; in a server, the trainer makes them."""
        self._call_all(lambda client: client.safe_call("leave_broadcast", client.timeouts.sync_s))

    def invalidate(self, why: str) -> None:
        """Mark the weights of all engines as invalid, for this reason."""
        for client in self._clients:
            client.invalid = client.invalid or why

    def rebuild(self) -> None:
        """Outstanding requests stay outstanding, and are sampled from the start."""
        self._check_open()
        self._leave_broadcast()  # rebuilt engines are in no group
        self._call_all(lambda client: client.rebuild())
        self.version = 0

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        self._check_at_rest("an adapter")
        self._check_valid()
        if not self.capabilities.lora:
            raise self._unsupported("LoRA adapters")
        try:
            ack = self._call_all(lambda client: client.load_adapter(adapter, version))[0]
        except SwiftError as error:
            refused = isinstance(error, ConfigError | EngineAsleep | Unsupported)  # before any change
            if not refused or any(client.version != self.version for client in self._clients):
                self.invalidate(f"the adapter of version {version} has not reached every engine")
            raise
        self.version = version
        return ack

    def drop_adapter(self) -> None:
        self._check_at_rest("a change of adapter")
        self._call_all(lambda client: client.drop_adapter())
        self.version = self._clients[0].version

    def reset_caches(self) -> None:
        self._check_open()
        self._call_all(lambda client: client.reset_caches())

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        self._check_open()
        if level == 0:
            return SleepReport()
        if level not in self.capabilities.sleep_levels:
            raise self._unsupported(f"sleep({level})")
        if count := len(self._pending):
            raise EngineError(f"engine: {self.capabilities.name}: sleep: {count} requests are outstanding; abort them")
        reports = self._call_all(lambda client: client.sleep(level))
        notes = dict.fromkeys(report.note for report in reports if report.note)
        return SleepReport(sum(report.freed_bytes for report in reports), "; ".join(notes))

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        self._check_open()
        return all(self._call_all(lambda client: client.wake(tags)))

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Alive if an engine is alive; the detail has the problems of the others."""
        if self._closed:
            return Health(False, "closed")
        reports = [client.health() for client in [*self._clients, *self._gone]]
        alive = not self.invalid and any(report.alive for report in reports)
        details = dict.fromkeys([self.invalid, *(report.detail for report in reports)])
        return Health(alive, "; ".join(filter(None, details)))

    def stacks(self) -> str:
        clients = self._clients
        replies = in_parallel([client.stacks for client in clients])
        return "; ".join(f"{client.name}: {reply}" for client, reply in zip(clients, replies, strict=True))

    def close(self) -> None:
        """End all engines in parallel; outstanding requests raise EngineDead."""
        self._closed = True
        self._leave_broadcast()
        in_parallel([client.close for client in self._clients])
        futures.wait(self._ending, max((client.timeouts.close_s for client in self._gone), default=0.0))
        for client in [*self._clients, *self._gone]:
            client.free_shared()

    # --- inside -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("engine: it is closed; make a new one")
        _ = self.engines

    def _check_valid(self) -> None:
        if invalid := self.invalid:
            raise SyncFailed(f"engine: its weights are invalid: {invalid}; sync again, or rebuild it")

    def _check_at_rest(self, what: str) -> None:
        self._check_open()
        count = len(self._pending)
        if count and not self._paused:
            raise EngineError(
                f"engine: {self.capabilities.name}: {what} while {count} requests are outstanding; wait for them, or "
                "pause"
            )

    def _call_all(self, work: Callable[[EngineClient], T]) -> list[T]:
        """The results of `work` on every engine, in parallel; a dead engine is left out.

        Raises the first failure after all calls have ended.
        """
        clients = self.engines
        outcomes = in_parallel([partial(work, client) for client in clients])
        alive = self.engines
        counted = [
            outcome
            for client, outcome in zip(clients, outcomes, strict=True)
            if client in alive or not isinstance(outcome, Exception)
        ]
        return raise_first(counted)


def outcome_of(work: Callable[[], T]) -> T | Exception:
    """The result of `work`, or the exception that it raised."""
    try:
        return work()
    except Exception as error:  # the caller raises it after the others have ended
        return error


def in_parallel(work: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """The result or exception of each, in order."""
    if len(work) < 2:
        return [outcome_of(function) for function in work]
    with ThreadPoolExecutor(len(work), thread_name_prefix="engine") as threads:
        return list(threads.map(outcome_of, work))


def raise_first(outcomes: Sequence[T | Exception]) -> list[T]:
    """The results; raises the first exception among them."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes  # type: ignore[return-value]


SWITCHES = ("lora", "in_flight_updates", "guided", "routes")
"""Capabilities that all engines have, or none."""


def common_capabilities(each: Sequence[Capabilities]) -> Capabilities:
    """The capabilities that all engines have."""
    first = each[0]
    all_have = {name: all(getattr(engine, name) for engine in each) for name in SWITCHES}
    shared = {
        name: tuple(entry for entry in getattr(first, name) if all(entry in getattr(engine, name) for engine in each))
        for name in ("sleep_levels", "sampling_fields")
    }
    facts: dict[str, Any] = {**all_have, **shared}
    return replace(
        first,
        logprob_support=max((engine.logprob_support for engine in each), key=["full", "truncated", "raw"].index),
        shares_weights=False,
        max_model_len=min(engine.max_model_len for engine in each),
        devices=tuple(device for engine in each for device in engine.devices),
        **facts,
    )
