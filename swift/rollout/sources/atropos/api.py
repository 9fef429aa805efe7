"""Client of the Atropos message API (atroposlib 0.4) for the trainer: registration, batches, diagnosis of failures.

    open()    /info -> /register -> /info, compared with the registration -> one /batch, which admits environments
    next()    the oldest group received; without any, polls /batch, at most once per `POLL_S`

The API registers one trainer, once, and validates little, so its state is compared with the registration. It returns
batches that it forms together newest first: they are drained and reversed. Every wait is bounded: after a time without
data the run ends, and the error names likely causes.
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
"""Time limit of the first answer of the API."""
BACKOFF_S = (2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses after consecutive failed calls; the last pause repeats."""
HINT_S = 60.0
"""Time without data after which a warning names possible causes."""
STARVED_S = 300.0
"""Time without data, although enough is queued, after which the run ends."""
UNREGISTERED = {"batch_size": -1, "max_token_len": -1}
BATCH_S = 60.0
"""Time limit of one /batch call, and of draining all batches."""
TAKEN_BYTES = 256 << 20
"""Number of bytes after which draining stops; further batches stay at the API."""
TOKEN_BYTES = 128
"""Maximum bytes of a token in a batch: its id, mask, log-prob, reference log-prob and advantage."""
COUNTED_ENVIRONMENTS = 64
"""Maximum number of environments whose groups are counted separately."""


class Group(msgspec.Struct):
    """One group of scored sequences, as an environment sent it; a missing field is null or an empty list."""

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
    """The registration of a trainer; the API requires every field.

    batch_size: sequences per batch. max_token_len: environments drop sequences of this length or more.
    starting_step, num_steps: in batches, as the API counts them.
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
    """A call failed, and a retry may succeed."""


@dataclass(slots=True, eq=False)
class MessageAPI:
    """A connection to the message API.

    Attributes:
        url: URL of the API.
        registration: the registration of this trainer.
        group_size: sequences per group.
        timeout_s: longest time without data.
        clock, sleep: functions of time, in seconds.
        queue_size: groups queued at the API at the last check.
        counters: events since the source last drained its metrics.
        received: number of groups by environment.
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
    _check_at: float = 0.0
    _data_at: float = 0.0
    _hinted: bool = False
    _last_answer: str = "nothing"

    def __post_init__(self) -> None:
        self._http = httpx.Client(base_url=self.url.rstrip("/"), trust_env=False)

    def close(self) -> None:
        """Close the connection; the API needs no deregistration."""
        self._http.close()

    # --- registration -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Register, and admit environments. Raises EngineError: no answer in time, or another trainer is registered."""
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
        """Register. The API keeps the first registration only, and rejects it if data arrived earlier."""
        wanted = self.registration.info
        if (seen := self._registered_info()) == wanted:
            return
        why = "data came before any trainer" if seen == UNREGISTERED else "it is registered for another trainer"
        raise EngineError(
            f"--atropos_url: {self.url}: has batch_size {seen['batch_size']}, max_token_len {seen['max_token_len']} "
            f"instead of {wanted['batch_size']}, {wanted['max_token_len']}: {why}; restart the API"
        )

    def _registered_info(self) -> dict[str, int]:
        self._call("POST", "/register", _Registered, json=asdict(self.registration))
        info = self._call("GET", "/info", _Info)
        return {name: getattr(info, name) for name in UNREGISTERED}

    # --- data -------------------------------------------------------------------------------------------------------

    def begin_wait(self) -> None:
        """Restart the measurement of time without data."""
        self._data_at = self._check_at = self.clock()
        self._hinted = False

    def next(self, patience_s: float) -> Group | None:
        """The oldest group; None after one poll or a pause of `patience_s`. Raises EngineError: data timeout."""
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
        """Make a group the next one again."""
        self._groups.appendleft(group)

    def ready_batches(self) -> int:
        """Number of whole batches, received or queued at the API; if it does not answer, with the last queue size."""
        with contextlib.suppress(_Unreachable):
            self._update_queue_size()
        return (len(self._groups) + self.queue_size) * self.group_size // self.registration.batch_size

    def _poll(self) -> None:
        try:
            self._drain()
            if not self._groups:
                self._check_starvation()
            self._failures = 0
            self._poll_at = self.clock() + POLL_S
        except _Unreachable as error:
            pause = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
            self._failures, self._last_answer = self._failures + 1, str(error)
            self._poll_at = self.clock() + pause
        if self.clock() - self._data_at > self.timeout_s and not self._groups:
            raise EngineError(
                f"--atropos_timeout: {self.timeout_s:g} s: no data from {self.url} for so long; {self.queue_size} "
                f"groups are queued there, its last answer was {self._last_answer}; {self._causes()}"
            )

    def _drain(self) -> None:
        """Receive all batches, up to a size and a time; the API returns those formed together newest first."""
        batches, registered_again, began = [], False, self.clock()
        limit_bytes = self.registration.batch_size * self.registration.max_token_len * TOKEN_BYTES + replies.REPLY_BYTES
        self._taken = 0
        try:
            while self._taken < TAKEN_BYTES and self.clock() - began < BATCH_S:
                reply = self._call("GET", "/batch", _Reply, BATCH_S, limit_bytes)
                if reply.status == "error":  # the API was restarted
                    if registered_again:
                        raise _Unreachable("/batch: not registered")
                    registered_again = True
                    self.counters["health/atropos_reregister"] += 1
                    self._register()
                    continue
                self._last_answer = "a batch" if reply.batch else "no batch"
                if not reply.batch:
                    return
                batches.append(reply.batch)
        finally:  # the API has removed them, even if a later call fails
            for group in (group for batch in reversed(batches) for group in batch):
                counted = group.env_id in self.received or len(self.received) < COUNTED_ENVIRONMENTS
                self.received[group.env_id if counted else None] += 1
                self._groups.append(group)

    def _check_starvation(self) -> None:
        """Without data: read the queue size; warn, and raise EngineError if enough groups are queued for a batch."""
        now = self.clock()
        idle = now - self._data_at
        if now < self._check_at or idle < POLL_S:
            return
        self._check_at = now + REPLY_S
        self._update_queue_size()
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

    def _update_queue_size(self) -> None:
        self.queue_size = self._call("GET", "/status", _Status).queue_size

    def _causes(self) -> str:
        received = ", ".join(
            f"{count} of environment {number}" for number, count in sorted(self.received.items(), key=str)
        )
        if self.queue_size * self.group_size >= self.registration.batch_size:
            return (
                f"groups of more than --num_generations {self.group_size} sequences block the queue, and so does an "
                "environment with min_batch_allocation that sends nothing"
            )
        return (
            f"groups so far: {received or 'none'}; environments keep back groups of equal scores and sequences of "
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
