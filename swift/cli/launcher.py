"""Several training processes from one command: NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.

The launcher starts one worker per local rank with the variables that torch's `env://` rendezvous reads, so the same
program runs under it, under `torchrun` and under a scheduler. It promises:

    stop signals are forwarded to every worker, so that each can save; the third SIGTERM or SIGINT kills
    when a worker fails, the others get SIGTERM, and SIGKILL after `GRACE_S`
    the code and the error lines are those of the worker that failed first
    a run that ends because memory ran out in passes that cannot be made again starts again, with less in each
    an elastic run that loses a worker goes on with the others, and later with all (`swift.cli.crew`)
    no worker outlives the launcher, however that ends, and no child of a worker outlives the run
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from swift.cli.boundary import EXIT_DIR
from swift.cli.crew import Crew
from swift.devices import allowed_cores, is_worker, launch_variables
from swift.elastic import PROGRESS_FILE, Progress, read_progress
from swift.errors import ConfigError, EngineError, Interrupted, ResourceError, counted, join_problems
from swift.signals import INSISTING, answered

GRACE_S = 30.0
"""Seconds the other workers have to end after one failed: enough for an unfinished collective to notice."""
SAVE_GRACE_S = 600.0
"""Seconds they have when the run was interrupted: a large checkpoint may be on its way to the disk."""
TRACKER_S = 2.0
"""Seconds that Python's tracker has to remove the semaphores of processes that were killed."""
POLL_S = 0.05
MULTI_NODE_PORT = 29500
PR_SET_PDEATHSIG = 1
_RESUME = "--resume_from_checkpoint"
KILL_AT_SIGNAL = 3
"""The third SIGTERM or SIGINT kills the workers."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes of this node. `master_port` None: a free one is chosen at the start (one node only)."""

    local_ranks: int
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return self.local_ranks * self.num_nodes


def plan_launch(environ: Mapping[str, str]) -> LaunchPlan | None:
    """The launch that the variables describe; None if this process trains itself.

    It does so as a single process, and under an outer launcher; see `is_worker`.
    """
    if is_worker(environ):
        return None
    environ = launch_variables(environ)
    problems: list[str] = []
    local_ranks = _count("NPROC_PER_NODE", environ, 1, 1, problems)
    num_nodes = _count("NNODES", environ, 1, 1, problems)
    node_rank = _count("NODE_RANK", environ, 0, 0, problems)
    port = _count("MASTER_PORT", environ, MULTI_NODE_PORT, 1, problems)
    if port > 65535:
        problems.append(f"MASTER_PORT: {port}: no port; 1 to 65535")
    if num_nodes > 1:
        problems += [
            f"{name}: not set: NNODES={num_nodes} needs it on every node; "
            + ("0 to NNODES - 1" if name == "NODE_RANK" else "the address of node 0")
            for name in ("NODE_RANK", "MASTER_ADDR")
            if not environ.get(name)
        ]
    if node_rank >= num_nodes:
        problems.append(f"NODE_RANK: {node_rank}: not below NNODES={num_nodes}; 0 to {num_nodes - 1}")
    join_problems(problems)
    if local_ranks * num_nodes == 1:
        return None
    return LaunchPlan(
        local_ranks=local_ranks,
        num_nodes=num_nodes,
        node_rank=node_rank,
        master_addr=environ.get("MASTER_ADDR") or "127.0.0.1",
        master_port=port if num_nodes > 1 or environ.get("MASTER_PORT") else None,
    )


