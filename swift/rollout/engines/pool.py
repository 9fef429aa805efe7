"""The engines that live elsewhere, as one: requests are spread over them, everything else happens to all of them.

    submit* -> stream   each group of requests goes to one engine; completions come as they finish (`Dispatch`)
    an engine is lost   its requests go to the others at once, with their ids and seeds; it is replaced meanwhile
    everything else     in parallel on all engines; what they can do is what each of them can do

An engine that is dead beyond its own restarts is left out from then on; the last one takes the pool with it. Engines
never sample with different versions: an update that did not reach all of them makes the weights void until another
update or `rebuild` has.

`submit`, `abort`, `pause`, `health` and `close` may be called while another thread is in `stream`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
    TensorInfo,
    WeightUpdate,
)
from swift.rollout.engines.client import EngineClient
from swift.rollout.engines.dispatch import LOOK_S, Dispatch
from swift.rollout.engines.events import Late
from swift.rollout.engines.wire import Said, Spans, digest_of
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.sending import join_broadcast
from swift.types import Completion, Request

T = TypeVar("T")


class EnginePool(InferenceEngine):
    """See the module's docstring; waits for its engines when it is first needed."""

    in_process = False

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.version = 0
        self._dispatch = Dispatch(clients)
        self._capabilities: Capabilities | None = None

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        if self._capabilities is None:
            self._capabilities = common_capabilities([client.capabilities for client in self._dispatch.clients])
        return self._capabilities

    @property
    def counters(self) -> EngineCounters:  # type: ignore[override]
        return sum((client.counters for client in [*self._dispatch.clients, *self._dispatch.buried]), EngineCounters())

    @property
    def late(self) -> int:  # type: ignore[override]
        return self._dispatch.table.late

    @property
    def void(self) -> str:  # type: ignore[override]
        return next((client.void for client in self._dispatch.clients if client.void), "")

    @property
    def engines(self) -> list[EngineClient]:
        return self._dispatch.alive()

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """It travels when `stream` is called."""
        self._check_open()
        self.check_length(request)
        self._check_valid()
        for client in self._dispatch.clients:
            if client.asleep:
                raise EngineAsleep(f"{client.name}: {client.asleep}; wake it, and send what it dropped")
        with self._dispatch.changed:
            self._dispatch.table.add(request)
            self._dispatch.changed.notify_all()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with contextlib.suppress(EngineDead):  # each request will be told
            self._check_open()  # which may close engines, and so take a while
        with self._dispatch.changed:  # no other thread sends the first of them meanwhile
            yield

    def stream(self) -> Iterator[Completion]:
        """See `InferenceEngine.stream`.

        Raises:
            EngineDead: all engines are gone.
            RequestRefused: an engine does not take one request; another `stream` goes on with the rest.
            EngineError: no progress for `stall_s`; impossible log-probs; what an engine raised.
            SyncFailed: requests wait, but the weights are void.
        """
        while (ended := self.advance()) is not None:
            yield from ended

    def advance(self) -> list[Completion] | None:
        dispatch = self._dispatch
        self._check_open()
        if not dispatch.table.ready:
            if dispatch.paused_at is None:
                if not dispatch.table:
                    return None
                self._check_valid()
                dispatch.post_waiting()
                dispatch.await_event(LOOK_S)
                dispatch.check_clocks()
            elif not dispatch.events:
                return None
            dispatch.read_events()
        ended = list(dispatch.table.ready)
        dispatch.table.ready.clear()
        return ended

    def recover(self) -> Collection[str]:
        """What failed is let go of already; the rest goes on."""
        with self._dispatch.changed:
            return self._dispatch.table.ids

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        self._dispatch.abort(request_ids)

    def pause(self) -> None:
        """A pause that is not confirmed in time aborts what runs; if that has no effect either, the engine is lost."""
        self._check_open()
        if self._dispatch.paused_at is not None:
            return
        try:
            self._on_all(self._pause_there)
        except BaseException:
            with contextlib.suppress(SwiftError):  # those that are paused go on
                self.resume()
            raise
        with self._dispatch.changed:
            self._dispatch.paused_at = time.monotonic()
            self._dispatch.changed.notify_all()

    def _pause_there(self, client: EngineClient) -> None:
        def running() -> list[str]:
            with self._dispatch.changed:
                return [one.request_id for one in self._dispatch.table.held(client.life)]

        def pause() -> None:
            try:
                client.pause()
            except Late:
                self.abort(running())
                client.pause()

        if running():
            client.guarded(pause)

    def resume(self) -> None:
        self._check_open()
        self._on_all(lambda client: client.resume())
        self._dispatch.go_on()

    # --- what servers sample for others -------------------------------------------------------------------------

    def versions_of(self, samples: Sequence[Said]) -> list[Spans | None]:
        """Which weights sampled completions that environments got from these servers.

        Returns for each its spans as in `Completion.versions`, of the latest one with these tokens if no server
        remembers these log-probs; None where none remembers the tokens as they stand.
        """
        digests = [digest for ids in samples for digest in (digest_of(*ids), digest_of(*ids[:2]))]
        said = self._on_all(lambda client: client.safe_call("versions", client.timeouts.reply_s, digests=digests))
        found = [next((spans for spans in one if spans is not None), None) for one in zip(*said, strict=True)]
        return [exact or known for exact, known in zip(found[::2], found[1::2], strict=True)]

    def hold_back(self, held: bool) -> None:
        """Have the servers keep generation requests of others waiting, or not.

        Until it is called again or this run falls silent; a server that was restarted holds nothing back.
        """
        self._on_all(lambda client: client.safe_call("hold", client.timeouts.reply_s, held=held))

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        self._check_at_rest("new weights")
        updates = self._on_all(
            lambda client: client.begin_update(manifest, version), undo=lambda update: update.abort()
        )
        return PoolUpdate(self, updates, manifest, version)

    def spoil(self, why: str) -> None:
        """The engines' weights may differ from now on."""
        for client in self._dispatch.clients:
            client.void = client.void or why

    def rebuild(self) -> None:
        """Outstanding requests stay so, and begin anew."""
        self._check_open()
        lives = [client.life for client in self._dispatch.clients]
        self._on_all(lambda client: client.rebuild())
        with self._dispatch.changed:
            for life in lives:
                self._dispatch.table.release(life)
        self.version = 0

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        self._check_at_rest("an adapter")
        self._check_valid()
        if not self.capabilities.lora:
            raise self._unsupported("LoRA adapters")
        try:
            ack = self._on_all(lambda client: client.load_adapter(adapter, version))[0]
        except SwiftError as error:
            refused = isinstance(error, ConfigError | EngineAsleep | Unsupported)  # before anything was touched
            if not refused or any(client.version != self.version for client in self._dispatch.clients):
                self.spoil(f"the adapter of version {version} has not reached every engine")
            raise
        self.version = version
        return ack

    def drop_adapter(self) -> None:
        self._check_at_rest("a change of adapter")
        self._on_all(lambda client: client.drop_adapter())
        self.version = self._dispatch.clients[0].version

    def reset_caches(self) -> None:
        self._check_open()
        self._on_all(lambda client: client.reset_caches())

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        self._check_open()
        if level == 0:
            return SleepReport()
        if level not in self.capabilities.sleep_levels:
            raise self._unsupported(f"sleep({level})")
        if count := len(self._dispatch.table):
            raise EngineError(f"engine: {self.capabilities.name}: sleep: {count} requests are outstanding; abort them")
        reports = self._on_all(lambda client: client.sleep(level))
        notes = dict.fromkeys(report.note for report in reports if report.note)
        return SleepReport(sum(report.freed_bytes for report in reports), "; ".join(notes))

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        self._check_open()
        return all(self._on_all(lambda client: client.wake(tags)))

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Alive while one engine is; the detail names the others."""
        if self._dispatch.closed:
            return Health(False, "closed")
        reports = [client.health() for client in [*self._dispatch.clients, *self._dispatch.buried]]
        alive = not self.void and any(report.alive for report in reports)
        details = dict.fromkeys([self.void, *(report.detail for report in reports)])
        return Health(alive, "; ".join(filter(None, details)))

    def stacks(self) -> str:
        clients = self._dispatch.clients
        said = in_parallel([client.stacks for client in clients])
        return "; ".join(f"{client.name}: {one}" for client, one in zip(clients, said, strict=True))

    def close(self) -> None:
        """End all engines at the same time; a stream in another thread ends with `EngineDead`."""
        with self._dispatch.changed:
            self._dispatch.closed = True
            self._dispatch.changed.notify_all()
        in_parallel([client.close for client in self._dispatch.clients])

    # --- inside -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._dispatch.closed:
            raise EngineDead("engine: it is closed; make a new one")
        _ = self.engines

    def _check_valid(self) -> None:
        if void := self.void:
            raise SyncFailed(f"engine: its weights are void: {void}; sync again, or rebuild it")

    def _check_at_rest(self, what: str) -> None:
        self._check_open()
        count = len(self._dispatch.table)
        if count and self._dispatch.paused_at is None:
            raise EngineError(
                f"engine: {self.capabilities.name}: {what} while {count} requests are outstanding; wait for them, or "
                "pause"
            )

    def _on_all(self, work: Callable[[EngineClient], T], *, undo: Callable[[T], object] = lambda done: None) -> list[T]:
        """`work` on every engine at the same time; one that turns out to be dead is left out.

        The first failure is raised once all are done.
        """
        clients = self.engines
        outcomes = in_parallel([partial(work, client) for client in clients])
        results = [one for one in outcomes if not isinstance(one, Exception)]
        try:
            alive = self.engines
            for client, outcome in zip(clients, outcomes, strict=True):
                if isinstance(outcome, Exception) and client in alive:
                    raise outcome
        except BaseException:
            for result in results:
                undo(result)
            raise
        return results


class PoolUpdate(WeightUpdate):
    """One update on its way to all engines of a pool."""

    def __init__(
        self, pool: EnginePool, updates: Sequence[WeightUpdate], manifest: Sequence[TensorInfo], version: int
    ) -> None:
        super().__init__(pool.capabilities.name, manifest, version)
        self._pool, self._updates = pool, updates

    def _deliver(self, bucket: Bucket) -> None:
        if self.sent == len(bucket.tensors):
            join_broadcast(self._updates, bucket)
        waits = settled([outcome_of(partial(update.start, bucket)) for update in self._updates])
        settled([outcome_of(wait) for wait in waits if wait is not None])

    def _finish(self) -> Ack:
        return settled(in_parallel([update.commit for update in self._updates]))[0]  # each has confirmed what it got

    def commit(self) -> Ack:
        """All engines switch; see `WeightUpdate.commit`."""
        try:
            ack = super().commit()
        except SwiftError:  # some may have switched
            self._pool.spoil(f"the update to version {self.version} has not reached every engine")
            raise
        self._pool.version = self.version
        return ack

    def _give_up(self) -> None:
        for update in self._updates:
            update.abort()


def outcome_of(work: Callable[[], T]) -> T | Exception:
    """What it returns or raises."""
    try:
        return work()
    except Exception as error:  # the caller raises it once the others are done
        return error


def in_parallel(work: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """What each of them returns or raises, in order."""
    if len(work) < 2:
        return [outcome_of(one) for one in work]
    with ThreadPoolExecutor(len(work), thread_name_prefix="engine") as threads:
        return list(threads.map(outcome_of, work))


def settled(outcomes: Sequence[T | Exception]) -> list[T]:
    """What all returned; raises the first failure among them."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes  # type: ignore[return-value]


def common_capabilities(each: Sequence[Capabilities]) -> Capabilities:
    """What every engine can do."""
    first = each[0]
    all_have = {name: all(getattr(one, name) for one in each) for name in ("lora", "in_flight_updates", "guided")}
    shared = {
        name: tuple(entry for entry in getattr(first, name) if all(entry in getattr(one, name) for one in each))
        for name in ("sleep_levels", "sampling_fields")
    }
    facts: dict[str, Any] = {**all_have, **shared}
    return replace(
        first,
        logprob_support=max((one.logprob_support for one in each), key=["full", "truncated", "raw"].index),
        shares_weights=False,
        max_model_len=min(one.max_model_len for one in each),
        devices=tuple(device for one in each for device in one.devices),
        **facts,
    )
