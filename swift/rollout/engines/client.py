"""One engine that lives elsewhere, in a Ray actor or behind HTTP: calls to it, and what it has to be given again.

An engine that is lost is replaced or found again, as its kind of client does it; then it gets the present weights and
adapter. `EnginePool` sends it requests, and sends them again after a loss. A failed weight update is never repeated
here: the weights are void until another update is complete, or `rebuild`. No wait is unbounded; see `Timeouts`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from swift.errors import EngineDead, SwiftError, SyncFailed, first_line
from swift.rollout.engines.base import (
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    Health,
    SleepLevel,
    SleepReport,
    Tag,
    TensorInfo,
    WeightUpdate,
)
from swift.rollout.engines.events import Deliver, Lost, Timeouts
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.broadcast import BroadcastSender
from swift.rollout.weights.sending import ClientUpdate, Kept
from swift.types import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        life: another object once the engine was replaced, or what it had in flight was given up.
        deliver: takes what comes of requests.
        lived: what the present life says it has done.
        progress_at, busy_until: monotonic times of the last sign of progress, and until which its queue counts as full.
        version: of the policy that it samples with.
        dead: why it will not come back, or None.
        void: why its weights belong to no version; "" when they do.
        asleep: what of it sleeps; "" when nothing does.
        replacing: it is lost, and about to be there again.
        ended: nothing is expected of it any more.
    """

    devices: tuple[str, ...]
    restartable: bool
    stored: str
    life: object

    def __init__(
        self, name: str, timeouts: Timeouts, *, weight_transport: str | None = None, keeps_weights: bool = True
    ) -> None:
        self.name, self.timeouts = name, timeouts
        self.weight_transport, self.keeps_weights = weight_transport, keeps_weights
        self.deliver: Deliver = lambda life, event: None
        self.lived = EngineCounters()
        self.progress_at, self.busy_until = time.monotonic(), 0.0
        self.version = 0
        self.dead: SwiftError | None = None
        self.void = self.asleep = ""
        self.replacing = self.ended = False
        self.broadcaster: BroadcastSender | None = None
        self.sent_by = ""  # way of the last weights
        self._replacing = threading.RLock()
        self._before = EngineCounters()  # of the lives that are over
        self._capabilities: Capabilities | None = None
        self._kept: Kept | None = None
        self._adapter: tuple[int, AdapterWeights] | None = None
        self._paused = False
        self._closed = False

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
        """Sums over the lives of the engine."""
        return self._before + self.lived

    # --- what each kind of client has of its own ----------------------------------------------------------------

    @abstractmethod
    def connect(self) -> Capabilities:
        """Wait until the engine is there."""

    @abstractmethod
    def post(self, life: object, requests: Sequence[Request]) -> None:
        """Send requests to this life; what comes of them is delivered. Raises Lost if it is over."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; never raises."""

    @abstractmethod
    def call(self, name: str, timeout_s: float, **fields: Any) -> Any:
        """Any other call. Raises Lost, or the SwiftError that it ended with."""

    @abstractmethod
    def start_call(self, name: str, timeout_s: float, **fields: Any) -> Callable[[], Any]:
        """Begin a call; the result waits for it and raises as `call`."""

    @abstractmethod
    def abort_update(self, update: int) -> None:
        """Give an update up; never raises."""

    @abstractmethod
    def send_bucket(self, update: int, way: str, payload: Any, timeout_s: float) -> Callable[[], Any]:
        """Start to send a bucket; the result waits for its arrival and raises as `call`."""

    @abstractmethod
    def choose(self, bucket: Bucket) -> str:
        """The best way for tensors where these lie."""

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
        """After a loss: find or make the engine again; `life` is another one then.

        Returns:
            None if it is the one of before, with its state; else what it did beyond `lived`, with its restarts.

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

    # --- an engine that was lost ------------------------------------------------------------------------------

    def safe_call(self, name: str, timeout_s: float, **fields: Any) -> Any:
        return self.guarded(lambda: self.call(name, timeout_s, **fields))

    def guarded(self, work: Callable[[], T]) -> T:
        """Work that is repeated on the engine that replaces this one. Raises EngineDead: it is not coming back."""
        while True:
            with self._replacing:  # one that is being restored is not disturbed
                self.check_alive()
                _ = self.capabilities  # connected
                life = self.life
            try:
                done = work()
            except Lost as lost:
                self.recover(life, str(lost))
            else:
                self.progress()
                return done

    def recover(self, life: object, how: str) -> None:
        """Have the engine again, with all it had, unless another thread has seen to it. Raises EngineDead."""
        with self._replacing:
            self.check_alive()
            while self.life is life:
                self.replacing = True
                self.deliver(life, Lost(how))
                before = self.counters
                try:
                    more = self.replace(how)
                    life = self.life
                    if more is not None:
                        logger.warning("%s: lost (%s); another one is there", self.name, how)
                        self._before = before + more
                        self._begin_life()
                except (Lost, SyncFailed) as again:
                    self.check_alive()
                    life, how = self.life, str(again)
                except EngineDead as error:
                    self._check_open()
                    self.dead = self.dead or error
                    raise
                except BaseException as error:  # it is there, without the weights of the one before
                    self.void = self.void or f"version {self.version} was not given back ({first_line(error)})"
                    raise
                else:
                    return
                finally:
                    self.replacing = False

    def _begin_life(self) -> None:
        """Another engine is there, awake: it gets weights and adapter of the one before."""
        self.lived = EngineCounters()
        self._paused, self.asleep = False, ""
        if self.void:
            return
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
        self.guarded(lambda: self._paused and self.call("resume", self.timeouts.pause_s))
        self._paused = False

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        deadline = time.monotonic() + self.timeouts.sync_s
        number = self.safe_call("begin_update", self.timeouts.sync_s, manifest=manifest, version=version)
        return ClientUpdate(self, number, manifest, version, deadline)

    def weights_change(self, why: str) -> None:
        """For `ClientUpdate`: the weights there are void from now on, and those kept are out of date."""
        self.void = why
        self._kept = self._adapter = None

    def weights_arrived(self, kept: Kept, asleep: str) -> None:
        self._kept = kept if self.keeps_weights else None
        self._adapter = None
        self.void, self.asleep = "", asleep
        self.version = kept.version

    def rebuild(self) -> None:
        self._kept = self._adapter = None
        self._paused = False
        self.version, self.void, self.asleep = 0, "", ""
        self.safe_call("rebuild", self.timeouts.start_s)

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        self.check_alive()
        life = self.life
        try:
            ack = self._send_adapter(adapter, version)
        except Lost as lost:
            self.recover(life, str(lost))
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
        if self.void:
            return Health(False, f"its weights are void: {self.void}")
        return self.ask_health()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._end_once()
        if self.broadcaster is not None:
            self.broadcaster.close()
        self._kept = self._adapter = None

    def die(self, problem: str) -> EngineDead:
        """Nothing more is expected of this engine."""
        self.dead = error = EngineDead(f"{self.name}: {problem}")
        self._end_once()
        return error

    def _end_once(self) -> None:
        first, self.ended = not self.ended, True
        if first:
            self.end()

    def check_alive(self) -> None:
        """Raises EngineDead when it is closed, else what it died of."""
        self._check_open()
        if self.dead is not None:
            raise self.dead

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self.name}: it is closed; make a new one")