def world_size(environ: Mapping[str, str]) -> int:
    """Training processes on all nodes, for a worker and before the launch alike."""
    plan = plan_launch(environ)
    return plan.world_size if plan else _worker_count("WORLD_SIZE", environ)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Training processes on this node (L)."""
    plan = plan_launch(environ)
    return plan.local_ranks if plan else _worker_count("LOCAL_WORLD_SIZE", environ)


def _worker_count(name: str, environ: Mapping[str, str]) -> int:
    problems: list[str] = []
    count = _count(name, environ, 1, 1, problems) if is_worker(environ) else 1
    join_problems(problems)
    return count


def check_accelerators(ranks: int, accelerators: int) -> None:
    """Refuses more processes than accelerators; on a CPU any number is allowed."""
    if 0 < accelerators < ranks:
        raise ConfigError(
            f"NPROC_PER_NODE: {ranks}: more than the {accelerators} visible accelerators; "
            f"NPROC_PER_NODE={accelerators}, or make more of them visible (CUDA_VISIBLE_DEVICES)"
        )


def _count(name: str, environ: Mapping[str, str], default: int, least: int, problems: list[str]) -> int:
    """The variable as an integer of at least `least`."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        problems.append(f"{name}: {text}: not a whole number; at least {least}")
        return default
    if value < least:
        problems.append(f"{name}: {value}: too small; at least {least}")
        return default
    return value


def launch(
    command: Sequence[str],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    crew: Crew | None = None,
    grace_s: float = GRACE_S,
    save_grace_s: float = SAVE_GRACE_S,
) -> int:
    """Runs `command` once per local rank and returns 0, or the code of the first worker that failed.

    Must be called on the main thread: it takes the signals of `swift.signals` for the time of the run. The lines of the
    failed worker are printed on stderr. On one node, a run whose workers say how it may go on (`Ending.again`) is
    started again, and so is an elastic one with the workers that `crew` leaves it; the launchers of several nodes do
    not know of each other's workers.
    """
    again: Sequence[str] = ()
    while True:
        own = {} if crew is None else crew.environment()
        ranks = plan.local_ranks if crew is None else crew.count
        now = replace(plan, local_ranks=ranks), {**environ, **own}, crew
        end = _Launch([*command, *again], *now, grace_s, save_grace_s, _Signals()).run()
        if not end.again:
            return end.code
        smaller = _without_checkpoint(again)  # what did not fit into memory would not later either
        resume = again[len(smaller) :] if end.resume is None else end.resume
        again = [*(end.smaller or smaller), *resume]
        anew = "" if resume else ", from its beginning, as there is no checkpoint yet"
        words = f": {shlex.join(again)}" if again else ""
        sys.stderr.write(f"swift: note: {end.why}the run starts again{anew}{words}\n")
        sys.stderr.flush()


def _without_checkpoint(words: Sequence[str]) -> Sequence[str]:
    """The words that a start got besides the checkpoint, which are before it."""
    return words[: words.index(_RESUME)] if _RESUME in words else words


@dataclass(slots=True)
class _End:
    """The end of all workers of a start.

    again: whether the run starts again. resume: the checkpoint to start from as a flag, [] for none; None: the same as
    this time. smaller: flags with which it fits into memory. why: the reason, for a line.
    """

    code: int
    again: bool = False
    resume: Sequence[str] | None = None
    smaller: Sequence[str] = ()
    why: str = ""


