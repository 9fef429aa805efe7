"""Every rank knows within a minute that another one is gone, whatever the collectives think.

A rank that is stopped, swapped out or cut off leaves the others in a collective until its time-out, which is half an
hour for good reasons (a checkpoint on a slow disk). So each rank writes a heartbeat into the rendezvous store from a
thread of its own, and reads those of the others. A rank whose beat stands still for `SILENT_S`, or that has ended with
an error, ends this process too, with one line that names it. Time is counted in looks at the beats, not read from a
clock: where all processes are suspended together (a container that is paused, a job that is preempted) nobody looks,
and nobody is lost.

    beat   "<count>|<host>|<pid>|<state>"  every BEAT_S    "closed"  it has finished    "failed <line>"  it has failed

`state` says where a rank stands still, if it does (`swift.trainers.supervision.stall`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

from swift.errors import EngineError, Interrupted, end_process
from swift.trainers.distributed import Collectives

BEAT_S = 5.0
SILENT_S = 40.0
"""Longer than any pause of a healthy interpreter; with the launcher's reaction still below a minute."""
STORE_LIMIT_S = 5.0


class RankWatch:
    """Watches the other ranks while it is entered; a no-op in a single process.

    Args:
        collectives: the ranks.
        beat_s: seconds between two beats.
        silent_s: seconds without a beat after which a rank counts as lost.

    Attributes:
        state: of this rank; travels with its beats.
        before_end: called before this process is ended for another rank's sake.
    """

    def __init__(self, collectives: Collectives, *, beat_s: float = BEAT_S, silent_s: float = SILENT_S) -> None:
        self.collectives = collectives
        self.beat_s = beat_s
        self.silent_s = silent_s
        self.state: Callable[[], str] = str
        self.before_end: Callable[[], None] = lambda: None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._looks_allowed = silent_s / beat_s
        self._seen: dict[int, tuple[str, int]] = {}
        self._unreached = 0

    def __enter__(self) -> RankWatch:
        if self.collectives.active and os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
            others = (rank for rank in range(self.collectives.world_size) if rank != self.collectives.rank)
            self._seen = dict.fromkeys(others, ("", 0))
            self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
            self._thread.start()
            threading.Thread(target=self._guard, name="rank-watch-guard", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join(2 * STORE_LIMIT_S)
        if self._store is None:  # it is gone, and with it those who would read
            return
        finished = error is None or isinstance(error, Interrupted | KeyboardInterrupt)
        line = "" if finished else (str(error).splitlines() or [""])[0] or type(error).__name__
        if self._say("closed" if finished else f"failed {line}") and self.collectives.is_main:
            self._linger(self.silent_s if finished else 2 * self.beat_s)

    def tell_failure(self, line: str) -> None:
        """Say to the others, from any thread, that this rank ends now, and why."""
        if self._thread is None or self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(2 * STORE_LIMIT_S)
        if self._say(f"failed {line}") and self.collectives.is_main:
            self._linger(2 * self.beat_s)

    def states(self) -> dict[int, str]:
        """Where the other ranks said that they stand still, "" where they did not."""
        texts = {rank: text for rank, (text, _) in self._seen.items()}
        return {rank: text.split("|", 3)[3] if text.count("|") >= 3 else "" for rank, text in texts.items()}

    def _linger(self, limit_s: float) -> None:
        """Rank 0 holds the store: it stays until the others have read the end of it, within limits."""
        deadline = time.monotonic() + limit_s
        others = [rank for rank in range(self.collectives.world_size) if rank != self.collectives.rank]
        while time.monotonic() < deadline:
            if all(self._read(rank).startswith(("closed", "failed")) for rank in others):
                return
            time.sleep(min(0.1, self.beat_s))

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        count = 0
        while True:
            if self._say(f"{count}|{socket.gethostname()}|{os.getpid()}|{self.state()}") and self._look():
                self._unreached = 0
            elif self._store_is_gone():
                self._end("rank 0", "has ended")
            count += 1
            if self._closing.wait(self.beat_s):
                return

    def _guard(self) -> None:
        """A store behind a cut cable does not fail, it is silent: the other thread may hang in it."""
        while not self._closing.wait(self.beat_s):
            self._unreached += 1
            if self._unreached > self._looks_allowed and self._needs_store():
                self._end("rank 0", "cannot be reached")

    def _needs_store(self) -> bool:
        return not self.collectives.is_main and self._seen[0][0] != "closed"

    def _store_is_gone(self) -> bool:
        """Whether nobody listens at its address any more: the kernel refuses at once, a cut cable is silent."""
        if not self._needs_store():
            return False
        try:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(place, timeout=STORE_LIMIT_S).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def _say(self, text: str) -> bool:
        """Write this rank's state; whether the store took it."""
        try:
            self._connect().set(_key(self.collectives.rank), text)
        except RuntimeError:  # torch's errors of a store that is gone or slow are all of this type
            self._store = None
            return False
        return True

    def _connect(self) -> Any:
        if self._store is None:
            import torch.distributed as dist

            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_LIMIT_S))
        return self._store

    def _look(self) -> bool:
        """Read the beats of the others; whether the store answered."""
        for rank, (last, looks) in self._seen.items():
            text = self._read(rank)
            if self._store is None:
                return False
            if text == "closed":
                self._seen[rank] = (text, 0)
            elif text.startswith("failed "):
                self._end(f"rank {rank}", f"has failed: {text.removeprefix('failed ')}")
            elif text != last:
                self._seen[rank] = (text, 0)
            elif looks + 1 <= self._looks_allowed:
                self._seen[rank] = (text, looks + 1)
            else:
                _, host, pid, _ = text.split("|", 3) if text else ("", "?", "?", "")
                self._end(f"rank {rank}", f"gave no sign of life for {self.silent_s:.0f} s (process {pid} on {host})")
        return True

    def _read(self, rank: int) -> str:
        try:
            store = self._connect()
            return store.get(_key(rank)).decode() if store.check([_key(rank)]) else ""
        except RuntimeError:
            self._store = None
            return self._seen[rank][0]

    def _end(self, who: str, what: str) -> None:
        if not self._closing.is_set():
            self.before_end()
            end_process(
                EngineError(
                    f"{who}: {what}; the other processes cannot go on without it; look at its log, then resume from "
                    "the last checkpoint (--resume_from_checkpoint last)"
                )
            )


def _key(rank: int) -> str:
    return f"swift/alive/{rank}"
