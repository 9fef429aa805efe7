"""What stands before the engines: one queue for all clients, and the one thread that calls the engines.

    handlers --open--> queue --submit--> pool --stream--> driver --deliver--> the ticket it belongs to
    handlers --do----> jobs  ----------------------------> driver, when nothing runs

An id of a client says nothing about those of others: each request travels under an id of its own. What was asked for
comes back exactly once, as a completion or inside one failure, unless its ticket was cancelled.

A job (new weights, sleep, ...) is carried out at rest: nothing new is submitted while one waits, and it begins when
the last completion is out, or at once while the engines are paused with "keep". A *hold* keeps the queue closed over
several jobs, such as those of one update.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from swift.errors import EngineDead, EngineError, RequestRefused, SwiftError
from swift.rollout.engines.pool import EnginePool
from swift.rollout.server.limits import Refused
from swift.types import Completion, Request

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often waiting threads look around."""
CLOSE_S = 10.0
"""How long the threads may take to end."""

T = TypeVar("T")
Arrival = Completion | tuple[list[str], Exception]
"""A completion, or the ids that will not come and why; under the client's ids."""


@dataclass(eq=False, slots=True)
class Ticket:
    """Requests that were opened together. deliver: called once per completion or failure, from the driver's thread.

    owner: the run they belong to. left: client's ids that have not come back.
    """

    number: int
    deliver: Callable[[Arrival], None]
    owner: str | None
    left: set[str] = field(default_factory=set)
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Entry:
    ticket: Ticket
    request: Request
    name: str
    submitted: bool = False
    aborted: bool = False


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    future: Future[Any]