@dataclass(slots=True)
class _Launch:
    """One start of all workers. recalled: whether they were stopped for a trial of all processes."""

    command: Sequence[str]
    plan: LaunchPlan
    environ: Mapping[str, str]
    crew: Crew | None
    grace_s: float
    save_grace_s: float
    signals: _Signals
    recalled: bool = False

    def run(self) -> _End:
        """Until all workers have ended."""
        plan, port = self.plan, _master_port(self.plan)
        with tempfile.TemporaryDirectory(prefix="swift-exit-") as records:
            progress = Path(records, "progress")
            start = [_worker_environment(plan, rank, port, self.environ, records) for rank in range(plan.local_ranks)]
            if self.crew is not None:
                for variables in start:
                    variables[PROGRESS_FILE] = str(progress)
            with answered(self.signals.take):
                workers = _start(self.command, start, first_rank=plan.node_rank * plan.local_ranks)
                try:
                    failed = self._supervise(workers, progress)
                finally:
                    for worker in workers:
                        worker.kill_group()
            if failed is None:
                return _End(0)
            going_on = self._elastic_end(workers, failed, read_progress(progress))
            may_restart = plan.num_nodes == 1 and not self.signals.received
            return going_on or _report(failed, self.signals, Path(records), may_restart=may_restart)

    def _supervise(self, workers: list[_Worker], progress: Path) -> _Worker | None:
        """Waits for all workers; returns the one that failed first, or None. They are stopped if a trial is due."""

        def recall() -> bool:
            if self.crew is None or self.recalled or not self.crew.is_due(read_progress(progress)):
                return False
            self.recalled = True
            return True

        return _supervise(workers, self.signals, recall, grace_s=self.grace_s, save_grace_s=self.save_grace_s)

    def _elastic_end(self, workers: Sequence[_Worker], failed: _Worker, progress: Progress) -> _End | None:
        """How an elastic run goes on after this start; None if it does not."""
        crew = self.crew
        if crew is None or self.signals.received:
            return None
        lost = [worker for worker in workers if worker.lost]
        code, why = failed.process.returncode, ""
        if not lost and self.recalled and code in (Interrupted.exit_code, -signal.SIGTERM):
            crew.take_back()
        elif crew.survives([worker.rank for worker in lost], progress):
            names = ", ".join(f"rank {worker.rank} ({worker.death})" for worker in lost)
            why = f"lost {names}; " if lost else f"{counted(len(workers), 'process')} ended before a checkpoint; "
        else:
            return None
        known = [_RESUME, progress.checkpoint] if progress.checkpoint else []
        resume = None if progress.checkpoint is None else known
        return _End(code, again=True, resume=resume, why=f"{why}with {counted(crew.count, 'process')} ")


def _master_port(plan: LaunchPlan) -> int:
    """The port of the rendezvous; on node 0 it has to be free."""
    if plan.node_rank != 0:
        return plan.master_port or MULTI_NODE_PORT
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", plan.master_port or 0))
        except OSError as error:
            raise ResourceError(
                f"MASTER_PORT: {plan.master_port}: cannot be used ({error.strerror}); choose another port"
            ) from error
        return probe.getsockname()[1]


