"""Events of requests to an engine in another process, and the timeouts of such an engine."""

from __future__ import annotations

from dataclasses import dataclass

from swift.rollout.engines.completion_stream import Failure
from swift.types import Completion

DRAIN_S = 600.0
"""Maximum wait of a server for requests of other clients before it takes new weights, in seconds."""
START_S = 1500.0
"""Timeout of the start of an engine, without the time for reading its weights, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds on every wait, in seconds; the defaults are those of the settings.

    start_s: start of an engine. server_s: until a server is healthy, polled every poll_s. stall_s: no progress while
    sampling. drain_s: until requests of other clients have ended at a server. sync_s: one weight update. sleep_s:
    sleep or wake. pause_s: pause. reply_s: any other call. connect_s: a connection. heartbeat_s, misses: interval of
    heartbeats, and the number of failed ones after which the engine is lost. close_s: an orderly end.
    """

    start_s: float = 1800.0
    server_s: float = 120.0
    poll_s: float = 2.0
    stall_s: float = 300.0
    drain_s: float = 0.0
    sync_s: float = 300.0
    sleep_s: float = 300.0
    pause_s: float = 60.0
    reply_s: float = 15.0
    connect_s: float = 5.0
    heartbeat_s: float = 5.0
    misses: int = 6
    close_s: float = 10.0

    @classmethod
    def of(cls, limit_s: float, *, stall_s: float, server_s: float = 120.0) -> Timeouts:
        """Timeouts with this limit for all operations that move weights (`--engine_timeout`)."""
        return cls(start_s=START_S + limit_s, sync_s=limit_s, sleep_s=limit_s, stall_s=stall_s, server_s=server_s)


class Lost(Exception):
    """The engine cannot be reached, or is another instance than before; the text is the reason."""


class Late(Lost):
    """A call was not answered in time."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Requests that were not taken and are to be sent again. busy: after a pause, because the queue there is full."""

    request_ids: list[str]
    busy: bool = False


Event = Completion | Failure | Returned | Lost
"""Each request ends in one of the first three; `Lost` ends all requests of an engine."""
