"""The trainer's side of the Atropos message API (atroposlib 0.4): registration, batches, and what can be wrong there.

    open()    /info -> /register -> /info says the same -> one /batch, which lets environments in
    next()    the oldest group that has come; polls /batch when there is none, never more often than every `POLL_S`

The API knows one trainer, registers it once, and checks little of what passes through it, so its state is compared with
what was sent. Batches that it forms together come newest first: they are drained and turned around. Every wait is
bounded: a time without data, with the cause as far as it can be seen from here, ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from swift.errors import ConfigError, EngineError, first_line
from swift.rollout.engines import replies
from swift.rollout.engines.events import Lost

Shape = TypeVar("Shape")

logger = logging.getLogger("swift.rollout")

POLL_S = 1.0
REPLY_S = 10.0
START_S = 30.0
"""How long the API may take to answer for the first time."""
BACKOFF_S = (2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses after failed calls in a row; the last one stays."""
HINT_S = 60.0
"""Time without data after which possible causes are named."""
STARVED_S = 300.0
"""Time without data, although enough is queued, after which the run ends."""
UNREGISTERED = {"batch_size": -1, "max_token_len": -1}
BATCH_S = 60.0
"""Bound on one batch, and on all that are taken at once."""
TAKEN_BYTES = 256 << 20
"""After so much is taken at once, the rest waits at the API."""
TOKEN_BYTES = 128
"""Most bytes of a token in a batch: its id, mask, and numbers of three kinds."""
COUNTED_ENVIRONMENTS = 64
"""Groups of further ones are counted together."""


class Group(msgspec.Struct):
    """One group of scored sequences, as an environment sent it; what no sequence has is null, or an empty list."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    advantages: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    generation_params: dict[str, Any] | None = None
    group_overrides: dict[str, Any] | None = None
    env_id: int | None = None


class _Info(msgspec.Struct):
    batch_size: int = -1
    max_token_len: int = -1


class _Registered(msgspec.Struct):
    uuid: Any


class _Status(msgspec.Struct):
    queue_size: int = 0


class _Reply(msgspec.Struct):
    batch: list[Group] | None = None
    status: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What the API wants to know of a trainer; it refuses one without any of these.

    batch_size: sequences of a batch. max_token_len: environments drop sequences of so many tokens. starting_step,
    num_steps: in batches, as the API counts them.
    """

    batch_size: int
    max_token_len: int
    starting_step: int
    num_steps: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    wandb_group: str = ""
    wandb_project: str = ""

    @property
    def info(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "max_token_len": self.max_token_len}


class _Unreachable(Exception):
    """A call failed in a way that may pass."""


