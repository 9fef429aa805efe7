"""The table of outstanding requests: who has which, since when, and what comes of it. Every request comes back once.

    waiting --send--> held by a holder --arrive--> ready
       ^                   |  |
       +--- release -------+  +-- over its time limit --> aborted --> once more, then "error"

A holder is whoever samples a request: an engine, or one life of an engine that may be replaced. What arrives from
another holder than the present one is ignored, so a holder that is given up can deliver nothing twice.

A holder begins requests in the order of `send`, as many as it has room for. One that comes back makes room for a later
one, so the time of all later ones begins anew: waiting for room counts against nobody.

No clock, thread or engine lives here: callers pass `now` and hold a lock of their own. Each call costs O(requests
named).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from swift.errors import EngineError
from swift.types import Completion, Request

MAX_TRIES = 2
"""How often a request that exceeds its time limit is sampled."""


@dataclass(slots=True)
class Entry:
    """A request that has not come back.

    place: in the order of `send`. since: when its time began. tries: how often it began. expired_at: when it was
    aborted for exceeding its time limit. aborted: by the caller.
    """

    request: Request
    holder: Hashable = None
    place: int = 0
    since: float = 0.0
    tries: int = 1
    expired_at: float | None = None
    aborted: bool = False


def size_of(request: Request) -> int:
    """Tokens of a request: its prompt and its longest completion."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens


class RequestTable:
    """See the module's docstring.

    Args:
        limit_s: seconds that a request may take once its holder has room for it; then it is to be aborted and sampled
            once more.
        grace_s: seconds that an aborted request may take to arrive.

    Attributes:
        ready: completions for the caller to take.
        late: requests that exceeded the time limit while they were sampled, once for each try.
    """

    def __init__(self, *, limit_s: float = math.inf, grace_s: float = math.inf) -> None:
        self.limit_s, self.grace_s = limit_s, grace_s
        self.ready: deque[Completion] = deque()
        self.late = 0
        self._entries: dict[str, Entry] = {}
        self._held: dict[Hashable, dict[str, Entry]] = {}
        self._load: dict[Hashable, int] = {}
        self._sent = 0
        self._made_room: dict[Hashable, int] = {}  # first place that came back since the last look, by holder

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def ids(self) -> set[str]:
        return {*self._entries, *(completion.request_id for completion in self.ready)}

    def held(self, holder: Hashable = None) -> list[Request]:
        """Requests of a holder, oldest first; with None those that wait for one."""
        return [entry.request for entry in self._held.get(holder, {}).values()]

    def count(self, holder: Hashable = None) -> int:
        """Number of requests of a holder; with None of those that wait for one."""
        return len(self._held.get(holder, ()))

    def load(self, holder: Hashable) -> int:
        """Tokens outstanding at one holder: prompts and longest completions."""
        return self._load.get(holder, 0)

    def add(self, request: Request) -> None:
        """A new request; it waits for a holder. Raises EngineError: its id is outstanding."""
        if request.request_id in self._entries:
            raise EngineError(f"request: {request.request_id}: is outstanding already; give each an id of its own")
        entry = self._entries[request.request_id] = Entry(request)
        self._hold(entry, None)

    def send(self, request_ids: Iterable[str], holder: Hashable, now: float = 0.0) -> None:
        for name in request_ids:
            entry = self._entries[name]
            self._move(entry, holder)
            self._sent += 1
            entry.place, entry.since, entry.expired_at = self._sent, now, None

    def abort(self, request_ids: Collection[str] | None = None) -> dict[Hashable, list[str]]:
        """End requests, all with None; unknown ids are ignored. Returns what is to be aborted at which holder.

        A request without a holder is ready at once, without tokens.
        """
        told: dict[Hashable, list[str]] = {}
        for name in list(self._entries) if request_ids is None else request_ids:
            entry = self._entries.get(name)
            if entry is None:
                continue
            entry.aborted = True
            if entry.holder is None:
                self._end(entry, Completion(name, [], [], "abort"))
            else:
                told.setdefault(entry.holder, []).append(name)
        return told

    def arrive(self, holder: Hashable, completion: Completion) -> bool:
        """A completion from a holder; returns whether it belongs to a request of this holder."""
        entry = self._entries.get(completion.request_id)
        if entry is None or entry.holder != holder:
            return False
        self._made_room[holder] = min(entry.place, self._made_room.get(holder, entry.place))
        unasked = completion.finish_reason == "abort" and not entry.aborted
        if unasked and (entry.expired_at is None or self._comes_again(entry, completion)):
            self._move(entry, None)
        else:
            self._end(entry, completion)
        return True

    def release(self, holder: Hashable, request_ids: Iterable[str] | None = None) -> None:
        """A holder gives requests back, all with None: they wait again, with their ids and seeds but no tokens."""
        held = self._held.get(holder, {})
        for name in list(held) if request_ids is None else request_ids:
            entry = held.get(name)
            if entry is None:
                continue
            if entry.aborted:
                self._end(entry, Completion(name, [], [], "abort"))
            else:
                self._move(entry, None)

    def remove(self, holder: Hashable, request_ids: Iterable[str] | None = None) -> list[str]:
        """Forget requests of a holder that will not come back, all with None; returns the ids of those it had."""
        held = self._held.get(holder, {})
        names = [name for name in (list(held) if request_ids is None else request_ids) if name in held]
        for name in names:
            self._let_go(self._entries.pop(name))
        return names

    def overdue(self, now: float) -> tuple[dict[Hashable, list[str]], dict[Hashable, list[str]]]:
        """What exceeds its time limit, by holder: ids to abort now, and ids whose abort had no effect for `grace_s`.

        To be called every now and then: what makes room between two calls begins the time of others at the second.
        """
        late: dict[Hashable, list[str]] = {}
        deaf: dict[Hashable, list[str]] = {}
        for name, entry in self._entries.items():
            if entry.holder is None:
                continue
            if entry.expired_at is not None:
                if now - entry.expired_at > self.grace_s:
                    deaf.setdefault(entry.holder, []).append(name)
            elif entry.place > self._made_room.get(entry.holder, entry.place):
                entry.since = now
            elif now - entry.since > self.limit_s:
                entry.expired_at = now
                late.setdefault(entry.holder, []).append(name)
        self._made_room.clear()
        return late, deaf

    def postpone(self, seconds: float) -> None:
        """Time limits do not run during a pause."""
        for entry in self._entries.values():
            entry.since += seconds

    def _comes_again(self, entry: Entry, completion: Completion) -> bool:
        """Whether an expired request is sampled once more; otherwise it ends as "error" with the tokens it has."""
        begun = bool(completion.token_ids)
        self.late += begun
        if begun and entry.tries >= MAX_TRIES:
            completion.finish_reason = "error"
            return False
        entry.tries += begun  # one that never had its turn is not at fault
        return True

    def _end(self, entry: Entry, completion: Completion) -> None:
        del self._entries[entry.request.request_id]
        self._let_go(entry)
        self.ready.append(completion)

    def _move(self, entry: Entry, holder: Hashable) -> None:
        self._let_go(entry)
        self._hold(entry, holder)

    def _hold(self, entry: Entry, holder: Hashable) -> None:
        entry.holder = holder
        self._held.setdefault(holder, {})[entry.request.request_id] = entry
        self._load[holder] = self._load.get(holder, 0) + size_of(entry.request)

    def _let_go(self, entry: Entry) -> None:
        held = self._held[entry.holder]
        del held[entry.request.request_id]
        self._load[entry.holder] -= size_of(entry.request)
        if not held:
            del self._held[entry.holder], self._load[entry.holder]
