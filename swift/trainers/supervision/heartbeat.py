"""Heartbeats between ranks: every rank detects within a minute that another one is lost.

A rank that is stopped, swapped out or disconnected leaves the others in a collective until its timeout, which is half
an hour by default (a checkpoint on a slow disk may take long), or without end if they wait for rank 0. So each rank
writes a heartbeat into the rendezvous store from a thread, and reads those of the others. If a rank's heartbeat does
not change for `SILENT_S`, or the rank has ended with an error, this process ends too, with one line that names it. Time
is counted in reads of the heartbeats, not taken from a clock: if all processes are suspended together (a paused
container, a preempted job), no rank counts as lost.

    beat      "<count>|<host>|<pid>|<state>"  every BEAT_S
    "closed"  it has finished    "failed <code> <line>"  it has failed, with the exit code for the others

`state` is the phase in which a rank makes no progress, if it makes none (`swift.trainers.supervision.watchdog`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from swift.errors import (
    ConfigError,
    EngineError,
    Interrupted,
    NumericError,
    ResourceError,
    RewardError,
    SwiftError,
    end_process,
    first_line,
)
from swift.rendezvous import connect
from swift.trainers.distributed import Collectives

BEAT_S = 5.0
SILENT_S = 40.0
"""Longer than any pause of a healthy interpreter; with the launcher's reaction still below a minute."""
STORE_LIMIT_S = 5.0
KINDS = {kind.exit_code: kind for kind in (ConfigError, ResourceError, RewardError, NumericError)}
"""Exit code -> error that other ranks raise; any other code is an EngineError."""


class Heartbeat:
    """Watches the other ranks while it is entered; a no-op in a single process.

    Args:
        collectives: the ranks.
        beat_s: seconds between two beats.
        silent_s: seconds without a beat after which a rank counts as lost.

    Attributes:
        state: of this rank; travels with its beats.
        before_end: called before this process is ended because of another rank.
    """

    def __init__(self, collectives: Collectives, *, beat_s: float = BEAT_S, silent_s: float = SILENT_S) -> None:
        self.collectives, self.rank, self.is_main = collectives, collectives.rank, collectives.is_main
        self.beat_s = beat_s
        self.silent_s = silent_s
        self.state: Callable[[], str] = str
        self.before_end: Callable[[], None] = lambda: None
        self._closing = threading.Event()
        self._failing = False
        self._thread: threading.Thread | None = None
        self._store: Any = None
        # rank -> its last text, and the number of reads since it changed
        self._seen = {rank: ("", 0) for rank in range(collectives.world_size) if rank != collectives.rank}
        self._unreached = 0

    def __enter__(self) -> Heartbeat:
        if self._seen and os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
            self.collectives.watched = True
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
            threading.Thread(target=self._guard, name="heartbeat-guard", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.collectives.watched = False
        if self._thread is None:
            return
        if error is None or isinstance(error, Interrupted | KeyboardInterrupt):
            self._close("closed", self.silent_s)
        else:
            self.tell_failure(first_line(error), getattr(error, "exit_code", EngineError.exit_code))

    @contextlib.contextmanager
    def own_errors(self) -> Iterator[None]:
        """Let this rank end by its own NumericError, which all ranks raise, rather than by that of another rank."""
        try:
            yield
        except NumericError:
            self._failing = True
            raise

    def tell_failure(self, line: str, code: int = EngineError.exit_code) -> None:
        """Report to the others, from any thread, that this rank ends now: the exit code and the error's line."""
        self._close(f"failed {code} {line}", 3 * self.beat_s)

    def standing_still(self) -> str:
        """The other ranks that report no progress either, in one line; "" for none."""
        states = {rank: (text.split("|", 3) + [""] * 3)[3] for rank, (text, _) in self._seen.items()}
        return "; ".join(f"so did rank {rank} {state}" for rank, state in states.items() if state)

    def _close(self, text: str, limit_s: float) -> None:
        """Write the last text; rank 0, which holds the store, stays until the others have written theirs."""
        if self._thread is None or self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(2 * STORE_LIMIT_S)
        if self._store is None:  # lost, so no other rank can read it
            return
        if not self._say(text) or not self.is_main:
            return
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if all((self._read(rank) or "").startswith(("closed", "failed")) for rank in self._seen):
                return
            time.sleep(min(0.1, self.beat_s))

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
        """End this process if the store does not respond: after a broken connection the other thread may hang in it."""
        while not self._closing.wait(self.beat_s):
            self._unreached += 1
            if self._unreached * self.beat_s > self.silent_s and self._needs_store():
                self._end("rank 0", "cannot be reached")

    def _needs_store(self) -> bool:
        return not self.is_main and self._seen[0][0] != "closed"

    def _store_is_gone(self) -> bool:
        """Whether connections to its address are refused; a broken connection would time out instead."""
        if not self._needs_store():
            return False
        try:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(place, timeout=STORE_LIMIT_S).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def _ask(self, use: Callable[[Any], Any]) -> Any:
        """The result of `use` on the store; None if it is lost or slow, for which torch raises RuntimeErrors."""
        try:
            if self._store is None:
                self._store = connect(STORE_LIMIT_S)
            return use(self._store)
        except RuntimeError:
            self._store = None
            return None

    def _say(self, text: str) -> bool:
        """Write this rank's text; returns whether the store accepted it."""
        return bool(self._ask(lambda store: store.set(_key(self.rank), text) or True))

    def _read(self, rank: int) -> str | None:
        """The text of a rank, "" before its first; None if the store does not respond."""
        key = _key(rank)
        text: str | None = self._ask(lambda store: store.get(key).decode() if store.check([key]) else "")
        return text

    def _look(self) -> bool:
        """Read the heartbeats of the others; returns whether the store responded."""
        for rank, (last, looks) in self._seen.items():
            text = self._read(rank)
            if text is None:
                return False
            if text.startswith("failed ") and text == last:  # an error of all ranks ends this one within a beat
                _, code, line = text.split(" ", 2)
                self._end(f"rank {rank}", f"has failed: {line}", KINDS.get(int(code), EngineError))
            elif text == "closed" or text != last:
                self._seen[rank] = (text, 0)
            elif (looks + 1) * self.beat_s <= self.silent_s:
                self._seen[rank] = (text, looks + 1)
            else:
                _, host, pid, _ = text.split("|", 3) if text else ("", "?", "?", "")
                self._end(f"rank {rank}", f"gave no sign of life for {self.silent_s:.0f} s (process {pid} on {host})")
        return True

    def _end(self, who: str, what: str, kind: type[SwiftError] = EngineError) -> None:
        if not (self._closing.is_set() or self._failing):
            self.before_end()
            advice = "; look at its log, then resume from the last checkpoint (--resume_from_checkpoint last)"
            wrong = kind is ConfigError  # and would be so again
            end_process(kind(f"{who}: {what}; the other processes cannot go on without it{'' if wrong else advice}"))


def _key(rank: int) -> str:
    return f"swift/alive/{rank}"
