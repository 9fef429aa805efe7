"""How a client reaches an engine that lives elsewhere: what a Ray actor and an HTTP server have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swift.rollout.engines.base import Capabilities, EngineCounters, Health
from swift.rollout.engines.completion_stream import Failure
from swift.rollout.weights.base import Bucket
from swift.types import Completion, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds on every wait, in seconds; the defaults are those of the settings.

    start_s: start of an engine. server_s: until a server is healthy, polled every poll_s. request_s: one request, then
    it is aborted and tried once more. stall_s: no progress while sampling. sync_s: one weight update. sleep_s: sleep or
    wake. pause_s: pause. reply_s: any other call. connect_s: a connection. heartbeat_s, misses: so many heartbeats
    without an answer mean death. close_s: an orderly end.
    """

    start_s: float = 1800.0
    server_s: float = 120.0
    poll_s: float = 2.0
    request_s: float = 600.0
    stall_s: float = 300.0
    sync_s: float = 300.0
    sleep_s: float = 60.0
    pause_s: float = 60.0
    reply_s: float = 15.0
    connect_s: float = 5.0
    heartbeat_s: float = 5.0
    misses: int = 3
    close_s: float = 10.0


class Lost(Exception):
    """The engine cannot be reached, or is not the one of before; the text says how."""


class Late(Lost):
    """A call was not answered in time."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Requests that were not taken and are to be sent again. busy: after a pause, because the queue there is full."""

    request_ids: list[str]
    busy: bool = False


Event = Completion | Failure | Returned | Exception
"""What comes of requests: each comes back in one of the first three, or all that an engine has are `Lost`."""
Deliver = Callable[[object, Event], None]
"""Takes an event and the life of the engine that it comes from; from any thread."""


class Transport(ABC):
    """How a client reaches its engine.

    Attributes:
        name: of the engine, for messages.
        life: another object once the engine was replaced, or what it had in flight was given up.
        deliver: takes what comes of requests.
        stored: the way in which an update can be sent again to an engine that was lost.
        devices: of the engine, as this process numbers them.
        restartable: whether an engine that does not answer is replaced; otherwise it is dead.
        counters: what the present life says it has done.
        progress_at: monotonic time of the last sign of progress.
    """

    name: str
    life: object
    deliver: Deliver
    stored: str
    devices: tuple[str, ...]
    restartable: bool
    counters: EngineCounters
    progress_at: float

    @abstractmethod
    def connect(self) -> Capabilities:
        """Wait until the engine is there."""

    @abstractmethod
    def post(self, life: object, requests: Sequence[Request], version: int) -> None:
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
        """The best of `ways` for tensors where these lie."""

    @abstractmethod
    def payload(self, way: str, bucket: Bucket, version: int) -> Any:
        """What travels of a bucket that is sent this way; made once for several engines."""

    @abstractmethod
    def address(self) -> str:
        """This host as the engine reaches it."""

    def update_ended(self, *, complete: bool) -> None:  # noqa: B027 - most have nothing to end
        """After the commit of an update, or its abort."""

    @abstractmethod
    def replace(self, how: str, *, version: int, valid: bool) -> EngineCounters | None:
        """After a loss: find or make the engine again; `life` is another one then.

        Returns:
            None if it is the one of before, with its state; else what it did beyond `counters`, with its restarts.

        Raises:
            Lost: not yet; call again.
            EngineDead: it is not coming back.
        """

    def progress(self) -> None:  # noqa: B027 - most transports need not know
        """A completion arrived, or a call succeeded."""

    @abstractmethod
    def health(self) -> Health:
        """Asked now, within seconds."""

    def stacks(self) -> str:
        """Where the engine's thread is, in one line, as far as it answers."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """End everything; never raises."""
