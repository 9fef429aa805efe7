"""A watchdog stops a hung run and reports the stuck phase (`--stall_timeout`, exit code 4).

Progress is anything completed: a completion, a token of an engine, a result of a reward function, a bucket of weights,
a micro-batch, a collective, a phase of the step, bytes of a checkpoint. A thread checks for progress every tick and
counts the ticks without. It counts ticks, not seconds, so that suspending the process or the machine, or the prompt of
a debugger, does not count.

    phase("train")    current phase of the trainer's thread; some phases have bounds of their own, which come first
    touch()           something was completed, from any thread
    waiting()         the trainer's thread waits for other ranks, in a collective or for their messages

Waits inside a library's own collectives are not detected; the error then lists the other ranks without progress, and
each rank writes its stacks to its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from swift.errors import EngineError, SwiftError, end_process
from swift.rollout.engines.process import stack_of

TICK_S = 5.0
"""Longest time between two checks."""
REBUILD_S = 600.0
"""Time to create an engine in this process again, which loads its weights."""
REWARD_MARGIN_S = 150.0
"""Time to start a worker of the reward functions, beyond the limit on a call."""
DUMP_S = 10.0
"""Longest time to write the stacks, because the disk may be stuck."""
DEBUGGERS = {"pdb", "bdb", "ipdb", "debugpy", "pydevd", "_pydevd_bundle"}


class Watchdog:
    """Ends the process when there is no progress; active between `start` and `stop`.

    Args:
        limit_s: ticks without progress, in seconds.
        limits: phase -> longer bound, where waits are bounded otherwise.
        meters: return values that change with progress; called on the watchdog's thread, must not block.
        log_file: takes the stacks of all threads.
        rank: of this process.
        remarks: return further lines of the error, "" for none: states of engines, other ranks without progress.
        farewell: called with the error's line before the end, to inform other ranks.
        tick_s: between two checks.
        end: ends the process.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        limits: Mapping[str, float] | None = None,
        meters: Sequence[Callable[[], Any]] = (),
        log_file: Path,
        rank: int = 0,
        remarks: Sequence[Callable[[], str]] = (),
        farewell: Callable[[str], None] = lambda line: None,
        tick_s: float | None = None,
        end: Callable[[SwiftError], Any] = end_process,
    ) -> None:
        self.limit_s = limit_s
        self.limits = dict(limits or {})
        self.meters = meters
        self.log_file = log_file
        self.rank = rank
        self.remarks, self.farewell, self.end = list(remarks), farewell, end
        self.tick_s = min(TICK_S, limit_s / 10) if tick_s is None else tick_s
        self._ticks = 0
        self._phases: list[str] = []
        self._count = 0
        self._waits = 0
        self._seen: Any = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    # --- reported by the run ----------------------------------------------------------------------------------

    def touch(self) -> None:
        """Something was completed."""
        self._count += 1

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The phase of the trainer's thread inside the block; the innermost counts."""
        self._phases.append(name)
        self.touch()
        try:
            yield
        finally:
            self._phases.pop()
            self.touch()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The trainer's thread waits for other ranks inside the block."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self.touch()

    def state(self) -> str:
        """For the other ranks: the phase and time without progress, "" if there is progress or the thread waits."""
        return f"{_where(self.current)} for {self._still_s:.0f} s" if self._still_s > 2 * self.tick_s else ""

    @property
    def _still_s(self) -> float:
        """Seconds, in ticks, without progress."""
        return self._ticks * self.tick_s

    @property
    def current(self) -> str:
        """The phase of the trainer's thread; "" between two."""
        return next(iter(self._phases[-1:]), "")  # another thread may end it meanwhile

    # --- the thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._stopped.clear()
            self._ticks = 0
            self.touch()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None:
            thread.join(2 * DUMP_S)

    def _run(self) -> None:
        while not self._stopped.wait(self.tick_s):
            self.tick()

    def tick(self) -> None:
        """Check once for progress."""
        phase = self.current
        now = (self._count, [meter() for meter in self.meters], _written() if phase == "save" else None)
        if self._waits or now != self._seen:
            self._seen, self._ticks = now, 0
            return
        self._ticks += 1
        if self._ticks < math.ceil(max(self.limit_s, self.limits.get(phase, 0.0)) / self.tick_s):
            return
        if _debugged():
            self._ticks = 0
            return
        line = self._line(phase)
        self.dump()
        self.farewell(line)
        self.end(EngineError(line))

    def _line(self, phase: str) -> str:
        remarks = "".join(f"; {line}" for line in (remark() for remark in self.remarks) if line)
        return (
            f"--stall_timeout: {self.limit_s:g}: rank {self.rank} made no progress for {self._still_s:.0f} s "
            f"{_where(phase)}: its main thread is in {stack_of(None)}"
            f"{remarks}; all stacks are in {self.log_file}; resume from the last "
            "checkpoint (--resume_from_checkpoint last), or raise it if this is only slow"
        )

    def dump(self) -> None:
        """Write the stacks of all threads to the log, unless the disk is stuck."""
        thread = threading.Thread(target=self._dump, name="watchdog-dump", daemon=True)
        thread.start()
        thread.join(DUMP_S)

    def _dump(self) -> None:
        with contextlib.suppress(OSError), self.log_file.open("a", encoding="utf-8") as log:
            print(f"stacks of rank {self.rank}, {self._still_s:.0f} s after its last progress:", file=log, flush=True)
            faulthandler.dump_traceback(log, all_threads=True)


@dataclass(eq=False)
class WatchdogCallback(TrainerCallback):
    """Runs the watchdog while Trainer trains, not while it loads a checkpoint."""

    watchdog: Watchdog

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is loaded."""
        self.watchdog.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step is done and saved."""
        self.watchdog.stop()


def _where(phase: str) -> str:
    return f"in phase {phase}" if phase else "between the phases of a step (data, logs)"


def _debugged() -> bool:
    """Whether a debugger runs in a thread."""
    names = {
        str(frame.f_globals.get("__name__")).partition(".")[0]
        for innermost in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(innermost)
    }
    return not names.isdisjoint(DEBUGGERS)


def _written() -> Any:
    """Bytes that this process has written, if the system counts them: writing a large file is progress."""
    import psutil

    counters = getattr(psutil.Process(), "io_counters", lambda: None)()
    return counters and (counters.write_chars, counters.write_bytes)
