"""Client of one engine in another process, in a Ray actor or behind HTTP.

A lost engine is replaced or reconnected by the subclass, and then gets the present weights and adapter. Its requests
raise Lost, and `EnginePool` samples them again. A failed weight update is never repeated here: the weights are invalid
until another update is complete, or `rebuild`. Every wait has a limit; see `Timeouts`.
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

from swift.data.image_store import images_sent
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
from swift.types import Completion, Request, ShownImage

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_S = 1.0
"""Pause after an engine has reported a full queue, in seconds."""


@dataclass(slots=True, eq=False)
class _Pending:
    """An outstanding request. instance: the instance of the engine that it was sent to."""

    completion: asyncio.Future[Completion]
    instance: object


def with_images(requests: Sequence[Request]) -> list[Request]:
    """Requests with the images that their prompts name; those of equal prompts share them.

    A request that brings its images, as to a server, is passed on.
    """
    shown: dict[tuple[int, ...], tuple[ShownImage, ...]] = {}
    sent = []
    for request in requests:
        if not request.images and any(token < 0 for token in request.prompt_ids):
            prompt = tuple(request.prompt_ids)
            if prompt not in shown:
                shown[prompt] = images_sent(prompt)
            request = replace(request, images=shown[prompt])
        sent.append(request)
    return sent


def tokens_of(request: Request) -> int:
    """Number of tokens of the prompt and of the longest completion."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens


def _checked(engine: str, completion: Completion) -> Completion | NumericError:
    """The completion, or an error if its log-probs are invalid."""
    problem = logprob_problem(completion.logprobs)
    if len(completion.logprobs) != len(completion.token_ids):
        problem = f"{len(completion.logprobs)} log-probs for {len(completion.token_ids)} tokens"
    if not problem:
        return completion
    return NumericError(
        f"{engine}: request {completion.request_id}: {problem}: the model's output is not finite; look at its weights"
    )


