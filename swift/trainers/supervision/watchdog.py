"""A watchdog stops a hung run and says what stood still (`--stall_timeout`, exit code 4).

Whatever is completed counts as progress: a completion, a token of an engine, an outcome of a reward function, a bucket
of weights, a micro-batch, a collective, a phase of the step, bytes of a checkpoint. A thread looks every tick whether
there was any, and counts ticks without. Ticks, not seconds of a clock: whoever stops the whole process, or the machine,
stops the count as well, and so does a debugger's prompt.

    phase("train")    what the trainer's thread does; some phases have bounds of their own, which come first
    touch()           something was completed, from any thread
    waiting()         for other ranks, in a collective or for their messages: it is not this one that stands still

A wait inside of a library's own collective cannot be seen from here; the rank that ends then says that the others stood
still as well, and each leaves its stacks in its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from swift.errors import EngineError, SwiftError, end_process
from swift.rollout.engines.process import stack_of

TICK_S = 5.0
"""Longest time between two looks."""
REBUILD_S = 600.0
"""An engine in this process may take so long to be made anew: it loads its weights."""
REWARD_MARGIN_S = 150.0
"""A worker of the reward functions may take so long to be started, beyond the limit on a call."""
DUMP_S = 10.0
"""How long writing the stacks may take: the disk may be what stands still."""
DEBUGGERS = {"pdb", "bdb", "ipdb", "debugpy", "pydevd", "_pydevd_bundle"}


class Watchdog:
    """Ends the process when nothing moves; acts between `start` and `stop`.

    Args:
        limit_s: ticks without progress, in seconds.
        limits: phase -> longer bound, where waits are bounded otherwise.
        meters: give values that change while something moves; called on the watchdog's thread, must not wait.
        log_file: takes the stacks of all threads.
        rank: of this process.
        remarks: what else to say, one line each, "" for nothing: where engines are, who stands still too.
        farewell: told the error's line before the end, so that other ranks know.
        tick_s: between two looks.
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
        """What the trainer's thread does inside; the innermost counts."""
        self._phases.append(name)
        self.touch()
        try:
            yield
        finally:
            self._phases.pop()
            self.touch()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The trainer's thread waits for other ranks inside."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self.touch()

    def state(self) -> str:
        """For the other ranks: where this one has stood still for more than a look, "" when it moves or waits."""
        return f"{_where(self._phase())} for {self._still_s:.0f} s" if self._still_s > 2 * self.tick_s else ""

    @property
    def _still_s(self) -> float:
        """Seconds, in ticks, without progress."""
        return self._ticks * self.tick_s

    def _phase(self) -> str:
        return next(iter(self._phases[-1:]), "")  # another thread may end it meanwhile

    # --- the thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Watch from now on."""
        if self._thread is None:
            self._stopped.clear()
            self._ticks = 0
            self.touch()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None:
            thread.join(2 * DUMP_S)

    def _run(self) -> None:
        while not self._stopped.wait(self.tick_s):
            self.tick()

    def tick(self) -> None:
        """One look."""
        phase = self._phase()
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
        """Write the stacks of all threads to the log, unless the disk stands still."""
        thread = threading.Thread(target=self._dump, name="watchdog-dump", daemon=True)
        thread.start()
        thread.join(DUMP_S)

    def _dump(self) -> None:
        with contextlib.suppress(OSError), self.log_file.open("a", encoding="utf-8") as log:
            print(f"stacks of rank {self.rank}, {self._still_s:.0f} s after its last progress:", file=log, flush=True)
            faulthandler.dump_traceback(log, all_threads=True)


class WatchdogCallback(TrainerCallback):
    """Watches while Trainer trains, not while it loads what it resumes from."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is loaded."""
        self.watchdog.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step is done and saved."""
        self.watchdog.stop()


def _where(phase: str) -> str:
    return f"in phase {phase}" if phase else "between the phases of a step (data, logs)"


def _debugged() -> bool:
    """Whether a thread is in a debugger's hands."""
    names = {
        str(frame.f_globals.get("__name__")).partition(".")[0]
        for innermost in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(innermost)
    }
    return not names.isdisjoint(DEBUGGERS)


def _written() -> Any:
    """What this process has written so far, where the system counts it; a large file is progress before it is whole."""
    import psutil

    counters = getattr(psutil.Process(), "io_counters", lambda: None)()
    return counters and (counters.write_chars, counters.write_bytes)
