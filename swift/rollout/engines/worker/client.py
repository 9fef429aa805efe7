"""The engine that lives in processes of its own, one after the other if need be.

    submit* -> stream                 the worker samples while the parent streams
    a process that is gone            is replaced at the next call: weights of the last publication, sleep and pause
                                      as they were, outstanding requests again with their ids and seeds

What was requested comes back exactly once: a completion counts when it has been read, and from then on its id is
unknown; tokens of a process that died are dropped. `restarts` per hour bound the replacements, after which the
engine is dead. Start failures are not repeated: they would fail again.

An update that fails is never repeated here. The weights are void until another update has come whole, or `rebuild`.

`submit`, `abort`, `pause`, `health`, `info` and `close` may be called while another thread is in `stream`.
Nothing here waits without a bound; see `WorkerTimeouts`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift.errors import EngineAsleep, EngineDead, EngineError, RequestRefused, SwiftError, SyncFailed
from swift.rollout.engines.base import (
    ALL_TAGS,
    Ack,
    AdapterWeights,
    Capabilities,
    Health,
    PauseMode,
    SleepLevel,
    SleepReport,
    Tag,
    TensorInfo,
    WeightUpdate,
)
from swift.rollout.engines.elsewhere import EngineElsewhere, Pending, fields_of, impossible
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.engines.worker import protocol
from swift.rollout.engines.worker.link import Call, CallTimeout, Link, WorkerLost, WorkerTimeouts
from swift.rollout.engines.worker.protocol import Message
from swift.rollout.engines.worker.weights import KeptAdapter, KeptWeights, Transport, WorkerUpdate, as_json
from swift.rollout.weight_sync.broadcast import BroadcastSender
from swift.types import Completion, Request

LOOK_S = 1.0
"""How often a waiting stream looks at the clocks of its requests."""
HEALTH_S = 5.0
"""Bound on `health` and `info`."""
RESTART_WINDOW_S = 3600.0
"""`restarts` are counted over so long."""
TRANSPORTS = ("shared_memory", "cuda_ipc", "broadcast")

__all__ = ["WorkerEngine", "WorkerTimeouts"]


@dataclass(slots=True)
class _Pending(Pending):
    """link: the life of the worker that has it."""

    link: Link | None = None


class WorkerEngine(EngineElsewhere):
    """Runs a backend in a child process; the process is launched at once, and waited for when it is first needed.

    Args:
        spec: the engine; its cores are set before torch is loaded there.
        name: for messages and logs.
        log_file: what the processes print is appended to it.
        timeouts: see `WorkerTimeouts`.
        restarts: processes that may be replaced per hour.
        transport: how weights travel; None chooses by the devices.
        keeps_weights: hold the last update for restarts; False saves a copy of the model, and makes a death after the
            first publication final.
        staging: folder that holds it instead of shared memory.

    Raises:
        ResourceError: no process can be started.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        name: str = "engine",
        log_file: Path | str,
        timeouts: WorkerTimeouts | None = None,
        restarts: int = 3,
        transport: Transport | None = None,
        keeps_weights: bool = True,
        staging: Path | None = None,
    ) -> None:
        super().__init__(name)
        self.spec = spec
        self.log_file = Path(log_file)
        self.timeouts = timeouts or WorkerTimeouts()
        self.restarts = restarts
        self.transport = transport
        self.keeps_weights = keeps_weights
        self.staging = staging
        self.broadcaster: BroadcastSender | None = None
        self._capabilities: Capabilities | None = None
        self._outstanding: dict[str, _Pending] = {}
        self._table = threading.RLock()  # of it, and of `_ready`
        self._life = threading.RLock()  # held while a process is replaced
        self._replacing = threading.Lock()  # of `_link` and `_closed`
        self._restarted: deque[float] = deque()
        self._kept: KeptWeights | None = None
        self._adapter: KeptAdapter | None = None
        self._lost_weights = 0  # version that a new process could not be given
        self._asleep: tuple[SleepLevel, set[Tag]] = (0, set())
        self._pausing = False  # wanted, and what a new process is told
        self._link = Link(spec, name=name, log_file=self.log_file, timeouts=self.timeouts)

    # --- start ------------------------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Until the first process has its engine.

        Raises:
            SwiftError: what building the engine raised there.
            EngineDead: the process ended, or took longer than `start_s`.
        """
        with self._life:
            self._check_alive()
            if self._capabilities is not None:
                return
            try:
                state = self._link.wait(self._link.started, self.timeouts.start_s)
            except WorkerLost as lost:
                self._check_alive()
                raise self._die(f"its process {lost} while it started; {self._link.last_lines()}") from lost
            except CallTimeout as late:
                problem = f"did not start within {self.timeouts.start_s:g} s; {self._link.stacks()}"
                raise self._die(f"{problem}; {self._link.last_lines()}") from late
            except SwiftError as error:
                self._dead = error
                self._link.end()
                raise
            self._capabilities = self._described(state)

    def _described(self, state: Message) -> Capabilities:
        return replace(
            Capabilities(**fields_of(state)), devices=self.spec.devices, transports=TRANSPORTS, shares_weights=False
        )

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Of the hosted engine; waits for its start."""
        if self._capabilities is None:
            self.wait_ready()
        assert self._capabilities is not None
        return self._capabilities

    @property
    def pid(self) -> int | None:
        """The process that hosts the engine at the moment."""
        return self._link.host_pid

    # --- sampling ---------------------------------------------------------------------------------------------

    @property
    def _pending(self) -> Mapping[str, Pending]:
        return self._outstanding

    def submit(self, request: Request) -> None:
        """See `InferenceEngine.submit`."""
        self._check_alive()
        self.check_length(request)
        self._check_whole()
        while True:
            with self._life:  # no process is being replaced
                link = self._link
                with self._table:  # an abort comes after it
                    call = self._post(request, link)
            try:
                if call is None:
                    raise WorkerLost(link.lost)
                link.wait(call, self.timeouts.reply_s)
                return
            except (WorkerLost, CallTimeout) as lost:
                if not self._withdraw(request, link):
                    return  # another thread has replaced the process, and submitted everything again
                self._recover(link, lost)
            except SwiftError:
                with self._table:
                    self._outstanding.pop(request.request_id, None)
                raise

    def _withdraw(self, request: Request, link: Link) -> bool:
        """Forget a request that was sent to a life that is over, unless it has come back or moved on already."""
        with self._table:
            pending = self._outstanding.get(request.request_id)
            if pending is None or pending.link is not link or pending.aborted:
                return False
            del self._outstanding[request.request_id]
            return True

    def _post(self, request: Request, link: Link) -> Call | None:
        """Note a request and send it; None when nobody takes it any more."""
        if request.request_id in self._outstanding:
            raise EngineError(f"request: {request.request_id}: is outstanding already; give each an id of its own")
        pending = self._outstanding[request.request_id] = _Pending(request)
        self._mark_sent(pending, link)
        try:
            return link.post("submit", request=protocol.request_to_json(request))
        except WorkerLost:
            return None

    def _mark_sent(self, pending: _Pending, link: Link) -> None:
        pending.link, pending.sent_at, pending.expired_at = link, time.monotonic(), None
        link.touch()

    def stream(self) -> Iterator[Completion]:
        """See `InferenceEngine.stream`.

        Raises:
            EngineDead: the process ended once too often, or the engine was closed.
            RequestRefused: the engine does not take one request; another `stream` goes on with the rest.
            EngineError: no progress for `stall_s`; a completion that cannot be; what the engine raised.
            SyncFailed: requests wait, but the weights are void.
        """
        told: Link | None = None
        while True:
            with self._life:
                link = self._link
            wakes = link.wakes
            paused = self._paused_at is not None  # then everything that ended before has arrived
            try:
                self._read_events(link)
            except WorkerLost as lost:
                self._recover(link, lost)
                continue
            while self._ready:
                yield self._ready.popleft()
            self._between()
            if not self._outstanding or paused:
                link.tell("rest")
                return
            self._check_alive()
            self._check_whole()
            if told is not link:
                link.touch()
                link.tell("stream")
                told = link
            try:
                self._await_event(link, wakes)
            except WorkerLost as lost:
                self._recover(link, lost)

    def _await_event(self, link: Link, wakes: int) -> None:
        """Until something came, somebody paused since `wakes`, or it is time to look at the clocks."""
        event = link.next_event(self._patience(LOOK_S), wakes=wakes)
        if event is not None:
            self._take(event)
        else:
            self._check_clocks(link)

    def _read_events(self, link: Link) -> None:
        """Everything that has arrived."""
        while link.events:
            event = link.next_event(0)
            if event is not None:
                self._take(event)

    def _take(self, event: Message) -> None:
        """Raises what the worker reports, and what cannot be believed."""
        self._count()
        kind = event["event"]
        if kind == "completion":
            self._arrive(protocol.completion_from_json(event["completion"]))
            return
        if kind == "failed" and event["fatal"]:
            self._link.lose(f"failed ({event['error']['problems'][0]})")
            raise WorkerLost(self._link.lost)
        with self._table:
            for name in event["lost"] if kind == "failed" else [event["request"]]:
                self._outstanding.pop(name, None)
        error = protocol.error_from_json(event["error"], self.name)
        if kind == "refused" and not isinstance(error, EngineDead | EngineAsleep | SyncFailed):
            raise RequestRefused(event["request"], *error.problems)
        raise error

    def _arrive(self, completion: Completion) -> None:
        """Accept a completion once, if anybody waits for it."""
        with self._table:
            pending = self._outstanding.get(completion.request_id)
            if pending is None:
                return  # given up meanwhile
            expired = completion.finish_reason == "abort" and pending.expired
            if expired and self._comes_again(pending, completion):
                self._send_again(pending, self._link)
                return
            del self._outstanding[completion.request_id]
        problem = impossible(completion)
        if problem:
            self._give_up_all()
            raise EngineError(
                f"{self.name}: request {completion.request_id}: {problem}: the model's output is not finite; look at "
                "its weights"
            )
        self._ready.append(completion)

    def _send_again(self, pending: _Pending, link: Link) -> None:
        """Same id, same seed; the tokens so far are dropped."""
        if pending.aborted:
            del self._outstanding[pending.request.request_id]
            self._ready.append(Completion(pending.request.request_id, [], [], "abort"))
            return
        self._mark_sent(pending, link)
        state = protocol.request_to_json(pending.request)
        link.tell("submit", request=state)

    def _give_up_all(self) -> None:
        """After a failure nobody waits for the rest: it is aborted, and what comes of it is not delivered."""
        with self._table:
            left = set(self._outstanding)
            self._outstanding.clear()
        link, deadline = self._link, time.monotonic() + self.timeouts.reply_s
        link.tell("abort", ids=sorted(left))
        try:
            while left and time.monotonic() < deadline:
                event = link.next_event(LOOK_S)
                if event is not None and event["event"] == "completion":
                    left.discard(event["completion"]["request_id"])
                elif event is not None:
                    left -= set(event.get("lost", [event.get("request")]))
        except WorkerLost:
            return
        if left:
            link.lose(f"does not abort request {min(left)}")

    def _check_clocks(self, link: Link) -> None:
        """Requests that take too long, and an engine that does nothing."""
        self._count()
        now = time.monotonic()
        with self._table:
            late = [one for one in self._outstanding.values() if one.link is link and self._is_late(one, now)]
            deaf = [one for one in late if one.expired_at is not None]
            for one in late:
                one.expired_at = one.expired_at or now
        if deaf:
            link.lose(f"does not abort request {deaf[0].request.request_id}; {link.stacks()}")
            raise WorkerLost(link.lost)
        if late:
            link.tell("abort", ids=[one.request.request_id for one in late])
        if self._paused_at is None and now - link.progress_at > self.timeouts.stall_s:
            problem = f"no progress for {self.timeouts.stall_s:g} s while {link.phase}: {link.stacks()}"
            link.lose("stalled")
            raise EngineError(self._die(f"{problem}; {link.last_lines(1)}").problems[0])  # nobody is to go on without

    def _is_late(self, pending: _Pending, now: float) -> bool:
        """Whether it is to be aborted, or should have been by now."""
        if pending.expired_at is None:
            return now - pending.sent_at > self.timeouts.request_s
        return now - pending.expired_at > self.timeouts.reply_s

    def _count(self) -> None:
        """The counters of all lives together."""
        prefill, rows, steps, seconds = self._link.counters
        self.counters.prefill_tokens = self._before.prefill_tokens + int(prefill)
        self.counters.decode_rows = self._before.decode_rows + int(rows)
        self.counters.decode_steps = self._before.decode_steps + int(steps)
        self.counters.generate_s = self._before.generate_s + seconds

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `InferenceEngine.abort`; from any thread."""
        wanted = None if request_ids is None else set(request_ids)
        with self._table:
            ids = [name for name in self._outstanding if wanted is None or name in wanted]
            for name in ids:
                self._outstanding[name].aborted = True
        if ids:
            self._link.tell("abort", ids=ids)

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `InferenceEngine.pause`; "keep" also from another thread than that of `stream`.

        A pause that is not confirmed within `pause_s` aborts what runs; one that then still is not costs the process.
        """
        self._check_alive()
        if mode == "abort":
            self.abort()
        if mode in ("abort", "wait"):
            self._finish_outstanding()
        self._pausing = True
        while True:
            with self._life:
                link = self._link
            try:
                self._pause_at(link)
                break
            except (WorkerLost, CallTimeout) as lost:
                self._recover(link, lost)
        self._paused_at = self._paused_at or time.monotonic()
        link.wake_waiters()

    def _pause_at(self, link: Link) -> None:
        call = link.post("pause")
        try:
            link.wait(call, self.timeouts.pause_s)
        except CallTimeout:
            self.abort()
            link.ask("pause", self.timeouts.pause_s)

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._check_alive()
        paused_at, self._paused_at, self._pausing = self._paused_at, None, False
        self._ask("resume", self.timeouts.pause_s)
        if paused_at is not None:
            with self._table:
                for pending in self._outstanding.values():
                    pending.sent_at += time.monotonic() - paused_at
        self._link.touch()

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """See `InferenceEngine.begin_update`."""
        self._check_alive()
        self._check_at_rest("new weights")
        deadline = time.monotonic() + self.timeouts.sync_s
        self._ask("begin_update", self.timeouts.sync_s, manifest=as_json(manifest), version=version)
        return WorkerUpdate(self, self._link, manifest, version, deadline)

    def weights_change(self, why: str) -> None:
        """For `WorkerUpdate`: the worker's weights are void from now on, and those kept are out of date."""
        self._void = why
        self._kept = self._adapter = None

    def weights_arrived(self, kept: KeptWeights, link: Link) -> None:
        """For `WorkerUpdate`: they are whole again; requests that waited for them go on."""
        self._kept = kept if self.keeps_weights else None
        self._lost_weights = 0 if self.keeps_weights else kept.version
        self._adapter = None
        self._void = ""
        level, asleep = self._asleep
        if level == 2:  # what it dropped is there again
            self._asleep = (1 if asleep else 0, asleep)
        self.version = kept.version
        with self._table:
            for pending in list(self._outstanding.values()):
                if pending.link is not link:
                    self._send_again(pending, link)

    def rebuild(self) -> None:
        """See `InferenceEngine.rebuild`; outstanding requests stay so, and begin anew."""
        self._check_alive()
        self._kept = self._adapter = None
        self._lost_weights = 0
        self._asleep, self._void = (0, set()), ""
        link = self._link
        if not self._outstanding and not link.lost:
            try:
                link.ask("rebuild", self.timeouts.start_s)
                self.version = 0
                return
            except WorkerLost as lost:
                how = str(lost)
            except (CallTimeout, SwiftError) as error:
                how = f"cannot be rebuilt ({error})"
        else:
            how = link.lost or "is rebuilt with requests outstanding"
        link.lose(how)
        self._recover(link, WorkerLost(link.lost))

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """See `InferenceEngine.load_adapter`."""
        self._check_alive()
        self._check_whole()
        self._check_at_rest("an adapter")
        if not self.capabilities.lora:
            raise self._unsupported("LoRA adapters")
        kept = KeptAdapter.of(adapter, version, self.staging)
        link = self._link
        try:
            ack = kept.send(link, name=self.name, sync_s=self.timeouts.sync_s)
        except (WorkerLost, CallTimeout) as lost:
            link.lose(str(lost))
            raise SyncFailed(
                f"weights: adapter version {version} for {self.name}: its process {lost}; {link.last_lines()}"
            ) from lost
        self._adapter = kept
        self.version = version
        return ack

    def drop_adapter(self) -> None:
        """See `InferenceEngine.drop_adapter`."""
        self._check_alive()
        self._check_at_rest("a change of adapter")
        self._ask("drop_adapter", self.timeouts.sync_s)
        self._adapter = None
        self.version = self._link.version

    def reset_caches(self) -> None:
        """See `InferenceEngine.reset_caches`."""
        self._check_alive()
        self._ask("reset_caches", self.timeouts.reply_s)

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """See `InferenceEngine.sleep`."""
        self._check_alive()
        if level:
            self._check_idle("sleep")
        report = SleepReport(**self._ask("sleep", self.timeouts.sleep_s, level=level))
        if level:
            self._asleep = (max(level, self._asleep[0]), set(ALL_TAGS))
        return report

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """See `InferenceEngine.wake`."""
        self._check_alive()
        fully: bool = self._ask("wake", self.timeouts.sleep_s, tags=list(tags))
        level, asleep = self._asleep
        asleep = asleep - set(tags)
        self._asleep = (level if asleep or level == 2 else 0, asleep)
        return fully

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """See `InferenceEngine.health`; a process that is gone and can be replaced is healthy again after that."""
        if (known := self._no_health()) is not None:
            return known
        link = self._link
        if self._capabilities is None and not link.lost:
            return Health(False, self.version, "starting")
        try:
            state = link.ask("health", HEALTH_S)
        except (WorkerLost, CallTimeout, SwiftError) as error:
            return Health(
                False, self.version, f"its process {error}" if not isinstance(error, SwiftError) else str(error)
            )
        return Health(**state)

    def info(self) -> dict[str, Any]:
        """See `InferenceEngine.info`; what the process says of itself as far as it answers."""
        facts: dict[str, Any] = {"worker": self.name, "pid": self.pid, "restarts": self.counters.restarts}
        if self._capabilities is None:
            facts["state"] = "starting"
        elif not self._closed and self._dead is None:
            try:
                facts |= self._link.ask("info", HEALTH_S)
            except (WorkerLost, CallTimeout, SwiftError) as error:
                facts["state"] = f"its process {error}"
        return {**facts, "version": self.version, "outstanding": len(self._outstanding)}

    def stacks(self) -> str:
        """Where its main thread is, in one line; the stacks of all its threads are in its log afterwards."""
        link = self._link
        return f"{self.name}: gone ({link.lost})" if link.lost else f"{self.name} was {link.phase}: {link.stacks()}"

    def close(self) -> None:
        """See `InferenceEngine.close`; a stream in another thread ends with `EngineDead`."""
        with self._replacing:
            first, self._closed = not self._closed, True
            link = self._link
        if first:
            link.wake_waiters()
        link.end(kindly_s=self.timeouts.close_s)
        if self.broadcaster is not None:
            self.broadcaster.close()
        self._kept = self._adapter = None

    # --- inside -----------------------------------------------------------------------------------------------

    def _ask(self, name: str, timeout_s: float, **fields: Any) -> Any:
        """A call that may be repeated on another process."""
        self.wait_ready()
        while True:
            with self._life:
                link = self._link
            try:
                return link.ask(name, timeout_s, **fields)
            except (WorkerLost, CallTimeout) as lost:
                self._recover(link, lost)

    def _die(self, problem: str) -> EngineDead:
        """No process is left of this engine, and none will come."""
        error = EngineDead(f"{self.name}: {problem}")
        self._dead = error
        self._link.end()
        return error

    def _recover(self, link: Link, lost: WorkerLost | CallTimeout) -> None:
        """Replace a process, unless another thread has done so.

        Raises:
            EngineDead: there were too many already, or the engine was closed.
        """
        link.lose(str(lost))
        with self._life:
            self._check_alive()
            if self._link is not link:
                return
            how = str(lost)
            if self._capabilities is None:
                raise self._die(f"its process {how} while it started; {link.last_lines()}")
            while True:
                self._count()
                try:
                    self._bury(how)
                    self._bring_up_to_date(self._link)
                    return
                except (WorkerLost, CallTimeout, SyncFailed) as error:
                    self._check_alive()
                    how = str(error)
                    self._link.lose(how)
                except EngineDead:
                    raise
                except SwiftError as error:  # it would fail again
                    raise self._die(f"its process {how}, and cannot be replaced ({error.problems[0]})") from error

    def _bury(self, how: str) -> None:
        """End what is left of a process and launch another, if that is still allowed."""
        dead = self._link
        dead.end()
        now = time.monotonic()
        while self._restarted and now - self._restarted[0] > RESTART_WINDOW_S:
            self._restarted.popleft()
        if self._lost_weights:
            raise self._die(f"its process {how}; its weights of version {self._lost_weights} were not kept")
        if len(self._restarted) >= self.restarts:
            raise self._die(
                f"its process {how}; --engine_restarts {self.restarts} within an hour are used up; {dead.last_lines()}"
            )
        self._restarted.append(now)
        self.counters.restarts += 1
        self._before = replace(self.counters)
        with self._replacing:
            self._check_alive()
            self._link = Link(self.spec, name=self.name, log_file=self.log_file, timeouts=self.timeouts)

    def _bring_up_to_date(self, link: Link) -> None:
        """Weights, sleep, pause and requests of the process before."""
        link.wait(link.started, self.timeouts.start_s)
        sync_s = self.timeouts.sync_s
        if self._kept is not None:
            self._kept.send(link, name=self.name, sync_s=sync_s)
        if self._adapter is not None:
            self._adapter.send(link, name=self.name, sync_s=sync_s)
        if not self._void:
            self.version = link.version
        self._fall_asleep_again(link)
        if self._pausing:
            link.ask("pause", self.timeouts.pause_s)
        with self._table:
            for pending in list(self._outstanding.values()) if not self._void else []:
                self._send_again(pending, link)

    def _fall_asleep_again(self, link: Link) -> None:
        level, asleep = self._asleep
        if level and (asleep or level == 2):
            link.ask("sleep", self.timeouts.sleep_s, level=level)
            awake = [tag for tag in ALL_TAGS if tag not in asleep]
            if awake:
                link.ask("wake", self.timeouts.sleep_s, tags=awake)