class EngineClient(ABC):
    """See the module's docstring; connects at the first use.

    Args:
        name: name of the engine, for messages.
        timeouts: see `Timeouts`.
        weight_transport: transport of weights; None chooses by devices.
        keeps_weights: whether to keep the last update for a restart.

    Attributes:
        devices: devices of the engine, with the indices of this process.
        restartable: whether an engine that does not answer is replaced; otherwise it is dead.
        stored: the transport whose updates can be sent again to a replacement.
        instance: another object after the engine was replaced, or after its outstanding requests were given up.
        load: number of tokens of its outstanding requests: prompts and longest completions.
        instance_counters: counters of the present instance.
        progress_at, busy_until: monotonic times of the last sign of progress, and until which its queue counts as full.
        version: version of the policy that it samples with.
        dead: the error that made it unusable for good, or None.
        invalid: reason why its weights match no version, or "".
        asleep: the part of its memory that is asleep, or "".
        outdated: it was replaced, and no copy of the last weights exists: the next update makes it usable.
        alone: no other engine samples for this run, so that broadcast weights are copied for restarts too.
        broadcaster: the trainer's sender of broadcasts, shared with other engines.
        rank_offset: number of receivers of the engines before it in the pool.
        replacing: it is lost, and its replacement is in progress.
        ended: whether `end` was called.
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
        self._has_new_weights = False  # other weights than those of its start
        self.broadcaster: BroadcastSender | None = None
        self.sent_by = ""  # transport of the last weights
        self._replacing = threading.RLock()
        self._before = EngineCounters()  # counters of instances that have ended
        self._capabilities: Capabilities | None = None
        self._kept: Kept | None = None
        self._adapter: tuple[int, AdapterWeights] | None = None
        self._paused = False
        self._closed = False
        self._pending: dict[str, _Pending] = {}
        self._new: list[Request] = []
        self._abandoned: list[str] = []  # requests whose caller was cancelled
        self._loop: asyncio.AbstractEventLoop | None = None  # loop of the callers

    @property
    def capabilities(self) -> Capabilities:
        with self._replacing:
            if self._capabilities is None:
                self.check_alive()
                try:
                    self._capabilities = self.connect()
                except SwiftError as error:
                    if not self._closed and (self.restartable or isinstance(error, EngineDead)):
                        self.dead = error  # a server in use by another run may be free later
                    raise
            return self._capabilities

    @property
    def counters(self) -> EngineCounters:
        """Sums over the instances of the engine."""
        return self._before + self.instance_counters

    # --- defined by each kind of client -----------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> Capabilities:
        """Wait until the engine is ready; returns its capabilities."""

    @abstractmethod
    def post(self, instance: object, requests: Sequence[Request]) -> None:
        """Send requests to this instance; their events go to `deliver`. Raises Lost if it has ended."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; never raises."""

    @abstractmethod
    def call(self, name: str, timeout_s: float, **fields: Any) -> Any:
        """Any other call. Raises Lost, or the SwiftError that the engine raised."""

    @abstractmethod
    def abort_update(self, update: int) -> None:
        """Abort an update; never raises."""

    @abstractmethod
    def send_bucket(self, update: int, way: str, payload: Any, timeout_s: float) -> Callable[[], Any]:
        """Start to send a bucket; returns a function that waits for its arrival and raises as `call`."""

    @abstractmethod
    def default_transport(self, device: torch.device) -> str:
        """The best transport for tensors on this device."""

    @abstractmethod
    def receivers(self) -> int:
        """Number of processes of the engine that take part in a broadcast."""

    def receiving_processes(self) -> object:
        """A value that changes when the receiving processes change."""
        return self.instance

    @abstractmethod
    def payload(self, way: str, bucket: Bucket, version: int) -> Any:
        """The data of a bucket for this transport; made once for several engines."""

    @abstractmethod
    def address(self) -> str:
        """Address of this host for the engine."""

    def update_ended(self, *, complete: bool) -> None:  # noqa: B027 - most have nothing to end
        """After the commit of an update, or its abort."""

    @abstractmethod
    def replace(self, how: str) -> EngineCounters | None:
        """After a loss: reconnect or start the engine, and set another `instance`.

        Returns:
            None if the engine has kept its state; else counters beyond `instance_counters`, restarts included.

        Raises:
            Lost: not yet possible; call again.
            EngineDead: the engine cannot be replaced.
        """

    def progress(self) -> None:  # noqa: B027 - optional
        """Called after a completion has arrived, or a call has succeeded."""

    @abstractmethod
    def ask_health(self) -> Health:
        """The present health of the engine; returns within seconds."""

    def stacks(self) -> str:
        """Place of the engine's thread in the code, in one line; "" if unknown."""
        return ""

    @abstractmethod
    def end(self) -> None:
        """End the engine, or disconnect if other processes own it; called once, never raises."""

    # --- sampling, on the thread of the loop --------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether requests may be sent to it now."""
        return self.dead is None and not (self.replacing or self.outdated) and self.busy_until <= time.monotonic()

    @property
    def outstanding(self) -> list[str]:
        """Ids of its requests."""
        return list(self._pending)

    async def generate(self, request: Request) -> Completion:
        """One sample. Raises Lost if the request must be sent again, else the error of the engine."""
        loop = self._loop = asyncio.get_running_loop()
        asked = self._pending[request.request_id] = _Pending(loop.create_future(), self.instance)
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
            del self._pending[request.request_id]
            self.load -= tokens_of(request)

    def _post_new(self) -> None:
        """Send all requests of one iteration of the loop together."""
        requests, self._new = self._new, []
        instance, self.progress_at = self.instance, time.monotonic()
        waiting = [request for request in requests if request.request_id in self._pending]
        to_send = [request for request in waiting if self._pending[request.request_id].instance is instance]
        names = [request.request_id for request in to_send]
        replaced = {request.request_id for request in waiting} - set(names)
        self._end(list(replaced), Lost("was replaced"))
        try:
            self.post(instance, with_images(to_send))
        except Lost as lost:
            self._take(instance, lost)
        except Exception as error:
            self._end(names, error)

    def _abort_abandoned(self) -> None:
        names, self._abandoned = self._abandoned, []
        self.abort_those(names)

    def abort_those(self, request_ids: Sequence[str]) -> None:
        """Abort those of these requests that are outstanding here; from any thread."""
        if names := [name for name in request_ids if name in self._pending]:
            self.abort(names)

    def deliver(self, instance: object, *events: Event) -> None:
        """Handle events of requests of this instance, or of any with None; from any thread."""
        if self._loop is not None and events:
            with contextlib.suppress(RuntimeError):  # it is closed, and has no callers
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
            known = [name for name in names if name in self._pending]
            self._end([name for name in known if instance in (None, self._pending[name].instance)], outcome)
            if is_lost:
                self._recover_in_background(instance, str(outcome))

    def _end(self, request_ids: Sequence[str], outcome: Completion | Exception) -> None:
        for name in request_ids:
            asked = self._pending.get(name)
            if asked is None or asked.completion.done():
                continue
            if isinstance(outcome, Exception):
                asked.completion.set_exception(outcome)
            else:
                asked.completion.set_result(outcome)

    def _outcome(self, event: Event) -> Completion | Exception:
        """The completion or exception that the callers get for an event."""
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
        """Replace or reconnect the engine on a thread; until then it is not usable."""
        if self.instance is not instance or self.dead is not None or self.replacing or self._closed:
            return
        self.replacing = True

        def work() -> None:
            try:
                self.recover(instance, how)
            except Exception as error:  # the next call raises, because of `dead` or `invalid`
                logger.warning("%s: %s", self.name, first_line(error).removeprefix(f"{self.name}: "))
            finally:
                self.replacing = False

        on_thread(work, f"replaces {self.name}")

    # --- an engine that was lost ------------------------------------------------------------------------------

    def safe_call(self, name: str, timeout_s: float, **fields: Any) -> Any:
        return self.with_recovery(lambda: self.call(name, timeout_s, **fields))

    def with_recovery(self, work: Callable[[], T]) -> T:
        """The result of `work`, repeated after a loss. Raises EngineDead: the engine cannot be replaced."""
        while True:
            with self._replacing:  # wait for a replacement in progress
                self.check_alive()
                _ = self.capabilities  # connects
                instance = self.instance
            try:
                done = work()
            except Lost as lost:
                self.recover(instance, str(lost))
            else:
                self.progress()
                return done

    def recover(self, instance: object, how: str) -> None:
        """Replace the engine and restore its state, unless another thread has done so. Raises EngineDead."""
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
                except BaseException as error:  # it was replaced, but its weights were not restored
                    self.invalid = self.invalid or f"version {self.version} was not given back ({first_line(error)})"
                    raise
                else:
                    return
                finally:
                    self.replacing = False

    def _begin_instance(self) -> None:
        """Send the kept weights and adapter to a new instance, which is awake."""
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
        """Stop between two tokens; running requests are kept. Raises as `call`."""
        self.call("pause", self.timeouts.pause_s)
        self._paused = True

    def resume(self) -> None:
        """Continue after a pause; an engine replaced since then is not paused."""
        self.with_recovery(lambda: self._paused and self.call("resume", self.timeouts.pause_s))
        self._paused, self.progress_at = False, time.monotonic()

    # --- weights ----------------------------------------------------------------------------------------------

    def way_of(self, bucket: Bucket) -> str:
        """Transport of an update whose first bucket is this one."""
        if isinstance(bucket, Announcement):
            return "broadcast"
        return self.weight_transport or self.default_transport(bucket.tensors[0][1].device)

    def weights_change(self, why: str) -> None:
        """For `send_update`: mark the weights of the engine as invalid, and drop the kept copy."""
        self.invalid = why
        self._kept = self._adapter = None

    def weights_arrived(self, version: int, kept: Kept | None, asleep: str) -> None:
        """For `send_update`, after the commit. kept: a copy for restarts, if there is one."""
        self._kept, self._adapter = kept, None
        self.invalid, self.asleep = "", asleep
        self._has_new_weights, self.outdated = True, False
        self.version = version

    def rebuild(self) -> None:
        self._kept = self._adapter = None
        self._has_new_weights = self.outdated = False
        self.version, self.invalid, self.asleep = 0, "", ""
        self._paused = True  # no progress until it is rebuilt
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
        reply = self.call("load_adapter", self.timeouts.sync_s, adapter=adapter, version=version)
        ack: Ack = reply["result"]
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
        reply = self.safe_call("sleep", self.timeouts.sleep_s, level=level)
        self.asleep = reply["asleep"]
        report: SleepReport = reply["result"]
        return report

    def wake(self, tags: Sequence[Tag]) -> bool:
        reply = self.safe_call("wake", self.timeouts.sleep_s, tags=list(tags))
        self.asleep = reply["asleep"]
        return bool(reply["result"])

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """The present health; a lost engine is not alive until it is replaced."""
        if self._closed or self.dead is not None:
            return Health(False, self.dead.problems[0] if self.dead is not None else "closed")
        if self.invalid:
            return Health(False, f"its weights are invalid: {self.invalid}")
        return self.ask_health()

    def close(self) -> None:
        """End the engine; outstanding requests raise Lost. Idempotent."""
        self._closed = True
        first, self.ended = not self.ended, True
        if first:
            self.end()
        self._kept = self._adapter = None
        self.deliver(None, Lost("it is closed"))

    def free_shared(self) -> None:  # noqa: B027 - most have no shared resources
        """Release resources shared with other engines; called after all engines are closed. Idempotent."""

    def check_alive(self) -> None:
        """Raises EngineDead if it is closed, or the error in `dead`."""
        self._check_open()
        if self.dead is not None:
            raise self.dead

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self.name}: it is closed; make a new one")
