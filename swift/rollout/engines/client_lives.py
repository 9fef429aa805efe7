"""The lives of an engine that lives elsewhere, as its client sees them: connected, lost, restored, dead, closed."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from swift.errors import EngineAsleep, EngineDead, EngineError, SwiftError, SyncFailed
from swift.rollout.engines.base import (
    ALL_TAGS,
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    Health,
    InferenceEngine,
    SleepLevel,
    Tag,
)
from swift.rollout.engines.requests import RequestTable
from swift.rollout.engines.transport import Batch, Event, Lost, Timeouts, Transport
from swift.rollout.weights.broadcast import BroadcastSender
from swift.rollout.weights.sending import Kept

T = TypeVar("T")


class EngineLives(InferenceEngine):
    """What `EngineClient`, which has the arguments, knows of its engine, and how it gets it back after a loss."""

    def __init__(
        self,
        transport: Transport,
        *,
        timeouts: Timeouts,
        weight_transport: str | None = None,
        keeps_weights: bool = True,
        end_tokens: Sequence[int] = (),
    ) -> None:
        self.transport = transport
        self.name = transport.name
        self.timeouts = timeouts
        self.weight_transport = weight_transport
        self.keeps_weights = keeps_weights
        self.end_tokens = tuple(end_tokens)
        self.version = 0
        self.restarts = 0
        self.table = RequestTable(limit_s=timeouts.request_s, grace_s=2 * timeouts.reply_s)
        self._changed = threading.Condition(threading.RLock())
        self._replacing = threading.RLock()
        self._batches: set[Batch] = set()
        self._numbers = 0
        self._events: deque[tuple[Batch, Event]] = deque()
        self._before = EngineCounters()  # of the lives that are over
        self._capabilities: Capabilities | None = None
        self._kept: Kept | None = None
        self._adapter: tuple[int, AdapterWeights] | None = None
        self._synced = False
        self._asleep = ""
        self._slept: tuple[SleepLevel, set[Tag]] = (0, set())
        self._void = ""
        self._paused_at: float | None = None
        self._paused_there = False
        self._touched_at = 0.0
        self._dead: SwiftError | None = None
        self._closed = False
        self.broadcaster: BroadcastSender | None = None
        self.sent_by = ""  # way of the last weights

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Of the engine; waits until it is there."""
        if self._capabilities is None:
            with self._replacing:
                if self._capabilities is None:
                    self._check_alive()
                    try:
                        self._capabilities = self.transport.connect()
                    except SwiftError as error:
                        if not self._closed and (self.transport.restartable or isinstance(error, EngineDead)):
                            self._dead = error  # a server that is held by another run may be free later
                        raise
        return self._capabilities

    @property
    def counters(self) -> EngineCounters:  # type: ignore[override]
        """Sums over the lives of the engine."""
        now, before = self.transport.counters, self._before
        return EngineCounters(
            prefill_tokens=before.prefill_tokens + now.prefill_tokens,
            decode_rows=before.decode_rows + now.decode_rows,
            decode_steps=before.decode_steps + now.decode_steps,
            generate_s=before.generate_s + now.generate_s,
            restarts=self.restarts + now.restarts,
        )

    @property
    def late(self) -> int:  # type: ignore[override]
        """See `InferenceEngine.late`."""
        return self.table.late

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """See `InferenceEngine.health`; a lost engine that can be replaced is healthy again after that."""
        if self._closed or self._dead is not None:
            return Health(False, self.version, self._dead.problems[0] if self._dead is not None else "closed")
        if self._void:
            return Health(False, self.version, f"its weights are void: {self._void}")
        return replace(self.transport.health(), version=self.version)

    def info(self) -> dict[str, Any]:
        """See `InferenceEngine.info`; what the engine says of itself as far as it answers."""
        facts: dict[str, Any] = {"name": self.name, "restarts": self.counters.restarts, **self.transport.info()}
        if self._capabilities is not None and not self._closed and self._dead is None:
            try:
                facts |= self.transport.call("info", self.timeouts.connect_s)
            except (Lost, SwiftError) as error:
                facts["state"] = str(error)
        return {**facts, "version": self.version, "outstanding": len(self.table)}

    def stacks(self) -> str:
        """Where the engine's thread is, in one line."""
        return f"{self.name}: {self.transport.stacks()}"

    def close(self) -> None:
        """See `InferenceEngine.close`; a stream in another thread ends with `EngineDead`."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify_all()
        if first:
            self._drop_batches()
            self.transport.close()
            if self.broadcaster is not None:
                self.broadcaster.close()
        self._kept = self._adapter = None

    # --- an engine that was lost ------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], T]) -> T:
        """A call that may be repeated on the engine that replaced this one."""
        while True:
            life = self.transport.life
            try:
                done = work()
            except Lost as lost:
                self._recover(life, lost)
            else:
                self.transport.progress()
                return done

    def _recover(self, life: object, lost: Lost) -> None:
        """Have the engine again, with all it had, unless another thread has seen to it.

        Raises:
            EngineDead: it is not coming back.
        """
        with self._replacing:
            self._check_alive()
            if self.transport.life is not life:
                return
            self._drop_batches()
            how = str(lost)
            while True:
                try:
                    before = self.counters
                    restarts = self.transport.replace(how, version=self.version, valid=not self._void)
                    if restarts is not None:
                        self.restarts = before.restarts + restarts
                        self._before = replace(before, restarts=0)
                        self.transport.counters = EngineCounters()
                        self._restore()
                    return
                except (Lost, SyncFailed) as again:
                    self._check_alive()
                    how = str(again)
                except EngineDead as error:
                    self._check_open()
                    self._dead = self._dead or error
                    raise

    def _restore(self) -> None:
        """Weights, adapter and sleep of the life before."""
        self._paused_there = False
        if self._void:
            return
        if self._synced and self._kept is None and self._adapter is None:
            raise self._die(f"its weights of version {self.version} were not kept for a restart")
        if self._kept is not None:
            self._asleep = self._kept.send(self.transport, self.name, self.timeouts.sync_s)
        if self._adapter is not None:
            version, adapter = self._adapter
            self._send_adapter(adapter, version)
        level, asleep = self._slept
        if level and (asleep or level == 2):
            self._asleep = self.transport.call("sleep", self.timeouts.sleep_s, level=level)["asleep"]
            awake = [tag for tag in ALL_TAGS if tag not in asleep]
            if awake:
                self._asleep = self.transport.call("wake", self.timeouts.sleep_s, tags=awake)["asleep"]

    def _send_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        ack: Ack = self.transport.call("load_adapter", self.timeouts.sync_s, adapter=adapter, version=version)
        if (ack.version, ack.tensors, ack.digest) != (version, len(adapter.tensors), adapter.digest()):
            raise SyncFailed(
                f"weights: adapter version {version} for {self.name}: it confirms version {ack.version}, digest "
                f"{ack.digest}; sent was digest {adapter.digest()}"
            )
        return ack

    # --- batches ----------------------------------------------------------------------------------------------

    def _end(self, batch: Batch) -> None:
        """A batch is over; what it still owes is sampled again."""
        self._batches.discard(batch)
        self.table.release(batch)

    def _drop_batches(self) -> None:
        with self._changed:
            batches = list(self._batches)
            for batch in batches:
                self._end(batch)
        for batch in batches:
            self.transport.drop(batch)

    # --- states -----------------------------------------------------------------------------------------------

    def _die(self, problem: str) -> EngineDead:
        """Nothing more is expected of this engine."""
        self._dead = error = EngineDead(f"{self.name}: {problem}")
        with contextlib.suppress(Lost):
            self.transport.close()
        return error

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self.name}: it is closed; make a new one")

    def _check_alive(self) -> None:
        self._check_open()
        if self._dead is not None:
            raise self._dead

    def _check_awake(self) -> None:
        if self._asleep:
            raise EngineAsleep(f"{self.name}: {self._asleep}; wake it, and send what it dropped")

    def _check_valid(self) -> None:
        if self._void:
            raise SyncFailed(f"{self.name}: its weights are void: {self._void}; sync again, or rebuild it")

    def _check_at_rest(self, what: str) -> None:
        if self.table and self._paused_at is None:
            raise EngineError(
                f"{self.name}: {what} while {len(self.table)} requests are outstanding; wait for them, or "
                "pause with keep"
            )
