"""One engine in another process, in a Ray actor or behind HTTP: calls to it, and what a replacement gets.

An engine that is lost is replaced or found again, as its kind of client does it; then it gets the present weights and
adapter. Its requests are lost with it: `EnginePool` asks again. A failed weight update is never repeated here: the
weights are invalid until another update is complete, or `rebuild`. No wait is unbounded; see `Timeouts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from swift.errors import EngineAsleep, EngineDead, NumericError, RequestRefused, SwiftError, SyncFailed, first_line
from swift.rollout.engines.base import (
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    Health,
    SleepLevel,
    SleepReport,
    Tag,
)
from swift.rollout.engines.completion_stream import Failure
from swift.rollout.engines.events import Event, Lost, Returned, Timeouts
from swift.rollout.engines.process import on_thread
from swift.rollout.engines.running import logprob_problem
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.broadcast import Announcement, BroadcastSender
from swift.rollout.weights.sending import Kept
from swift.types import Completion, Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_S = 1.0
"""Pause after an engine reported a full queue."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A request on its way. instance: of the engine that it was sent to."""

    completion: asyncio.Future[Completion]
    instance: object


def tokens_of(request: Request) -> int:
    """Of its prompt and its longest completion."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens


def _checked(engine: str, completion: Completion) -> Completion | NumericError:
    """What an engine sent, or why it cannot be."""
    problem = logprob_problem(completion.logprobs)
    if len(completion.logprobs) != len(completion.token_ids):
        problem = f"{len(completion.logprobs)} log-probs for {len(completion.token_ids)} tokens"
    if not problem:
        return completion
    return NumericError(
        f"{engine}: request {completion.request_id}: {problem}: the model's output is not finite; look at its weights"
    )


class EngineClient(ABC):
    """See the module's docstring; connects when it is first needed.

    Args:
        name: of the engine, for messages.
        timeouts: see `Timeouts`.
        weight_transport: how weights travel; None chooses by devices.
        keeps_weights: keep the last update for a restart; False where there is none.

    Attributes:
        devices: of the engine, as this process numbers them.
        restartable: whether an engine that does not answer is replaced; otherwise it is dead.
        stored: the way in which an update can be sent again to an engine that was lost.
        instance: another object once the engine was replaced, or what it had in flight was given up.
        load: tokens of its outstanding requests: prompts and longest completions.
        instance_counters: counters of the present instance.
        progress_at, busy_until: monotonic times of the last sign of progress, and until which its queue counts as full.
        version: of the policy that it samples with.
        dead: why it will not come back, or None.
        invalid: why its weights belong to no version; "" when they do.
        asleep: what of it sleeps; "" when nothing does.
        outdated: it was replaced, and nobody has kept the weights of the one before: the next update makes it usable.
        alone: no other engine samples for this run, so that a copy of the weights is worth its cost wherever they lie.
        broadcaster: the trainer's end of broadcasts to it, which other engines share.
        rank_offset: receivers of the engines before it in the pool.
        replacing: it is lost, and about to be there again.
        ended: `end` was called.
    """

    devices: tuple[str, ...]
    restartable: bool
    stored: str
    instance: object

    def __init__(
        self, name: str, timeouts: Timeouts, *, weight_transport: str | None = None, keeps_weights: bool = True
    ) -> None:
        self.name, self.timeouts = name, timeouts
        self.weight_transport, self.keeps_weights = weight_transport, keeps_weights
        self.load = 0
        self.instance_counters = EngineCounters()
        self.progress_at, self.busy_until = time.monotonic(), 0.0
        self.version = 0
        self.dead: SwiftError | None = None
        self.invalid = self.asleep = ""
        self.replacing = self.ended = self.outdated = False
        self.alone = True
        self.rank_offset = 0
        self._has_new_weights = False  # not those that it was started with
        self.broadcaster: BroadcastSender | None = None
        self.sent_by = ""  # way of the last weights
        self._replacing = threading.RLock()
        self._before = EngineCounters()  # of instances that have ended
        self._capabilities: Capabilities | None = None
        self._kept: Kept | None = None
        self._adapter: tuple[int, AdapterWeights] | None = None
        self._paused = False
        self._closed = False
        self._asked: dict[str, _Pending] = {}
        self._new: list[Request] = []
        self._abandoned: list[str] = []  # requests that nobody waits for any more
        self._loop: asyncio.AbstractEventLoop | None = None  # whose callers wait

    @property
    def capabilities(self) -> Capabilities:
        with self._replacing:
            if self._capabilities is None:
                self.check_alive()
                try:
                    self._capabilities = self.connect()
                except SwiftError as error:
                    if not self._closed and (self.restartable or isinstance(error, EngineDead)):
                        self.dead = error  # a server that is held by another run may be free later
                    raise
            return self._capabilities

    @property
    def counters(self) -> EngineCounters:
        """Sums over the instances of the engine."""
        return self._before + self.instance_counters

    # --- what each kind of client has of its own ----------------------------------------------------------------

    @abstractmethod
    def connect(self) -> Capabilities:
        """Wait until the engine is there."""

    @abstractmethod
    def post(self, instance: object, requests: Sequence[Request]) -> None:
        """Send requests to this instance; what comes of them is delivered. Raises Lost if it is over."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; never raises."""

    @abstractmethod
    def call(self, name: str, timeout_s: float, **fields: Any) -> Any:
        """Any other call. Raises Lost, or the SwiftError that it ended with."""

    @abstractmethod
    def abort_update(self, update: int) -> None:
        """Give an update up; never raises."""

    @abstractmethod
    def send_bucket(self, update: int, way: str, payload: Any, timeout_s: float) -> Callable[[], Any]:
        """Start to send a bucket; the result waits for its arrival and raises as `call`."""

    @abstractmethod
    def choose(self, device: torch.device) -> str:
        """The best way for tensors that lie there."""

    @abstractmethod
    def receivers(self) -> int:
        """How many processes there take part in a broadcast, as of now."""

    def receiving_processes(self) -> object:
        """Another value when these are other processes than before."""
        return self.instance

    @abstractmethod
    def payload(self, way: str, bucket: Bucket, version: int) -> Any:
        """What travels of a bucket that is sent this way; made once for several engines."""

    @abstractmethod
    def address(self) -> str:
        """This host as the engine reaches it."""

    def update_ended(self, *, complete: bool) -> None:  # noqa: B027 - most have nothing to end
        """After the commit of an update, or its abort."""

    @abstractmethod
    def replace(self, how: str) -> EngineCounters | None:
        """After a loss: find or make the engine again; `instance` is another one then.

        Returns:
            None if it is the former one, with its state; else counters beyond `instance_counters`, restarts included.

        Raises:
            Lost: not yet; call again.
            EngineDead: it is not coming back.
        """

    def progress(self) -> None:  # noqa: B027 - not all need to know
        """A completion arrived, or a call succeeded."""

    @abstractmethod
    def ask_health(self) -> Health:
        """Asked now, within seconds."""

    def stacks(self) -> str:
        """Where the engine's thread is, in one line, as far as it answers."""
        return ""

    @abstractmethod
    def end(self) -> None:
        """End the engine, or leave it where it is not ours; called once, never raises."""

    # --- sampling, on the thread of the loop --------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it may be asked for completions now."""
        return self.dead is None and not (self.replacing or self.outdated) and self.busy_until <= time.monotonic()

    @property
    def outstanding(self) -> list[str]:
        """Ids of its requests."""
        return list(self._asked)

    async def generate(self, request: Request) -> Completion:
        """One sample. Raises Lost: ask another engine, or this one later; else what the engine raised."""
        loop = self._loop = asyncio.get_running_loop()
        asked = self._asked[request.request_id] = _Pending(loop.create_future(), self.instance)
        self.load += tokens_of(request)
        if not self._new:
            loop.call_soon(self._post_new)
        self._new.append(request)
        try:
            return await asked.completion
        except asyncio.CancelledError:
            if asked.completion.cancelled():
                asked.completion = loop.create_future()  # done when the engine has removed the request
                if not self._abandoned:
                    loop.call_soon(self._abort_abandoned)
                self._abandoned.append(request.request_id)
                if (await asyncio.wait([asked.completion], timeout=self.timeouts.pause_s))[0]:
                    asked.completion.exception()  # marks it as retrieved
            raise
        finally:
            del self._asked[request.request_id]
            self.load -= tokens_of(request)

    def _post_new(self) -> None:
        """What was asked for in one turn of the loop goes out together."""
        requests, self._new = self._new, []
        instance, self.progress_at = self.instance, time.monotonic()
        waiting = [request for request in requests if request.request_id in self._asked]
        to_send = [request for request in waiting if self._asked[request.request_id].instance is instance]
        names = [request.request_id for request in to_send]
        replaced = {request.request_id for request in waiting} - set(names)
        self._end(list(replaced), Lost("was replaced"))
        try:
            self.post(instance, to_send)
        except Lost as lost:
            self._take(instance, lost)
        except Exception as error:
            self._end(names, error)

    def _abort_abandoned(self) -> None:
        names, self._abandoned = self._abandoned, []
        self.abort_those(names)

    def abort_those(self, request_ids: Sequence[str]) -> None:
        """End those of these requests that it has; from any thread."""
        if names := [name for name in request_ids if name in self._asked]:
            self.abort(names)

    def deliver(self, instance: object, *events: Event) -> None:
        """What comes of requests of this instance, of all with None; from any thread."""
        if self._loop is not None and events:
            with contextlib.suppress(RuntimeError):  # it is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._take, instance, *events)

    def _take(self, instance: object, *events: Event) -> None:
        """Resolve the futures of each event: all outstanding ones if the engine is lost, else those it names.

        Late events of a former instance are ignored.
        """
        for event in events:
            if instance not in (None, self.instance) and not isinstance(event, Lost):
                continue
            names, outcome = self.outstanding, self._outcome(event)
            is_lost = isinstance(outcome, Lost) and not isinstance(event, Returned)
            if isinstance(event, Completion):
                names = [event.request_id]
            elif isinstance(event, Failure | Returned) and not is_lost:
                names = event.request_ids
            known = [name for name in names if name in self._asked]
            self._end([name for name in known if instance in (None, self._asked[name].instance)], outcome)
            if is_lost:
                self._recover_in_background(instance, str(outcome))

    def _end(self, request_ids: Sequence[str], outcome: Completion | Exception) -> None:
        for name in request_ids:
            asked = self._asked.get(name)
            if asked is None or asked.completion.done():
                continue
            if isinstance(outcome, Exception):
                asked.completion.set_exception(outcome)
            else:
                asked.completion.set_result(outcome)

    def _outcome(self, event: Event) -> Completion | Exception:
        """What an event means for the callers."""
        if isinstance(event, Completion):
            self.progress()
            return _checked(self.name, event)
        if isinstance(event, Lost):
            return event
        if isinstance(event, Returned):
            self.busy_until = time.monotonic() + BUSY_S if event.busy else self.busy_until
            return Lost("it has not taken the request")
        error: SwiftError = event.error
        if isinstance(error, EngineDead):
            return Lost(f"failed ({self._without_name(error)})")
        if isinstance(error, SyncFailed):
            self.invalid = error.problems[0]
        elif not isinstance(error, EngineAsleep | NumericError) and len(event.request_ids) == 1:
            return RequestRefused(event.request_ids[0], *error.problems)
        return error

    def _without_name(self, error: SwiftError) -> str:
        return error.problems[0].removeprefix(f"{self.name}: ")

    def _recover_in_background(self, instance: object, how: str) -> None:
        """Replace or find the engine on a thread; until then it is not usable."""
        if self.instance is not instance or self.dead is not None or self.replacing or self._closed:
            return
        self.replacing = True

        def work() -> None:
            try:
                self.recover(instance, how)
            except Exception as error:  # whoever asks next is told by `dead` or `invalid`
                logger.warning("%s: %s", self.name, first_line(error).removeprefix(f"{self.name}: "))
            finally:
                self.replacing = False

        on_thread(work, f"replaces {self.name}")

    # --- an engine that was lost ------------------------------------------------------------------------------

    def safe_call(self, name: str, timeout_s: float, **fields: Any) -> Any:
        return self.with_recovery(lambda: self.call(name, timeout_s, **fields))

    def with_recovery(self, work: Callable[[], T]) -> T:
        """Work that is repeated on the engine that replaces this one. Raises EngineDead: it is not coming back."""
        while True:
            with self._replacing:  # one that is being restored is not disturbed
                self.check_alive()
                _ = self.capabilities  # connected
                instance = self.instance
            try:
                done = work()
            except Lost as lost:
                self.recover(instance, str(lost))
            else:
                self.progress()
                return done

    def recover(self, instance: object, how: str) -> None:
        """Have the engine again, with all it had, unless another thread has recovered it. Raises EngineDead."""
        with self._replacing:
            self.check_alive()
            while self.instance is instance:
                self.replacing = True
                self.deliver(instance, Lost(how))
                before = self.counters
                try:
                    more = self.replace(how)
                    instance = self.instance
                    if more is not None:
                        logger.warning("%s: lost (%s); it was replaced", self.name, how)
                        self._before = before + more
                        self._begin_instance()
                except (Lost, SyncFailed) as again:
                    self.check_alive()
                    instance, how = self.instance, str(again)
                except EngineDead as error:
                    self._check_open()
                    self.dead = self.dead or error
                    raise
                except BaseException as error:  # it is there, without the weights of the one before
                    self.invalid = self.invalid or f"version {self.version} was not given back ({first_line(error)})"
                    raise
                else:
                    return
                finally:
                    self.replacing = False

    def _begin_instance(self) -> None:
        """Another engine is there, awake: it gets weights and adapter of the one before."""
        self.instance_counters = EngineCounters()
        self._paused, self.asleep = False, ""
        if self.invalid:
            return
        self.outdated = self._has_new_weights and self._kept is None and self._adapter is None
        if self.outdated:
            logger.warning(
                "%s: samples again with the next weight sync; no copy of version %d", self.name, self.version
            )
        if self._kept is not None:
            self.asleep = self._kept.send(self)
        if self._adapter is not None:
            version, adapter = self._adapter
            self._send_adapter(adapter, version)

    # --- in flight --------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop between two tokens, keeping what runs. Raises as `call`."""
        self.call("pause", self.timeouts.pause_s)
        self._paused = True

    def resume(self) -> None:
        """Go on after a pause; an engine that was replaced meanwhile is not paused."""
        self.with_recovery(lambda: self._paused and self.call("resume", self.timeouts.pause_s))
        self._paused, self.progress_at = False, time.monotonic()

    # --- weights ----------------------------------------------------------------------------------------------

    def way_of(self, bucket: Bucket) -> str:
        """How the buckets of an update travel that begins with this one."""
        if isinstance(bucket, Announcement):
            return "broadcast"
        return self.weight_transport or self.choose(bucket.tensors[0][1].device)

    def weights_change(self, why: str) -> None:
        """For `send_update`: the weights there are invalid from now on, and those kept are out of date."""
        self.invalid = why
        self._kept = self._adapter = None

    def weights_arrived(self, version: int, kept: Kept | None, asleep: str) -> None:
        """For `send_update`; kept: what a restart needs of them, if anybody has kept it."""
        self._kept, self._adapter = kept, None
        self.invalid, self.asleep = "", asleep
        self._has_new_weights, self.outdated = True, False
        self.version = version

    def rebuild(self) -> None:
        self._kept = self._adapter = None
        self._has_new_weights = self.outdated = False
        self.version, self.invalid, self.asleep = 0, "", ""
        self._paused = True  # nothing moves until it is there
        self.safe_call("rebuild", self.timeouts.start_s)
        self._paused = False
        self.deliver(None, Returned(self.outstanding))

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        self.check_alive()
        instance = self.instance
        try:
            ack = self._send_adapter(adapter, version)
        except Lost as lost:
            self.recover(instance, str(lost))
            raise SyncFailed(f"weights: adapter version {version} for {self.name}: its engine {lost}") from lost
        self.version = version
        if self.keeps_weights:
            copies = {name: tensor.detach().clone() for name, tensor in adapter.tensors.items()}
            self._adapter = (version, replace(adapter, tensors=copies))
        return ack

    def _send_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        said = self.call("load_adapter", self.timeouts.sync_s, adapter=adapter, version=version)
        ack: Ack = said["result"]
        if (ack.version, ack.tensors, ack.digest) != (version, len(adapter.tensors), adapter.digest()):
            raise SyncFailed(
                f"weights: adapter version {version} for {self.name}: it confirms version {ack.version}, digest "
                f"{ack.digest}; sent was digest {adapter.digest()}"
            )
        return ack

    def drop_adapter(self) -> None:
        self.version = self.safe_call("drop_adapter", self.timeouts.sync_s)["version"]
        self._adapter = None

    def reset_caches(self) -> None:
        self.safe_call("reset_caches", self.timeouts.sync_s)

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        said = self.safe_call("sleep", self.timeouts.sleep_s, level=level)
        self.asleep = said["asleep"]
        report: SleepReport = said["result"]
        return report

    def wake(self, tags: Sequence[Tag]) -> bool:
        said = self.safe_call("wake", self.timeouts.sleep_s, tags=list(tags))
        self.asleep = said["asleep"]
        return bool(said["result"])

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Asked now; a lost engine that can be replaced is healthy again after that."""
        if self._closed or self.dead is not None:
            return Health(False, self.dead.problems[0] if self.dead is not None else "closed")
        if self.invalid:
            return Health(False, f"its weights are invalid: {self.invalid}")
        return self.ask_health()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        first, self.ended = not self.ended, True
        if first:
            self.end()
        self._kept = self._adapter = None
        self.deliver(None, Lost("it is closed"))

    def release(self) -> None:  # noqa: B027 - most share nothing
        """Give up what it shares with other engines; called once all of them are closed. Idempotent."""

    def check_alive(self) -> None:
        """Raises EngineDead when it is closed, else what it died of."""
        self._check_open()
        if self.dead is not None:
            raise self.dead

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self.name}: it is closed; make a new one")
