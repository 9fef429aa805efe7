"""Step time against one property of the work at a time: `swift bench --scaling AXIS...`; a plot and a JSON file.

The base is the 0.6M model with the reference batch. An axis changes one property and leaves the others; the number of
completions and G change the number of prompts. "workers" is data-parallel training processes of one command that share
a step, each with one thread, so that it is measured by whole runs of swift alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.bench import record
from swift.bench.contest import alternate, seconds
from swift.bench.plots import draw
from swift.bench.ratios import spread
from swift.bench.swift_side import command
from swift.bench.work import Work, prepare

if TYPE_CHECKING:
    from swift.arguments.bench import BenchSettings

AXES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "completions": ("num_completions", "completions of a step", (16, 32, 64, 128, 256)),
    "length": ("completion_tokens", "tokens of a completion", (16, 32, 64, 128, 256)),
    "prompt": ("prompt_tokens", "tokens of a prompt", (32, 128, 512, 1024)),
    "group": ("num_generations", "completions of a prompt (G)", (2, 4, 8, 16, 32, 64)),
    "vocabulary": ("vocab_size", "vocabulary", (1024, 8192, 32_768, 131_072)),
    "workers": ("workers", "training processes", (1, 2)),
}
"""Name -> field of `Work`, label, values."""

RUN_STEPS = 5
"""Optimizer steps of a run for the axis "workers"; the first two do not count."""
RUN_LIMIT_S = 900.0


def run(args: BenchSettings, folder: str) -> int:
    """Measure each axis that is asked for, draw it and write its JSON; the exit code."""
    failed = False
    for axis in args.scaling:
        field, label, values = AXES[axis]
        points: list[dict[str, Any]] = []
        for value in values:
            try:
                points.append(measure(args, Work(folder=folder, **_base(args)), field, value))
            except RuntimeError as error:  # a side ended: the point is lost, the others need not be
                failed = True
                print(f"FAILED {axis} {value}: {error}", file=sys.stderr)
        if points:
            _write(args, axis, label, points)
    return 1 if failed else 0


def _write(args: BenchSettings, axis: str, label: str, points: list[dict[str, Any]]) -> None:
    path = record.write(f"scaling-{axis}", points, Path(args.results), axis=label)
    sides = [side for side in ("swift", *args.rivals) if any(side in point for point in points)]
    curves = {side: [(one["value"], one[side]["median"]) for one in points if side in one] for side in sides}
    plot = draw(path.with_suffix(".png"), label=label, curves=curves, unit="seconds of a step")
    for point in points:
        cells = ", ".join(f"{side} {point[side]['median']:.3f} s" for side in sides if side in point)
        print(f"{axis} {point['value']}: {cells}")
    print(f"recorded in {path} and {plot.name}")


def _base(args: BenchSettings) -> dict[str, Any]:
    chosen = {name: getattr(args, name) for name in ("size", "completion_tokens", "vocab_size")}
    return {name: value for name, value in chosen.items() if value is not None}


def measure(args: BenchSettings, base: Work, field: str, value: int) -> dict[str, Any]:
    """Seconds of a step at one point of an axis."""
    if field == "workers":
        prepare(base)
        return {"value": value, "swift": spread(_run_on(base, value))}
    work = at(base, field, value)
    prepare(work)
    sides = ["swift", *(["trl"] if "trl" in args.rivals else [])]
    warmup = 1 if args.warmup is None else args.warmup
    reports = alternate("step", work, pairs=args.pairs or 3, warmup=warmup, sides=sides)
    return {"value": value, **{side: spread(seconds(reports[side])) for side in sides}}


def at(base: Work, field: str, value: int) -> Work:
    """The base with one property changed; groups stay whole and micro-batches stay four."""
    changed: dict[str, Any] = {field: value}
    work = replace(base, **changed)
    return replace(work, per_device=max(work.num_completions // 4, 1))


def _run_on(work: Work, workers: int) -> list[float]:
    """Seconds of the steps of a run of `workers` processes; the batch is the same for any number of them.

    Raises:
        RuntimeError: the run failed, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = _for_workers(command(work, folder, max_steps=RUN_STEPS), work, workers)
        done = subprocess.run(
            [sys.executable, "-m", "swift", "rlhf", *words],
            env={**os.environ, "NPROC_PER_NODE": str(workers), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{workers} workers: exit {done.returncode}:\n{done.stderr[-3000:]}")
        (log,) = Path(folder).glob("v*/logging.jsonl")
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").split("\n") if line]
    return [row["step_time"] for row in rows if row.get("step", 0) > 2 and "step_time" in row]


def _for_workers(words: Sequence[str], work: Work, workers: int) -> list[str]:
    changed = list(words)
    place = changed.index("--gradient_accumulation_steps") + 1
    if work.accumulation % workers:
        raise ValueError(f"{workers} workers do not divide the {work.accumulation} micro-batches of a step")
    changed[place] = str(work.accumulation // workers)
    return changed
