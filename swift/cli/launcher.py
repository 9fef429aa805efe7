"""Several training processes from one command: NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.

The launcher starts one worker per local rank with the variables that torch's `env://` rendezvous reads, so the same
program runs under it, under `torchrun` and under a scheduler. It promises:

    stop signals are forwarded to every worker, so that each can save; the third SIGTERM or SIGINT kills
    when a worker fails, the others get SIGTERM, and SIGKILL after `GRACE_S`
    the code and the error lines are those of the worker that failed first
    a run that ends because memory ran out in passes that cannot be made again starts again, with less in each
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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from swift.cli.boundary import EXIT_DIR
from swift.devices import allowed_cores, is_worker, launch_variables
from swift.errors import ConfigError, EngineError, Interrupted, ResourceError, join_problems
from swift.signals import INSISTING, answered

GRACE_S = 30.0
"""Seconds the other workers have to end after one failed: enough for an unfinished collective to notice."""
SAVE_GRACE_S = 600.0
"""Seconds they have when the run was interrupted: a large checkpoint may be on its way to the disk."""
POLL_S = 0.05
MULTI_NODE_PORT = 29500
PR_SET_PDEATHSIG = 1
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
    grace_s: float = GRACE_S,
    save_grace_s: float = SAVE_GRACE_S,
) -> int:
    """Runs `command` once per local rank and returns 0, or the code of the first worker that failed.

    Must be called on the main thread: it takes the signals of `swift.signals` for the time of the run. The lines of the
    failed worker are printed on stderr. On one node, a run whose workers say how it may go on (`Ending.again`) is
    started again; the launchers of several nodes do not know of each other's workers.
    """
    again: Sequence[str] = ()
    while True:
        code, again = _launch_once([*command, *again], plan, environ, grace_s=grace_s, save_grace_s=save_grace_s)
        if not again:
            return code
        anew = "" if "--resume_from_checkpoint" in again else ", from its beginning, as there is no checkpoint yet"
        sys.stderr.write(f"swift: note: the run starts again{anew}: {shlex.join(again)}\n")
        sys.stderr.flush()


def _launch_once(
    command: Sequence[str], plan: LaunchPlan, environ: Mapping[str, str], *, grace_s: float, save_grace_s: float
) -> tuple[int, Sequence[str]]:
    """One start of all workers: the code, and the flags to start the run again with."""
    port = _master_port(plan)
    with tempfile.TemporaryDirectory(prefix="swift-exit-") as records:
        start = [_worker_environment(plan, rank, port, environ, records) for rank in range(plan.local_ranks)]
        signals = _Signals()
        with answered(signals.take):
            workers = _start(command, start, first_rank=plan.node_rank * plan.local_ranks)
            try:
                failed = _supervise(workers, signals, grace_s=grace_s, save_grace_s=save_grace_s)
            finally:
                for worker in workers:
                    worker.kill_group()
        may_restart = plan.num_nodes == 1 and not signals.received
        return (0, ()) if failed is None else _report(failed, signals, Path(records), may_restart=may_restart)


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

    def send(self, signum: int) -> None:
        """To the worker alone: it ends its own children."""
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal or a debugger."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def kill_group(self) -> None:
        """To the worker and every child that stayed in its group."""
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


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


def _supervise(workers: list[_Worker], signals: _Signals, *, grace_s: float, save_grace_s: float) -> _Worker | None:
    """Waits for all workers; returns the one that failed first, or None."""
    running = list(workers)
    failed: _Worker | None = None
    deadline = float("inf")
    while running:
        signals.forward(running)
        ended = [worker for worker in running if worker.process.poll() is not None]
        running = [worker for worker in running if worker not in ended]
        losers = [worker for worker in ended if worker.process.returncode != 0]
        if losers and failed is None:
            failed = min(losers, key=_exit_rank)
            saving = bool(signals.received) or failed.process.returncode == Interrupted.exit_code
            deadline = time.monotonic() + (save_grace_s if saving else grace_s)
            for worker in [] if signals.received else running:
                worker.send(signal.SIGTERM)
                if worker.is_stopped():  # a stopped process gets SIGTERM only when it continues
                    worker.kill_group()
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


def _report(failed: _Worker, signals: _Signals, records: Path, *, may_restart: bool) -> tuple[int, Sequence[str]]:
    """Prints the lines of the failed worker; returns the code of the run, and the flags to start it again with."""
    code = failed.process.returncode
    written = sorted(records.glob("rank-*.json"), key=lambda path: path.stat().st_mtime_ns)
    endings = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in written}
    ending = next((one for one in endings.values() if one.get("again")), None)
    if ending is None and f"rank-{failed.rank}" in endings:  # those that lost another rank may be seen to end before it
        ending = next(iter(endings.values()))
    if ending is not None:
        again = ending.get("again", ()) if may_restart else ()
        sys.stderr.write(ending["text"] + ("" if again else ending.get("advice", "")))
        return ending["exit_code"], again
    if code >= 0:
        return code, ()
    if -code in signals.received:
        sys.stderr.write("swift: interrupted before there was anything to save\n")
        return 128 - code, ()
    name = signal.Signals(-code).name
    cause = "; the kernel does this when memory runs out" if -code == signal.SIGKILL else ""
    sys.stderr.write(f"swift: error: worker: rank {failed.rank}: killed by {name}{cause}\n")
    sys.stderr.write(next((other["advice"] for other in endings.values() if other.get("advice")), ""))
    return EngineError.exit_code, ()
