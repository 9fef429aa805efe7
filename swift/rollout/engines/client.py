"""The client of an engine that lives elsewhere: in a Ray actor or behind HTTP.

    submit* -> stream         requests travel in batches; completions come while others are still sampled
    an engine that is lost    is replaced or found again by its transport; then it gets the present weights, adapter and
                              sleep state, and its requests again with their ids and seeds

Each request comes back exactly once: a completion counts when it is read from the batch that holds its request. A
failed weight update is never repeated here: the weights are void until another update is complete, or `rebuild`.

`submit`, `abort`, `pause`, `health`, `info` and `close` may be called while another thread is in `stream`. No wait is
unbounded; see `Timeouts`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from swift.errors import EngineAsleep, EngineDead, EngineError, RequestRefused, SyncFailed
from swift.rollout.engines.base import (
    ALL_TAGS,
    Ack,
    AdapterWeights,
    PauseMode,
    SleepLevel,
    SleepReport,
    Tag,
    TensorInfo,
    WeightUpdate,
)
from swift.rollout.engines.client_lives import EngineLives
from swift.rollout.engines.completion_stream import Failure
from swift.rollout.engines.transport import Batch, Busy, Event, Late, Lost
from swift.rollout.weights.sending import ClientUpdate, Kept
from swift.types import Completion, Request

LOOK_S = 1.0
"""How often a waiting stream checks the time limits of its requests."""
BATCH = 1024
"""Largest number of requests in one batch."""
BATCH_TOKENS = 4_000_000
"""Largest number of prompt tokens in one batch."""
BUSY_S = 1.0
"""Pause after the server reported a full queue."""

T = TypeVar("T")


class EngineClient(EngineLives):
    """See the module's docstring; connects when it is first needed.

    Args:
        transport: to the engine.
        timeouts: see `Timeouts`.
        weight_transport: one of the transport's `ways`; None chooses by devices.
        keeps_weights: keep the last update for a restart; False makes the loss of an engine with weights final.
        end_tokens: ids that end a completion, sent with every request; for engines that may know others.
    """

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """See `InferenceEngine.submit`; it travels when `stream` is called."""
        self._check_alive()
        self.check_length(request)
        self._check_awake()
        self._check_valid()
        with self._changed:
            self.table.add(request)
            self._changed.notify_all()

    def stream(self) -> Iterator[Completion]:
        """See `InferenceEngine.stream`.

        Raises:
            EngineDead: the engine is gone.
            RequestRefused: the engine does not take one request; another `stream` goes on with the rest.
            EngineError: no progress for `stall_s`; impossible log-probs; what the engine raised.
            SyncFailed: requests wait, but the weights are void.
        """
        while True:
            while self.table.ready:
                yield self.table.ready.popleft()
            self._between()
            if not self.table or (self._paused_at is not None and not self._events):
                return
            self._check_alive()
            self._check_valid()
            life = self.transport.life
            try:
                if self._paused_at is None:
                    self._post_waiting()
                    self._await_event()
                    self._check_clocks()
                self._read_events()
            except Lost as lost:
                self._recover(life, lost)
            except Busy:
                self._wait_streaming(BUSY_S)

    def _wait_streaming(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._closed and (left := deadline - time.monotonic()) > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._patience(left))
            self._between()

    def _post_waiting(self) -> None:
        while True:
            with self._changed:
                chosen = self._next_batch()
                if not chosen:
                    return
                self._numbers += 1
                batch = Batch(self._numbers)
                self._touched_at = time.monotonic()
                self.table.send([one.request_id for one in chosen], batch, self._touched_at)
                self._batches.add(batch)
            self.transport.post(batch, [self._with_ends(one) for one in chosen], self.version, self._deliver)

    def _next_batch(self) -> list[Request]:
        chosen: list[Request] = []
        tokens, last = 0, None
        for request in self.table.waiting:
            same = last is not None and last.prompt_ids == request.prompt_ids
            tokens += 0 if same else len(request.prompt_ids)
            if chosen and (len(chosen) >= BATCH or tokens > BATCH_TOKENS):
                break
            chosen.append(request)
            last = request
        return chosen

    def _with_ends(self, request: Request) -> Request:
        if not self.end_tokens:
            return replace(request, prompt=None)
        stops = tuple(sorted({*request.sampling.stop_token_ids, *self.end_tokens}))
        return replace(request, prompt=None, sampling=replace(request.sampling, stop_token_ids=stops))

    def _deliver(self, batch: Batch, event: Event) -> None:
        with self._changed:
            self._events.append((batch, event))
            self._changed.notify_all()

    def _await_event(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._events
                    or self.table.waiting
                    or self.table.ready
                    or self._closed
                    or self._paused_at is not None
                ),
                self._patience(LOOK_S),
            )

    def _read_events(self) -> None:
        """Everything that has arrived; stops at the first failure."""
        while True:
            with self._changed:
                if not self._events:
                    return
                batch, event = self._events.popleft()
                if batch in self._batches:
                    self._take(batch, event)

    def _take(self, batch: Batch, event: Event) -> None:
        if isinstance(event, Completion):
            self.transport.progress()
            try:
                self.table.arrive(batch, event)
            except EngineError as error:
                self._disown()
                raise EngineError(f"{self.name}: {error.problems[0]}") from None
        elif isinstance(event, Failure):
            self._fail(batch, event)
        else:
            if isinstance(event, RequestRefused):
                self.table.remove(event.request_id)
            self._end(batch)
            if isinstance(event, Exception):
                raise event

    def _fail(self, batch: Batch, failure: Failure) -> None:
        error = failure.error
        if isinstance(error, EngineDead):
            raise Lost(f"failed ({error.problems[0].removeprefix(f'{self.name}: ')})")
        for name in failure.request_ids:
            self.table.remove(name)
        if isinstance(error, SyncFailed):
            self._void = error.problems[0]
        elif not isinstance(error, EngineAsleep) and len(failure.request_ids) == 1:
            raise RequestRefused(failure.request_ids[0], *error.problems)
        raise error

    def _disown(self) -> None:
        """After a failure nobody waits for the rest: it is aborted and not delivered."""
        with self._changed:
            self.table.abort()
            self._drop_batches()
            self.table.ready.clear()

    def _check_clocks(self) -> None:
        now = time.monotonic()
        with self._changed:
            late, deaf = self.table.overdue(now)
        if deaf:
            problem = f"does not abort request {deaf[0]}; {self.transport.stacks()}".rstrip("; ")
            raise Lost(problem) if self.transport.restartable else self._die(problem)
        for names in late.values():
            self.transport.abort(names)
        progress_at = max(self.transport.progress_at, self._touched_at)
        if self._batches and now - progress_at > self.timeouts.stall_s:
            problem = f"no progress for {self.timeouts.stall_s:g} s: {self.transport.stacks()}".rstrip(": ")
            raise EngineError(self._die(problem).problems[0])  # the other engines of a pool are not to go on without

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `InferenceEngine.abort`; from any thread."""
        with self._changed:
            told = self.table.abort(request_ids)
            self._changed.notify_all()
        for names in told.values():
            self.transport.abort(names)

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `InferenceEngine.pause`; "keep" also from another thread than that of `stream`.

        A pause that is not confirmed in time aborts what runs; if that has no effect either, the engine is lost.
        """
        self._check_alive()
        if mode == "abort":
            self.abort()
        if mode in ("abort", "wait"):
            self._finish()
        elif self._batches:
            self._guarded(self._pause_there)
        with self._changed:
            self._paused_at = self._paused_at or time.monotonic()
            self._changed.notify_all()

    def _pause_there(self) -> None:
        try:
            self.transport.call("pause", self.timeouts.pause_s)
        except Late:
            self.abort()
            self.transport.call("pause", self.timeouts.pause_s)
        self._paused_there = True

    def _finish(self) -> None:
        """Stream to the end, for a later `stream` to deliver."""
        if self._paused_at is not None:
            return
        held: list[Completion] = []
        try:
            with self._undisturbed():
                held.extend(self.stream())
        finally:
            self.table.ready.extendleft(reversed(held))

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._check_alive()
        if self._paused_there:
            self._guarded(self._resume_there)
        with self._changed:
            paused_at, self._paused_at = self._paused_at, None
            self._touched_at = time.monotonic()
            if paused_at is not None:
                self.table.postpone(self._touched_at - paused_at)

    def _resume_there(self) -> None:
        if self._paused_there:  # an engine that was replaced meanwhile is not paused
            self.transport.call("resume", self.timeouts.pause_s)
        self._paused_there = False

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """See `InferenceEngine.begin_update`."""
        self._check_alive()
        self._check_at_rest("new weights")
        assert self.capabilities is not None
        deadline = time.monotonic() + self.timeouts.sync_s
        number = self._guarded(
            lambda: self.transport.call("begin_update", self.timeouts.sync_s, manifest=manifest, version=version)
        )
        return ClientUpdate(self, number, manifest, version, deadline)

    def weights_change(self, why: str) -> None:
        """For `ClientUpdate`: the weights there are void from now on, and those kept are out of date."""
        self._void = why
        self._kept = self._adapter = None

    def weights_arrived(self, kept: Kept, asleep: str) -> None:
        """For `ClientUpdate`: they are valid again."""
        self._kept = kept if self.keeps_weights else None
        self._adapter, self._synced = None, True
        self._void, self._asleep = "", asleep
        level, tags = self._slept
        if level == 2:  # what it dropped is there again
            self._slept = (1 if tags else 0, tags)
        self.version = kept.version

    def rebuild(self) -> None:
        """See `InferenceEngine.rebuild`; outstanding requests stay so, and begin anew."""
        self._check_alive()
        assert self.capabilities is not None
        self._drop_batches()
        self._kept = self._adapter = None
        self._synced, self._paused_there = False, False
        self.version, self._void, self._asleep = 0, "", ""
        self._slept = (0, set())
        self._guarded(lambda: self.transport.call("rebuild", self.timeouts.start_s))

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """See `InferenceEngine.load_adapter`."""
        self._check_alive()
        self._check_valid()
        self._check_at_rest("an adapter")
        if not self.capabilities.lora:
            raise self._unsupported("LoRA adapters")
        life = self.transport.life
        try:
            ack = self._send_adapter(adapter, version)
        except Lost as lost:
            self._recover(life, lost)
            raise SyncFailed(f"weights: adapter version {version} for {self.name}: its engine {lost}") from lost
        self.version = version
        self._synced = True
        if self.keeps_weights:
            copies = {name: tensor.detach().clone() for name, tensor in adapter.tensors.items()}
            self._adapter = (version, replace(adapter, tensors=copies))
        return ack

    def drop_adapter(self) -> None:
        """See `InferenceEngine.drop_adapter`."""
        self._check_alive()
        self._check_at_rest("a change of adapter")
        self.version = self._guarded(lambda: self.transport.call("drop_adapter", self.timeouts.sync_s))["version"]
        self._adapter = None

    def reset_caches(self) -> None:
        """See `InferenceEngine.reset_caches`."""
        self._check_alive()
        self._guarded(lambda: self.transport.call("reset_caches", self.timeouts.sync_s))

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """See `InferenceEngine.sleep`."""
        self._check_alive()
        if level == 0:
            return SleepReport()
        if self.table:
            raise EngineError(f"{self.name}: sleep while {len(self.table)} requests are outstanding; abort them")
        state = self._guarded(lambda: self.transport.call("sleep", self.timeouts.sleep_s, level=level))
        self._asleep = state["asleep"]
        self._slept = (max(level, self._slept[0]), set(ALL_TAGS))
        return SleepReport(state["freed_bytes"], state["note"])

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """See `InferenceEngine.wake`."""
        self._check_alive()
        state = self._guarded(lambda: self.transport.call("wake", self.timeouts.sleep_s, tags=list(tags)))
        self._asleep = state["asleep"]
        level, asleep = self._slept
        asleep = asleep - set(tags)
        self._slept = (level if asleep or level == 2 else 0, asleep)
        return bool(state["fully_awake"])