def _worker_environment(
    plan: LaunchPlan, local_rank: int, port: int, environ: Mapping[str, str], records: str
) -> dict[str, str]:
    """The variables that torch, accelerate and swift's workers read."""
    return {
        "OMP_NUM_THREADS": str(max(1, len(allowed_cores()) // plan.local_ranks)),
        **launch_variables(environ),
        "RANK": str(plan.node_rank * plan.local_ranks + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.local_ranks),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(port),
        EXIT_DIR: records,
    }


@dataclass(slots=True)
class _Worker:
    """One process, leader of its own session so that a terminal's Ctrl-C comes through the launcher only."""

    rank: int
    process: subprocess.Popen[bytes]
    lost: bool = False
    """Whether it died of a signal that the launcher did not send, or does not answer any more."""
    sent: list[int] = field(default_factory=list)

    @property
    def death(self) -> str:
        """The signal that it died of."""
        return signal.Signals(-self.process.returncode).name

    def send(self, signum: int) -> None:
        """To the worker alone: it ends its own children."""
        if self.process.poll() is None:
            self.sent.append(signum)
            self.process.send_signal(signum)

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal or a debugger."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def kill_group(self) -> None:
        """To the worker and every child that stayed in its group."""
        if self.process.poll() is None:
            self.sent.append(signal.SIGKILL)
        _kill_group(self.process.pid)
        self.process.wait()


def _kill_group(group: int) -> None:
    """Kill the processes of a group; Python's tracker among them removes their semaphores first."""
    from swift.rollout.engines.guard import is_tracker

    deadline = time.monotonic() + TRACKER_S
    while time.monotonic() < deadline and any(map(is_tracker, members := _members(group))):
        for pid in (pid for pid in members if not is_tracker(pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's, by sudo
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[int]:
    import psutil

    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            found += [pid] if os.getpgid(pid) == group else []
    return found


def _start(command: Sequence[str], environments: list[dict[str, str]], first_rank: int) -> list[_Worker]:
    """All workers, or none: a failed start ends those already there."""
    workers: list[_Worker] = []
    die_with_parent = _death_signal(os.getpid())
    try:
        for offset, environment in enumerate(environments):
            process = subprocess.Popen(
                list(command),
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  # one prctl call, and the launcher has no threads
            )
            workers.append(_Worker(first_rank + offset, process))
    except OSError as error:
        for worker in workers:
            worker.kill_group()
        raise ResourceError(f"launcher: worker {len(workers)}: cannot be started ({error})") from error
    return workers


def _death_signal(parent: int) -> Callable[[], None] | None:
    """A function that makes the kernel kill the calling process when `parent` dies (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: the child only calls

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return die_with_parent


@dataclass(slots=True)
class _Signals:
    """The stop signals received so far; `pending` are not forwarded yet."""

    received: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)

    def take(self, signum: int, _: FrameType | None) -> None:
        """The signal handler."""
        self.received.append(signum)
        self.pending.append(signum)

    def forward(self, workers: Sequence[_Worker]) -> None:
        """Forwards the pending signals."""
        while self.pending:
            signum = self.pending.pop(0)
            num_insisting = sum(received in INSISTING for received in self.received)
            for worker in workers:
                worker.send(signal.SIGKILL if num_insisting >= KILL_AT_SIGNAL else signum)


def _supervise(
    workers: list[_Worker],
    signals: _Signals,
    recall: Callable[[], bool],
    *,
    grace_s: float,
    save_grace_s: float,
) -> _Worker | None:
    """Waits for all workers; returns the one that failed first, or None.

    Whenever `recall` says so, they get SIGTERM.
    """
    running = list(workers)
    failed: _Worker | None = None
    deadline = float("inf")
    while running:
        signals.forward(running)
        if recall():
            for worker in running:
                worker.send(signal.SIGTERM)
        ended = [worker for worker in running if worker.process.poll() is not None]
        running = [worker for worker in running if worker not in ended]
        losers = [worker for worker in ended if worker.process.returncode != 0]
        for worker in losers:
            code = worker.process.returncode
            worker.lost = -code not in worker.sent and (code == -signal.SIGKILL or (code < 0 and failed is None))
        if losers and failed is None:
            failed = min(losers, key=_exit_rank)
            saving = bool(signals.received) or failed.process.returncode == Interrupted.exit_code
            deadline = time.monotonic() + (save_grace_s if saving else grace_s)
            for worker in [] if signals.received else running:
                worker.send(signal.SIGTERM)
                if worker.is_stopped():  # a stopped process gets SIGTERM only when it continues
                    worker.kill_group()
                    worker.lost = True
        if time.monotonic() > deadline:
            for worker in running:
                worker.kill_group()
        if running:
            time.sleep(POLL_S)
    return failed


def _exit_rank(worker: _Worker) -> int:
    """Sort key of workers that ended together: documented exit codes, then 1, then signals."""
    code = worker.process.returncode
    return 0 if code > 1 else 1 if code == 1 else 2


def _report(failed: _Worker, signals: _Signals, records: Path, *, may_restart: bool) -> _End:
    """Prints the lines of the failed worker; returns the end of the run, perhaps with less in memory."""
    code = failed.process.returncode
    written = sorted(records.glob("rank-*.json"), key=lambda path: path.stat().st_mtime_ns)
    endings = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in written}
    ending = next((one for one in endings.values() if one.get("again")), None)
    if ending is None and f"rank-{failed.rank}" in endings:  # those that lost another rank may be seen to end before it
        ending = next(iter(endings.values()))
    if ending is not None:
        again = ending.get("again", ()) if may_restart else ()
        sys.stderr.write(ending["text"] + ("" if again else ending.get("advice", "")))
        smaller = _without_checkpoint(again)
        return _End(ending["exit_code"], bool(again), again[len(smaller) :], smaller)
    if code >= 0:
        return _End(code)
    if -code in signals.received:
        sys.stderr.write("swift: interrupted before there was anything to save\n")
        return _End(128 - code)
    name = signal.Signals(-code).name
    cause = "; the kernel does this when memory runs out" if -code == signal.SIGKILL else ""
    sys.stderr.write(f"swift: error: worker: rank {failed.rank}: killed by {name}{cause}\n")
    sys.stderr.write(next((other["advice"] for other in endings.values() if other.get("advice")), ""))
    return _End(EngineError.exit_code)
