"""Which engine has which request: they are spread over the engines, and those of a lost one go to the others.

A group (consecutive requests "<group>/<sample>" with the same prompt) goes to one engine, which prefills its prompt
once: the one with the fewest outstanding tokens. The turns of a trajectory ("<group>/<sample>#<turn>") stay with the
engine that has their beginning in its prefix cache, unless that one has far more to do than another.

Each request comes back exactly once: a completion counts when it comes from the engine, and from the life of it, that
holds its request in the table. Clients deliver from any thread; failures are raised in the thread that reads.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from swift.errors import EngineAsleep, EngineDead, EngineError, NumericError, RequestRefused, SyncFailed
from swift.rollout.engines.client import EngineClient
from swift.rollout.engines.completion_stream import Failure
from swift.rollout.engines.events import Event, Lost, Returned
from swift.rollout.engines.requests import RequestTable, size_of
from swift.rollout.engines.running import impossible
from swift.types import Completion, Request

LOOK_S = 1.0
"""How often time limits are checked."""
BUSY_S = 1.0
"""Pause after an engine reported a full queue."""
TURN = re.compile(r"(?:\d+:)?(.+)#(\d+)")
"""The id of a turn: its trajectory, perhaps behind the number that the queue of a server has put there."""
OVERLOAD = 2
"""A trajectory leaves an engine with more than this times the outstanding tokens of another, its own turn included."""
TRAJECTORIES = 1 << 16
"""How many trajectories are remembered."""


class Dispatch:
    """See the module's docstring.

    Attributes:
        table: the requests.
        changed: guards it, and is notified of whatever a stream waits for.
        clients, buried: engines that are alive, as far as anybody looked, and those that are left out.
        events: what has arrived and was not read.
        paused_at: monotonic time since which nothing is sent, or None.
        closed: nothing is waited for any more.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        bounds = clients[0].timeouts
        self.table = RequestTable(limit_s=bounds.request_s, grace_s=2 * bounds.reply_s)
        self.changed = threading.Condition(threading.RLock())
        self.clients = list(clients)
        self.buried: list[EngineClient] = []
        self.paused_at: float | None = None
        self.closed = False
        self.events: deque[tuple[EngineClient, object, Event]] = deque()
        self._looked_at = 0.0
        self._last: tuple[Any, EngineClient] | None = None
        self._homes: dict[str, EngineClient] = {}  # of trajectories, the longest silent first
        for client in clients:
            client.deliver = partial(self._deliver, client)

    def alive(self) -> list[EngineClient]:
        """The engines that are not dead for good; the others are left out from now on. Raises EngineDead: none is."""
        with self.changed:
            dead = [client for client in self.clients if client.dead is not None]
            self.clients = [client for client in self.clients if client.dead is None]
            self.buried += dead
            for client in dead:
                self.table.release(client.life)
        for client in dead:
            client.close()
        if not self.clients and (last := self.buried[-1].dead) is not None:
            raise last
        return self.clients

    def post_waiting(self) -> None:
        """Requests without an engine go to one."""
        parcels: dict[EngineClient, tuple[object, list[Request]]] = {}
        now = time.monotonic()
        with self.changed:
            usable = self._usable()
            for request in self.table.held() if usable else ():
                client = self._choose(request, usable)
                life, parcel = parcels.setdefault(client, (client.life, []))
                self.table.send([request.request_id], life, now)
                parcel.append(request)
                client.progress_at = now
        for client, (life, parcel) in parcels.items():
            try:
                client.post(life, parcel)
            except Lost as lost:
                self._lost(client, life, lost)

    def _usable(self) -> list[EngineClient]:
        now = time.monotonic()
        return [one for one in self.clients if one.dead is None and not one.replacing and one.busy_until <= now]

    def _choose(self, request: Request, usable: list[EngineClient]) -> EngineClient:
        """The engine of its trajectory, of its group, or the one with the least work."""

        def load(client: EngineClient) -> int:
            return self.table.load(client.life)

        least = min(usable, key=load)
        turn = TURN.fullmatch(request.request_id)
        chosen = self._homes.pop(turn[1], None) if turn else None
        if turn and turn[2] == "0":  # evaluations have the ids of those before
            chosen = None
        if chosen not in usable or load(chosen) > OVERLOAD * (load(least) + size_of(request)):
            group = (request.request_id.rpartition("/")[0], tuple(request.prompt_ids))
            if self._last is None or self._last[0] != group or self._last[1] not in usable:
                self._last = (group, least)
            chosen = self._last[1]
        if turn:
            self._homes[turn[1]] = chosen
            if len(self._homes) > TRAJECTORIES:
                del self._homes[next(iter(self._homes))]
        return chosen

    def _deliver(self, client: EngineClient, life: object, event: Event) -> None:
        with self.changed:
            self.events.append((client, life, event))
            self.changed.notify_all()

    def await_event(self, limit_s: float) -> None:
        def something() -> bool:
            stopped = self.closed or self.paused_at is not None
            return bool(stopped or self.events or self.table.ready or (self.table.count() and self._usable()))

        with self.changed:
            self.changed.wait_for(something, limit_s)

    def read_events(self) -> None:
        """Everything that has arrived; stops at the first failure."""
        while True:
            with self.changed:
                if not self.events:
                    return
                client, life, event = self.events.popleft()
            if isinstance(event, Completion):
                self._arrive(client, life, event)
            elif isinstance(event, Failure):
                self._fail(client, life, event)
            elif isinstance(event, Returned):
                with self.changed:
                    self.table.release(life, event.request_ids)
                    if event.busy:
                        client.busy_until = time.monotonic() + BUSY_S
            elif isinstance(event, Lost):
                self._lost(client, life, event)
            elif isinstance(event, EngineDead):
                self.alive()
            else:
                raise event

    def _arrive(self, client: EngineClient, life: object, completion: Completion) -> None:
        client.progress()
        problem = impossible(completion.logprobs)
        if len(completion.logprobs) != len(completion.token_ids):
            problem = f"{len(completion.logprobs)} log-probs for {len(completion.token_ids)} tokens"
        with self.changed:
            if problem and self.table.remove(life, [completion.request_id]):
                raise NumericError(
                    f"{client.name}: request {completion.request_id}: {problem}: the model's output is not finite; "
                    "look at its weights"
                )
            self.table.arrive(life, completion)

    def _fail(self, client: EngineClient, life: object, failure: Failure) -> None:
        error = failure.error
        if isinstance(error, EngineDead):
            self._lost(client, life, Lost(f"failed ({error.problems[0].removeprefix(f'{client.name}: ')})"))
            return
        with self.changed:
            known = self.table.remove(life, failure.request_ids)
        if isinstance(error, SyncFailed):
            client.void = error.problems[0]
        elif not isinstance(error, EngineAsleep | NumericError) and len(known) == 1:
            raise RequestRefused(known[0], *error.problems)
        if known:
            raise error

    def _lost(self, client: EngineClient, life: object, lost: Lost) -> None:
        """Its requests wait for an engine; it is replaced, unless it has been."""
        with self.changed:
            self.table.release(life)
            if client.life is not life or client.dead is not None or client.replacing:
                return
            client.replacing = True
        work = partial(self._recover, client, life, str(lost))
        threading.Thread(target=work, name=f"replaces {client.name}", daemon=True).start()

    def _recover(self, client: EngineClient, life: object, how: str) -> None:
        error: Exception | None = None
        try:
            client.recover(life, how)
        except Exception as raised:  # in the thread that streams
            error = raised
        with self.changed:
            client.replacing = False
            client.progress_at = time.monotonic()
            if error is not None and not self.closed:
                self.events.append((client, life, error))
            self.changed.notify_all()

    def check_clocks(self) -> None:
        """Abort late requests; an engine that does not abort them is lost, one without progress is dead."""
        now = time.monotonic()
        if now - self._looked_at < min(LOOK_S, self.table.limit_s / 10):
            return
        self._looked_at = now
        with self.changed:
            late, deaf = self.table.overdue(now)
            clients = {client.life: client for client in self.clients}
        for life, names in late.items():
            if life in clients:
                clients[life].abort(names)
        for life, names in deaf.items():
            if (client := clients.get(life)) is not None:
                problem = f"does not abort request {names[0]}; {client.stacks()}".rstrip("; ")
                if not client.restartable:
                    client.die(problem)
                    self.alive()
                else:
                    self._lost(client, life, Lost(problem))
        for life, client in clients.items():
            if self.table.count(life) and now - client.progress_at > client.timeouts.stall_s:
                problem = f"no progress for {client.timeouts.stall_s:g} s: {client.stacks()}".rstrip(": ")
                raise EngineError(client.die(problem).problems[0])  # the others are not to go on without

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        with self.changed:
            told = self.table.abort(request_ids)
            clients = {client.life: client for client in self.clients}
            self.changed.notify_all()
        for life, names in told.items():
            if life in clients:
                clients[life].abort(names)

    def go_on(self) -> None:
        """The pause is over; time limits did not run meanwhile."""
        with self.changed:
            now, paused_at, self.paused_at = time.monotonic(), self.paused_at, None
            for client in self.clients:
                client.progress_at = now
            if paused_at is not None:
                self.table.postpone(now - paused_at)