class Front:
    """See the module's docstring; starts two threads.

    Args:
        engine: the engines, as one.
        queue_limit: samples that may wait or run.
    """

    def __init__(self, engine: EnginePool, *, queue_limit: int) -> None:
        self.engine = engine
        self.queue_limit = queue_limit
        self._changed = threading.Condition()
        self._inbox: deque[_Entry] = deque()
        self._sent: dict[str, _Entry] = {}
        self._jobs: deque[_Job] = deque()
        self._working = False
        self._holds: set[str] = set()
        self._numbers = itertools.count(1)
        self._pausing = threading.Lock()
        self._kept = False  # paused in flight
        self._closing = False
        self._threads = [
            threading.Thread(target=work, name=f"{name} of the engines", daemon=True)
            for work, name in ((self._drive, "driver"), (self._submit, "queue"))
        ]
        for thread in self._threads:
            thread.start()

    # --- requests ---------------------------------------------------------------------------------------------

    @property
    def load(self) -> tuple[int, int]:
        """Samples that run, and that wait in the queue."""
        return len(self._sent), len(self._inbox)

    @property
    def running_of(self) -> dict[str, int]:
        """How many samples run, by whom."""
        with self._changed:
            owners = [entry.ticket.owner for entry in self._sent.values()]
        return dict(Counter("clients without a run" if owner is None else f"run {owner}" for owner in owners))

    def open(self, requests: Sequence[Request], deliver: Callable[[Arrival], None], owner: str | None = None) -> Ticket:
        """Queue requests; all of them, or none.

        Raises:
            Refused: the queue is full (429).
            SwiftError: a request that no engine would take.
            EngineDead: the server is closing.
        """
        for request in requests:
            self.engine.check_length(request)
        ticket = Ticket(next(self._numbers), deliver, owner, {request.request_id for request in requests})
        if len(ticket.left) != len(requests):
            raise Refused(422, "ids", "requests: an id comes twice; give each an id of its own")
        entries = [_Entry(ticket, request, f"{ticket.number}:{request.request_id}") for request in requests]
        with self._changed:
            if self._closing:
                raise EngineDead("server: it is closing; use another one")
            waiting = len(self._inbox) + len(self._sent)
            if waiting + len(entries) > self.queue_limit:
                raise Refused(
                    429,
                    "queue",
                    f"queue: {waiting} samples wait or run and {len(entries)} came: over the limit of "
                    f"{self.queue_limit}; send fewer at a time, or try again later",
                )
            self._inbox.extend(entries)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more; what runs of it is aborted and not delivered."""
        ticket.cancelled = True
        self.abort(ticket, None)

    def abort(self, ticket: Ticket, ids: Iterable[str] | None) -> None:
        """End requests of a ticket, all with None; they come back with what they have."""
        self._abort(lambda entry: entry.ticket is ticket, None if ids is None else set(ids))

    def abort_owned(self, owner: str | None, ids: Iterable[str] | None = None) -> int:
        """End requests of a run, whatever ticket they are on; returns how many there were."""
        return self._abort(lambda entry: entry.ticket.owner == owner, None if ids is None else set(ids))

    def abort_all(self) -> int:
        """End everything; returns how many requests there were."""
        return self._abort(lambda entry: True, None)

    def _abort(self, belongs: Callable[[_Entry], bool], ids: set[str] | None) -> int:
        with self._changed:
            waiting = [one for one in self._inbox if belongs(one) and (ids is None or one.request.request_id in ids)]
            running = [
                one for one in self._sent.values() if belongs(one) and (ids is None or one.request.request_id in ids)
            ]
            for entry in running:
                entry.aborted = True  # one that is being submitted is not known to the engines yet
            gone = set(map(id, waiting))
            self._inbox = deque(one for one in self._inbox if id(one) not in gone)
            self._changed.notify_all()
        for entry in waiting:
            self._hand_over(entry, Completion(entry.request.request_id, [], [], "abort"))
        if running:
            self.engine.abort([entry.name for entry in running])
        return len(waiting) + len(running)

    # --- jobs -------------------------------------------------------------------------------------------------

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Carry out `work` on the driver's thread, at rest. A future that is cancelled in time is not carried out."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise EngineDead("server: it is closing; use another one")
            self._jobs.append(_Job(work, future))
            self._changed.notify_all()
        return future

    def hold(self, reason: str) -> None:
        """Submit nothing until `release`."""
        with self._changed:
            self._holds.add(reason)

    def release(self, reason: str) -> None:
        """End a hold; of none, nothing."""
        with self._changed:
            self._holds.discard(reason)
            self._changed.notify_all()

    def holds(self, reason: str) -> bool:
        """Whether this hold is on."""
        return reason in self._holds

    def pause_in_flight(self) -> None:
        """Stop sampling where it is; from any thread. What runs is kept for `resume`."""
        with self._pausing:
            before = self.holds("pause")
            self.hold("pause")
            try:
                self.engine.pause("keep")
            except BaseException:
                if not before:
                    self.release("pause")
                raise
            with self._changed:
                self._kept = True
                self._changed.notify_all()

    def pause_empty(self) -> None:
        """For a job: nothing runs, and nothing is to begin."""
        self.hold("pause")

    def resume(self) -> None:
        """Go on after a pause; for a job."""
        with self._pausing:
            if self._kept:
                self.engine.resume()
            with self._changed:
                self._kept = False
                self._holds.discard("pause")
                self._changed.notify_all()

    @property
    def paused(self) -> bool:
        """Whether nothing is sampled until `resume`."""
        return "pause" in self._holds

    # --- the driver -------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        while not self._closing:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or (self._jobs and self._at_rest) or self._may_sample, LOOK_S
                )
                job = self._jobs.popleft() if self._jobs and self._at_rest and not self._closing else None
                self._working = job is not None
                sample = job is None and self._may_sample and not self._closing
            if job is not None:
                self._carry_out(job)
            elif sample:
                self._sample()

    @property
    def _at_rest(self) -> bool:
        return not self._sent or self._kept

    @property
    def _may_sample(self) -> bool:
        """Whether something is there to be sampled; what comes together is submitted before."""
        flushed = not self._inbox or self._closed_queue
        return not self._kept and flushed and any(entry.submitted for entry in self._sent.values())

    @property
    def _closed_queue(self) -> bool:
        return bool(self._holds or self._jobs or self._working)

    def _carry_out(self, job: _Job) -> None:
        try:
            if not job.future.set_running_or_notify_cancel():
                return
            try:
                job.future.set_result(job.work())
            except BaseException as error:
                job.future.set_exception(error)
        finally:
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def _sample(self) -> None:
        error: Exception | None = None
        try:
            for completion in self.engine.stream():
                entry = self._remove(completion.request_id)
                if entry is not None:
                    self._hand_over(entry, replace(completion, request_id=entry.request.request_id))
        except RequestRefused as refused:  # the others go on
            entry = self._remove(refused.request_id)
            self._refuse([entry] if entry is not None else [], refused)
            return
        except Exception as raised:
            if not isinstance(raised, SwiftError):
                logger.exception("sampling failed")
            error = raised
        with self._changed:
            if error is None and self._kept:
                return
        self._fail_lost(error)

    def _fail_lost(self, error: Exception | None) -> None:
        """Whatever the engines no longer know of does not come."""
        known = self.engine.outstanding if not isinstance(error, EngineDead) else set()
        with self._changed:
            lost = [entry for entry in self._sent.values() if entry.submitted and entry.name not in known]
            for entry in lost:
                del self._sent[entry.name]
            self._changed.notify_all()
            if error is not None and not lost:  # they wait for whole weights; so does this thread, for a moment
                self._changed.wait(LOOK_S)
        self._refuse(lost, error or EngineError("engine: its stream ended without them; a defect of the engine"))

    def _refuse(self, entries: Iterable[_Entry], error: Exception) -> None:
        by_ticket: dict[Ticket, list[str]] = {}
        for entry in entries:
            by_ticket.setdefault(entry.ticket, []).append(entry.request.request_id)
        for ticket, ids in by_ticket.items():
            ticket.left.difference_update(ids)
            if not ticket.cancelled:
                ticket.deliver((ids, error))

    def _remove(self, name: str) -> _Entry | None:
        with self._changed:
            entry = self._sent.pop(name, None)
            self._changed.notify_all()
        return entry

    def _hand_over(self, entry: _Entry, completion: Completion) -> None:
        entry.ticket.left.discard(completion.request_id)
        if not entry.ticket.cancelled:
            entry.ticket.deliver(completion)

    # --- the queue's thread -----------------------------------------------------------------------------------

    def _submit(self) -> None:
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (self._inbox and not self._closed_queue), LOOK_S)
                if self._closing or not self._inbox or self._closed_queue:
                    continue
                entry = self._inbox.popleft()
                self._sent[entry.name] = entry
            try:
                self.engine.submit(replace(entry.request, request_id=entry.name))
            except Exception as error:
                if not isinstance(error, SwiftError):
                    logger.exception("submitting failed")
                self._remove(entry.name)
                self._refuse([entry], error)
                continue
            with self._changed:
                entry.submitted = True
                self._changed.notify_all()
            if entry.aborted:
                self.engine.abort([entry.name])

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and the engines; whoever waits is told."""
        error = EngineDead("server: it is closing; use another one")
        with self._changed:
            self._closing = True
            left = [*self._inbox, *self._sent.values()]
            jobs = list(self._jobs)
            self._inbox.clear()
            self._sent.clear()
            self._jobs.clear()
            self._changed.notify_all()
        self._refuse(left, error)
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        self.engine.close()
        for thread in self._threads:
            thread.join(CLOSE_S)
