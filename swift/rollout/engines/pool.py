"""Several engines as one: requests are spread over them, everything else happens to all of them.

    submit      a group (consecutive requests "<group>/<sample>" with the same prompt) goes to one engine, which
                prefills its prompt once: the one with the fewest outstanding tokens, prompt and longest completion
    stream      one thread per engine that has work; completions come out as they finish; `between_steps` of the pool
                is called in the thread that streams from it, and those of its engines are not used
    updates     in parallel; each bucket is staged once for all; every ack must be the same
    the rest    in parallel on all engines; what they can do is what each of them can do

An engine that is dead beyond its own restarts is left out from then on; its requests wait in the pool's table until
the others may take them, so a death during an update or a pause loses nothing. The last one takes the pool with it.
Engines never sample with different versions: after an update that did not reach all of them the pool's weights are void
until another update or `rebuild` has.

Members take `submit`, `abort`, `pause` and `close` while another thread is in their `stream`; `EngineClient` does.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from swift.errors import (
    ConfigError,
    EngineAsleep,
    EngineDead,
    EngineError,
    RequestRefused,
    SwiftError,
    SyncFailed,
    Unsupported,
)
from swift.rollout.engines.base import (
    ALL_TAGS,
    Ack,
    AdapterWeights,
    EngineCounters,
    Health,
    InferenceEngine,
    PauseMode,
    SleepLevel,
    SleepReport,
    Tag,
    TensorInfo,
    WeightUpdate,
)
from swift.rollout.engines.joint import common_capabilities, first_failure, in_parallel, joint_ack
from swift.rollout.engines.pool_update import PoolUpdate
from swift.rollout.engines.requests import RequestTable
from swift.types import Completion, Request

LOOK_S = 1.0
"""How often a waiting stream looks whether the pool was closed."""
REST_S = 120.0
"""How long a stream of an engine may take to end once nothing of it is outstanding, or it is paused."""

T = TypeVar("T")
Arrival = tuple["Member", Completion | Exception | None] | None
"""What the thread of an engine brings: a completion, the error that ended its stream, or None at its end. None alone
says that another engine has work now."""


@dataclass(slots=True, eq=False)
class Member:
    """One engine. thread: in its stream now."""

    engine: InferenceEngine
    thread: threading.Thread | None = None
    dead: EngineDead | None = None


class EnginePool(InferenceEngine):
    """See the module's docstring.

    Args:
        engines: at least one, with the same model; they may still be starting, and are waited for here.

    Raises:
        SwiftError: one of them did not start; the others are closed then.
    """

    def __init__(self, engines: Sequence[InferenceEngine]) -> None:
        self._members = [Member(engine) for engine in engines]
        self._lock = threading.RLock()
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.table = RequestTable(retries=False)
        self._last: tuple[Any, Member] | None = None
        self._paused = False
        self._closed = False
        self._void = ""
        self.version = 0
        try:
            self.capabilities = common_capabilities([engine.capabilities for engine in engines])
        except BaseException:
            self.close()
            raise

    @property
    def counters(self) -> EngineCounters:  # type: ignore[override]
        """Sums over the engines."""
        names = [one.name for one in fields(EngineCounters)]
        return EngineCounters(
            **{name: sum(getattr(one.engine.counters, name) for one in self._members) for name in names}
        )

    @property
    def late(self) -> int:  # type: ignore[override]
        """Sum over the engines."""
        return sum(member.engine.late for member in self._members)

    @property
    def void(self) -> str:  # type: ignore[override]
        """Why its weights belong to no version; "" when they do."""
        return self._void

    @property
    def engines(self) -> list[InferenceEngine]:
        """Those that are alive."""
        return [member.engine for member in self._alive()]

    # --- sampling ---------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> set[str]:
        """Ids of what `stream` will still deliver."""
        with self._lock:
            return self.table.ids

    def recover(self) -> Collection[str]:
        """The engine that failed has let go of its requests already; the others go on."""
        return self.outstanding

    def submit(self, request: Request) -> None:
        """See `InferenceEngine.submit`."""
        self._check_open()
        self.check_length(request)
        self._check_whole()
        with self._lock:
            self.table.add(request)
        try:
            self._hand_out(request)
        except SwiftError:
            with self._lock:
                self.table.remove(request.request_id)
            raise

    def _hand_out(self, request: Request) -> None:
        """Give a request to an engine.

        Raises:
            EngineDead: none is left.
            SwiftError: the engine does not take it.
        """
        while True:
            member = self._choose(request)
            try:
                member.engine.submit(request)
            except EngineDead as error:
                self.bury(member, error)
                continue
            if member.thread is None:  # a stream of the pool that is under way is to begin with this one, too
                self._arrivals.put(None)
            return

    def _choose(self, request: Request) -> Member:
        """The engine of its group, or the one with the least work."""
        group = (request.request_id.rpartition("/")[0], tuple(request.prompt_ids))
        with self._lock:
            alive = self._alive()
            if self._last is None or self._last[0] != group or self._last[1] not in alive:
                self._last = (group, min(alive, key=self.table.load))
            member = self._last[1]
            self.table.send([request.request_id], member, 0.0)
            return member

    def _hand_out_waiting(self) -> None:
        """What an engine that died had goes to the others."""
        with self._lock:
            waiting = self.table.waiting
        for request in waiting:
            if request.request_id not in self.table:  # aborted meanwhile
                continue
            try:
                self._hand_out(request)
            except SwiftError:
                with self._lock:
                    self.table.send([request.request_id], None, 0.0)  # it waits on
                raise

    def stream(self) -> Iterator[Completion]:
        """See `InferenceEngine.stream`."""
        while True:
            self._check_open()
            while self.table.ready:
                yield self.table.ready.popleft()
            self._between()
            if self.table and not self._paused:
                self._check_whole()
                self._hand_out_waiting()
            with self._lock:
                for member in self._alive():
                    if self.table.load(member) and not self._paused and member.thread is None:
                        self._start(member)
                busy = any(member.thread is not None for member in self._members)
            if not busy and self._arrivals.empty() and not self.table.ready:
                return
            self._receive()

    def _start(self, member: Member) -> None:
        name = f"stream of engine {self._members.index(member)}"
        member.thread = threading.Thread(target=self._pump, args=(member,), name=name, daemon=True)
        member.thread.start()

    def _pump(self, member: Member) -> None:
        """The thread of one stream."""
        try:
            for completion in member.engine.stream():
                self._arrivals.put((member, completion))
        except Exception as error:  # raised in the caller's thread
            self._arrivals.put((member, error))
        finally:
            self._arrivals.put((member, None))

    def _receive(self) -> None:
        """Wait a moment for what the threads bring."""
        try:
            came = self._arrivals.get(timeout=self._patience(LOOK_S))
        except queue.Empty:
            return
        if came is None:
            return
        member, arrival = came
        if arrival is None:
            member.thread = None
        elif isinstance(arrival, Completion):
            with self._lock:
                self.table.arrive(member, arrival)
        elif isinstance(arrival, EngineDead) and not self._closed:
            self.bury(member, arrival)
        elif isinstance(arrival, RequestRefused):
            with self._lock:
                known = self.table.remove(arrival.request_id)
            if known:
                raise arrival
        else:
            self._disown(member)
            raise arrival

    def _disown(self, member: Member) -> None:
        """After a failure nobody waits for what this engine had."""
        with self._lock:
            self.table.remove_all(member)
        if self._closed:
            return
        with contextlib.suppress(SwiftError):  # an engine that fails here, too, says so at its next use
            member.engine.abort()
            for _ in member.engine.stream():  # its own stream has ended: that was the failure
                pass

    def bury(self, member: Member, error: EngineDead) -> None:
        """Leave an engine out; its requests wait for the others.

        Raises:
            EngineDead: it was the last one.
        """
        with self._lock:
            if member.dead is None:
                member.dead = error
            self.table.release(member)
        member.engine.close()
        self._arrivals.put(None)
        self._alive()

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `InferenceEngine.abort`; from any thread."""
        with self._lock:
            told = self.table.abort(request_ids)
        self._arrivals.put(None)
        for member, names in told.items():
            assert isinstance(member, Member)
            member.engine.abort(names)

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `InferenceEngine.pause`."""
        self._check_open()
        if mode == "abort":
            self.abort()
        if mode in ("abort", "wait") and not self._paused:
            with self._undisturbed():
                self.table.ready.extend(list(self.stream()))
        before, self._paused = self._paused, True  # no new streams
        try:
            self._on_all(lambda engine: engine.pause("keep"))
        except BaseException:
            if not before:  # those that are paused go on
                with contextlib.suppress(SwiftError):
                    self.resume()
            raise

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._check_open()
        self._paused = False
        self._on_all(lambda engine: engine.resume())

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """See `InferenceEngine.begin_update`."""
        self._check_open()
        self._rest()
        updates = self._on_all(
            lambda engine: engine.begin_update(manifest, version), undo=lambda update: update.abort()
        )
        return PoolUpdate(self, list(zip(self._alive(), updates, strict=True)), manifest, version)

    def spoil(self, why: str) -> None:
        """For `PoolUpdate`: the engines' weights may differ from now on."""
        self._void = why

    def arrived(self, version: int) -> None:
        """For `PoolUpdate`: every engine has the same weights."""
        self._void = ""
        self.version = version
        self._assert_one_version()

    def rebuild(self) -> None:
        """See `InferenceEngine.rebuild`."""
        self._check_open()
        self._rest()
        self._on_all(lambda engine: engine.rebuild())
        self._void = ""
        self._follow()

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """See `InferenceEngine.load_adapter`."""
        self._check_open()
        self._check_whole()
        self._rest()
        self._void = f"the adapter of version {version} has not reached every engine"
        try:
            acks = self._on_all(lambda engine: engine.load_adapter(adapter, version))
        except (ConfigError, EngineAsleep, Unsupported):  # refused before anything was touched
            if all(member.engine.version == self.version for member in self._alive()):
                self._void = ""
            raise
        self._void = ""
        self._follow()
        return joint_ack(acks)

    def drop_adapter(self) -> None:
        """See `InferenceEngine.drop_adapter`."""
        self._check_open()
        self._rest()
        self._on_all(lambda engine: engine.drop_adapter())
        self._follow()

    def reset_caches(self) -> None:
        """See `InferenceEngine.reset_caches`."""
        self._check_open()
        self._on_all(lambda engine: engine.reset_caches())

    def _follow(self) -> None:
        self.version = self._alive()[0].engine.version
        self._assert_one_version()

    def _assert_one_version(self) -> None:
        versions = [member.engine.version for member in self._alive()]
        assert set(versions) == {self.version}, f"engines with versions {versions} in a pool of version {self.version}"

    def _rest(self) -> None:
        """Until no thread is in an engine's stream, which is when nothing is outstanding, or all are paused.

        Raises:
            EngineError: requests are outstanding, and nobody paused.
        """
        with self._lock:
            self._alive()
            waiting = len(self.table)
        if waiting and not self._paused:
            raise EngineError(f"engine: {self.capabilities.name}: {waiting} requests are outstanding; wait, or pause")
        deadline = time.monotonic() + REST_S
        while any(member.thread is not None for member in self._members) and time.monotonic() < deadline:
            self._receive()
        if any(member.thread is not None for member in self._members):
            raise EngineError(
                f"engine: {self.capabilities.name}: its streams do not end; it was paused {REST_S:g} s ago"
            )

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """See `InferenceEngine.sleep`."""
        self._check_open()
        self._rest()
        reports = self._on_all(lambda engine: engine.sleep(level))
        notes = list(dict.fromkeys(report.note for report in reports if report.note))
        return SleepReport(sum(report.freed_bytes for report in reports), "; ".join(notes))

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """See `InferenceEngine.wake`."""
        self._check_open()
        return all(self._on_all(lambda engine: engine.wake(tags)))

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Alive while one engine is; the detail names the others."""
        if self._closed:
            return Health(False, self.version, "closed")
        reports = [
            Health(False, self.version, member.dead.problems[0]) if member.dead is not None else member.engine.health()
            for member in self._members
        ]
        alive = not self._void and any(report.alive for report in reports)
        details = [self._void, *(report.detail for report in reports)]
        return Health(alive, self.version, "; ".join(detail for detail in details if detail))

    def info(self) -> dict[str, Any]:
        """What the engines say."""
        return {
            "engine": self.capabilities.name,
            "version": self.version,
            "engines": [member.engine.info() for member in self._living()],
        }

    def stacks(self) -> str:
        """Where the main threads of those in processes of their own are, in one line."""
        found = [member.engine for member in self._living() if hasattr(member.engine, "stacks")]
        outcomes = in_parallel([engine.stacks for engine in found]) if found else []
        return "; ".join(str(outcome) for outcome in outcomes)

    def close(self) -> None:
        """End all engines at the same time; a stream in another thread ends with `EngineDead`."""
        self._closed = True
        threads = [threading.Thread(target=member.engine.close, daemon=True) for member in self._members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(REST_S)

    # --- inside -----------------------------------------------------------------------------------------------

    def _living(self) -> list[Member]:
        return [member for member in self._members if member.dead is None]

    def _alive(self) -> list[Member]:
        """Raises EngineDead when there is none."""
        living = self._living()
        if not living:
            last = next(member.dead for member in reversed(self._members) if member.dead is not None)
            raise last
        return living

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"engine: {self.capabilities.name}: it is closed; make a new one")
        self._alive()

    def _check_whole(self) -> None:
        if self._void:
            raise SyncFailed(
                f"engine: {self.capabilities.name}: its weights are void: {self._void}; sync again, or rebuild it"
            )

    def _on_all(
        self, work: Callable[[InferenceEngine], T], *, undo: Callable[[T], object] = lambda done: None
    ) -> list[T]:
        """`work` on every engine at the same time; one that turns out to be dead is left out.

        Raises:
            SwiftError: the first failure, once all are done.
        """
        members = self._alive()
        outcomes = in_parallel([lambda member=member: work(member.engine) for member in members])  # type: ignore[misc]
        results = [one for one in outcomes if not isinstance(one, Exception)]
        try:
            for member, outcome in zip(members, outcomes, strict=True):
                if isinstance(outcome, EngineDead):
                    self.bury(member, outcome)
            first_failure([one for one in outcomes if not isinstance(one, EngineDead)])
        except BaseException:
            for result in results:
                undo(result)
            raise
        return results
