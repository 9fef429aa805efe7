"""The few collectives the trainer needs, as no-ops in a single process.

Objects travel over a gloo group of their own, so that nothing is copied to an accelerator. All calls of
one group are made on one thread, the main one but for `again`, by every rank, in the same order.

Rank 0 may work for long while the others are idle: it collects samples and rewards from engines. So the others begin a
collective only when rank 0 does. Until then they poll a count of its calls in the rendezvous store, without a time
limit: rank 0 holds the store, and `swift.trainers.supervision.heartbeat` detects whether it is alive.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swift.errors import first_line, is_out_of_memory
from swift.rendezvous import connect, reachable

CALLS = "swift/calls"
"""Key of the count of rank 0's calls."""
STORE_LIMIT_S = 60.0
SLOWEST_DISK_S = 24 * 3600.0
POLL_S = 0.05
"""Longest time between two polls of the count."""

T = TypeVar("T")


class Collectives:
    """Gather, broadcast and reduce over the data-parallel ranks. timeout_s: bound on a collective that has begun."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        self.active = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.active else 0
        self.world_size = dist.get_world_size() if self.active else 1
        self.is_main = self.rank == 0
        self.group: Any = None
        self.waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around every collective."""
        self.watched = False
        """Whether this process is ended when another one is lost; the same on every rank at every call."""
        self.waited_s = 0.0
        """Seconds that this process has been in collectives, most of which it waits for other ranks."""
        self._calls = 0
        self._store: Any = None
        if self.active:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def again(self) -> Collectives:
        """The same ranks in a group of their own, for another thread, which waits for any disk; a collective."""
        return Collectives(SLOWEST_DISK_S)

    def gather(self, value: Any) -> list[Any] | None:
        """On rank 0 the values of all ranks in rank order, elsewhere None."""
        if not self.active:
            return [value]
        values = [None] * self.world_size if self.is_main else None
        with self._call():
            dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order, everywhere."""
        return list(self.broadcast(self.gather(value)))

    def merged(self, mine: Mapping[int, T]) -> dict[int, T]:
        """The entries of all ranks, everywhere; equal keys have the value of the highest rank."""
        return {key: value for part in self.all_gather(mine) for key, value in part.items()}

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, everywhere."""
        if not self.active:
            return value
        box = [value]
        with self._call():
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise float64 sums over ranks, in rank order, the same everywhere."""
        if not self.active:
            return values
        mine = torch.tensor(values, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._call():
            dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts).sum(0).tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum([float(flag)])[0] > 0 if self.active else flag

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wait for all ranks at the end of the block; a failure of one inside of it is raised on every rank.

        The failure of the lowest rank counts. The block itself must not leave another rank alone in a collective.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # raised below, on all ranks alike
            if not self.active:
                raise
            failure = error
        if not self.active:
            return
        errors = self.gather(None if failure is None else _portable(failure)) or []
        first = self.broadcast(next((error for error in errors if error is not None), None))
        if failure is not None:
            raise failure  # with its own traceback
        if first is not None:
            raise first

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.active:
            with self._call():
                dist.barrier(group=self.group)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Begin when rank 0 makes this call too. Raises EngineError: its store, and so rank 0, is gone."""
        began = time.monotonic()
        with self.waiting():
            if self.watched:
                self._await_main()
            yield
        self.waited_s += time.monotonic() - began

    def _await_main(self) -> None:
        self._calls += 1
        with reachable():
            if self._store is None:
                self._store = connect(STORE_LIMIT_S)
            if self.is_main:
                self._store.add(CALLS, 1)
                return
            began = time.monotonic()
            while self._store.add(CALLS, 0) < self._calls:
                time.sleep(min(POLL_S, (time.monotonic() - began) / 20))


def _portable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be sent to other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a library's error does when it is taken apart or put together
        kind = torch.OutOfMemoryError if is_out_of_memory(error) else RuntimeError
        return kind(f"{type(error).__name__}: {first_line(error)}")
    return error