@dataclass(slots=True, eq=False)
class MessageAPI:
    """A connection to the message API.

    Attributes:
        url: of the API.
        registration: of this trainer.
        group_size: sequences of a group.
        timeout_s: longest time without data.
        clock, sleep: of the process.
        queue_size: groups that wait at the API, as last seen.
        counters: what happened since somebody took them; `received` counts groups by environment.
    """

    url: str
    registration: Registration
    group_size: int
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    queue_size: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    received: Counter[int | None] = field(default_factory=Counter)
    _groups: deque[Group] = field(default_factory=deque)
    _http: httpx.Client = field(init=False)
    _failures: int = 0
    _taken: int = 0
    _poll_at: float = 0.0
    _look_at: float = 0.0
    _data_at: float = 0.0
    _hinted: bool = False
    _last: str = "nothing"

    def __post_init__(self) -> None:
        self._http = httpx.Client(base_url=self.url.rstrip("/"), trust_env=False)

    def close(self) -> None:
        """End the connection; the API keeps no lease."""
        self._http.close()

    # --- registration -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Register, and let environments begin. Raises EngineError: no answer in time, or another trainer is served."""
        limit = self.clock() + START_S
        while True:
            try:
                self._call("GET", "/info", _Info)
                self._register()
                self.begin_wait()
                self._drain()
                return
            except _Unreachable as error:
                if self.clock() >= limit:
                    raise EngineError(
                        f"--atropos_url: {self.url}: no answer within {START_S:g} s ({error}); start it with run-api, "
                        "or let --atropos_env start all"
                    ) from None
                self.sleep(0.2)

    def _register(self) -> None:
        """The API takes the first registration only, and none at all if data came before it."""
        wanted = self.registration.info
        if (seen := self._signed_up()) == wanted:
            return
        why = "data came before any trainer" if seen == UNREGISTERED else "it is registered for another trainer"
        raise EngineError(
            f"--atropos_url: {self.url}: has batch_size {seen['batch_size']}, max_token_len {seen['max_token_len']} "
            f"instead of {wanted['batch_size']}, {wanted['max_token_len']}: {why}; restart the API"
        )

    def _signed_up(self) -> dict[str, int]:
        self._call("POST", "/register", _Registered, json=asdict(self.registration))
        info = self._call("GET", "/info", _Info)
        return {name: getattr(info, name) for name in UNREGISTERED}

    # --- data -------------------------------------------------------------------------------------------------------

    def begin_wait(self) -> None:
        """Somebody waits from now on: earlier time without data does not count."""
        self._data_at = self._look_at = self.clock()
        self._hinted = False

    def next(self, patience_s: float) -> Group | None:
        """The oldest group that is there, waited for up to `patience_s`. Raises EngineError: no data for too long."""
        if not self._groups:
            now = self.clock()
            if now < self._poll_at:
                self.sleep(min(patience_s, self._poll_at - now))
            else:
                self._poll()
        if not self._groups:
            return None
        self._data_at, self._hinted = self.clock(), False
        return self._groups.popleft()

    def give_back(self, group: Group) -> None:
        self._groups.appendleft(group)

    def batches_there(self) -> int:
        """Whole batches that wait, here and at the API; those that it does not tell about now are not counted."""
        with contextlib.suppress(_Unreachable):
            self._ask_queue()
        return (len(self._groups) + self.queue_size) * self.group_size // self.registration.batch_size

    def _poll(self) -> None:
        try:
            self._drain()
            if not self._groups:
                self._look_around()
            self._failures = 0
            self._poll_at = self.clock() + POLL_S
        except _Unreachable as error:
            pause = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
            self._failures, self._last = self._failures + 1, str(error)
            self._poll_at = self.clock() + pause
        if self.clock() - self._data_at > self.timeout_s and not self._groups:
            raise EngineError(
                f"--atropos_timeout: {self.timeout_s:g} s: no data from {self.url} for so long; {self.queue_size} "
                f"groups are queued there, its last answer was {self._last}; {self._causes()}"
            )

    def _drain(self) -> None:
        """All batches that are there, up to some size. Those formed together come newest first."""
        batches, again, began = [], False, self.clock()
        whole = self.registration.batch_size * self.registration.max_token_len * TOKEN_BYTES + replies.REPLY_BYTES
        self._taken = 0
        try:
            while self._taken < TAKEN_BYTES and self.clock() - began < BATCH_S:
                reply = self._call("GET", "/batch", _Reply, BATCH_S, whole)
                if reply.status == "error":  # it was restarted
                    if again:
                        raise _Unreachable("/batch: not registered")
                    again = True
                    self.counters["health/atropos_reregister"] += 1
                    self._register()
                    continue
                self._last = "a batch" if reply.batch else "no batch"
                if not reply.batch:
                    return
                batches.append(reply.batch)
        finally:  # the API no longer has them, whatever a later call does
            for group in (group for batch in reversed(batches) for group in batch):
                known = group.env_id in self.received or len(self.received) < COUNTED_ENVIRONMENTS
                self.received[group.env_id if known else None] += 1
                self._groups.append(group)

    def _look_around(self) -> None:
        """Without data: what is queued, and whether that should have been enough."""
        now = self.clock()
        idle = now - self._data_at
        if now < self._look_at or idle < POLL_S:
            return
        self._look_at = now + REPLY_S
        self._ask_queue()
        starved = self.queue_size * self.group_size >= self.registration.batch_size
        if idle >= HINT_S and not self._hinted:
            self._hinted = True
            self.counters["health/starved"] += int(starved)
            logger.warning(
                "warning: atropos: no data for %d s, %d groups queued; %s", idle, self.queue_size, self._causes()
            )
        if idle >= STARVED_S and starved:
            raise EngineError(
                f"--atropos_url: {self.url}: {self.queue_size} groups are queued there, and no batch of "
                f"{self.registration.batch_size} sequences comes out of them for {STARVED_S:g} s; {self._causes()}"
            )

    def _ask_queue(self) -> None:
        self.queue_size = self._call("GET", "/status", _Status).queue_size

    def _causes(self) -> str:
        came = ", ".join(f"{count} of environment {number}" for number, count in sorted(self.received.items(), key=str))
        if self.queue_size * self.group_size >= self.registration.batch_size:
            return (
                f"groups of more than --num_generations {self.group_size} sequences block the queue, and so does an "
                "environment with min_batch_allocation that sends nothing"
            )
        return (
            f"groups so far: {came or 'none'}; environments keep back groups of equal scores and sequences of "
            f"{self.registration.max_token_len} tokens or more, and the API groups of another size than an "
            f"environment's group_size (--num_generations {self.group_size})"
        )

    def _call(
        self,
        method: str,
        path: str,
        shape: type[Shape],
        limit_s: float = REPLY_S,
        limit_bytes: int = replies.REPLY_BYTES,
        **content: Any,
    ) -> Shape:
        try:
            limit = httpx.Timeout(limit_s)
            reply = replies.whole(self._http, method, path, limit, limit_bytes, decompress=True, **content)
        except Lost as error:
            raise _Unreachable(f"{path}: {first_line(error)}") from error
        if reply.status_code >= 500:
            raise _Unreachable(f"{path}: status {reply.status_code}")
        if reply.status_code != 200:
            raise ConfigError(
                f"--atropos_url: {self.url}: {path} answers {reply.status_code}; give the address of an Atropos "
                "message API"
            )
        self._taken += len(reply.content)
        try:
            return msgspec.json.decode(reply.content, type=shape)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise _Unreachable(f"{path}: {first_line(error)}: {reply.content[:80]!r}") from error
