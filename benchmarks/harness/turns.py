"""Runs a side's command and takes the time of each step from its log, as the lines of `logging.jsonl` arrive.

A turn is a whole run of a command. The time of the first step, which includes the start, is kept apart. Sides take
turns: A B, B A, A B. Peak memory is the largest resident memory of the command's first process plus what its children
had for themselves when a step was logged.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

import psutil

from harness.sides import Command, command
from harness.works import Work

RUN_LIMIT_S = 3600.0
LOOK_S = 0.004


@dataclass(slots=True)
class Run:
    """What one run of a command showed.

    start_s: from the command to its first logged step. seconds, processor_s, tokens: of each step behind it; processor
    seconds are those of all its processes. wall_s: until the command ended. device_mib: most that was taken on
    the GPU when a step was logged. log: medians of the command's own `time/*`.
    """

    start_s: float
    seconds: list[float]
    processor_s: list[float]
    tokens: list[float]
    peak_mib: float
    wall_s: float
    device_mib: float = 0.0
    log: dict[str, float] = field(default_factory=dict)


def alternate(work: Work, sides: Sequence[str], turns: int, ms_swift_python: str | None = None) -> dict[str, list[Run]]:
    """So many runs of each side, in turns; each turn has its own seed, the same for all sides."""
    row, runs = work.row, {side: [] for side in sides}
    steps = 1 + row.warmup + row.steps if row.steps else 1
    for turn in range(turns):
        for side in sides if turn % 2 == 0 else sides[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                wanted = command(side, work, Path(folder), steps, turn, ms_swift_python)
                runs[side].append(measure(wanted, steps, work))
    return runs


def measure(wanted: Command, steps: int, work: Work | None = None, *, limit_s: float = RUN_LIMIT_S) -> Run:
    """Run a command to its end and watch its log.

    Raises:
        RuntimeError: it failed, logged other steps than `steps`, or sampled other lengths than the work has.
    """
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        watched = Watched(wanted, output, on_gpu=work is not None and work.row.device == "cuda")
        try:
            rows = [(time.perf_counter(), *watched.usage(), row) for row in watched.steps(limit_s)]
        finally:
            watched.end()
        output.seek(0)
        tail = output.read().decode(errors="replace")[-4000:]
    if watched.exit_code or len(rows) != steps:
        name = " ".join(wanted.words[:3])
        raise RuntimeError(f"{name} ended with {watched.exit_code} after {len(rows)} of {steps} steps:\n{tail}")
    if work is not None:
        _check_lengths(work, [row for *_, row in rows])
    completions = work.row.num_completions if work is not None else 1
    counted = rows[1 + (work.row.warmup if work is not None else 0) :]
    before = rows[-len(counted) - 1 : -1] if counted else []
    return Run(
        start_s=rows[0][0] - began,
        seconds=[now[0] - then[0] for then, now in zip(before, counted, strict=True)],
        processor_s=[now[1] - then[1] for then, now in zip(before, counted, strict=True)],
        tokens=[row["completions/mean_length"] * completions for *_, row in counted],
        peak_mib=watched.peak_mib + max(row[2] for row in rows),
        device_mib=max(row[3] for row in rows),
        wall_s=time.perf_counter() - began,
        log=_own_times([row for *_, row in counted]),
    )


class Watched:
    """A command that runs, its log, and what it uses.

    Args:
        wanted: the command.
        output: where it prints.
        on_gpu: whether memory of the GPU is asked for, too.
    """

    def __init__(self, wanted: Command, output: IO[bytes], *, on_gpu: bool) -> None:
        self.folder, self.on_gpu = wanted.folder, on_gpu
        self.exit_code: int | None = None
        self.peak_mib = self.processor_s = 0.0
        self._process = subprocess.Popen(
            wanted.words, env=wanted.environment, cwd=wanted.folder, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def steps(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """The steps that the log gets, until the command ends."""
        path, offset, rest, deadline = None, 0, b"", time.monotonic() + limit_s
        while True:
            ended = self._ended()
            path = path or next(self.folder.rglob("logging.jsonl"), None)
            if path is not None:
                with path.open("rb") as file:
                    file.seek(offset)
                    content = file.read()
                offset += len(content)
                *lines, rest = (rest + content).split(b"\n")
                for row in map(json.loads, lines):
                    if "learning_rate" in row and "completions/mean_length" in row:
                        yield row
            if ended:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end after {limit_s:.0f} s")
            time.sleep(LOOK_S)

    def usage(self) -> tuple[float, float, float]:
        """Processor seconds of all its processes, MiB that its children have for themselves, MiB taken on the GPU."""
        seconds, unique = self.processor_s, 0.0
        if self.exit_code is None:
            parent = psutil.Process(self._process.pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.Error):  # it ended meanwhile
                    times = process.cpu_times()
                    seconds += times.user + times.system
                    unique += process.memory_full_info().uss / 2**20 if process is not parent else 0.0
        return seconds, unique, _taken_on_gpu() if self.on_gpu else 0.0

    def _ended(self) -> bool:
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid:
            self._process.returncode = self.exit_code = os.waitstatus_to_exitcode(status)
            self.peak_mib, self.processor_s = usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime
        return bool(pid)

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.exit_code is None:
            self._process.kill()
            self._process.wait()


def _taken_on_gpu() -> float:
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[0])


def _check_lengths(work: Work, rows: Sequence[dict[str, Any]]) -> None:
    wanted = work.row.completion_tokens
    for row in rows:
        if not work.row.per_token and row["completions/mean_length"] != wanted:
            raise RuntimeError(f"completions have {row['completions/mean_length']} tokens, the work has {wanted}")


def _own_times(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = {name for row in rows for name in row if name.startswith("time/")}
    return {name: median(float(row.get(name, 0.0)) for row in rows) for name in sorted(names)}


def figures(runs: Sequence[Run], *, per_token: bool) -> dict[str, Any]:
    """A side's figures: one value per run, which is what is compared, and all that was measured."""
    values: dict[str, Any] = {
        "start_s": [run.start_s for run in runs],
        "peak_mib": [run.peak_mib for run in runs],
    }
    if runs[0].seconds:
        for name in ("seconds", "processor_s"):
            values[name] = [_of_run(getattr(run, name), run.tokens, per_token) for run in runs]
        values["tokens_per_s"] = [sum(run.tokens) / sum(run.seconds) for run in runs]
    return {**values, "runs": [asdict(run) for run in runs]}


def _of_run(values: list[float], tokens: list[float], per_token: bool) -> float:
    return sum(values) / sum(tokens) if per_token else median(values)
