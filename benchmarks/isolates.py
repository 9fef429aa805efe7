"""Single phases, swift against TRL's GRPOTrainer: training on frozen rollouts, generation, start-up.

`python benchmarks/isolates.py` runs all three on the reference work, prints a table each and writes
benchmarks/results/isolates-<date>.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import record, swift_side, trl_side
from harness.contest import BENCHMARKS, alternate, processor_seconds, seconds, set_threads
from harness.ratios import ratio_of_medians, spread
from harness.work import Work, prepare

SIDES = {"swift": swift_side, "trl": trl_side}
START_TARGET_S = 8.0
START_LIMIT_S = 300.0


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    set_threads(options.threads)
    phases = {"train": train, "generate": generate, "start": start}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Work(folder=folder, size=options.size, completion_tokens=options.completion_tokens)
        prepare(work)
        for name, phase in phases.items():
            if options.only in (None, name):
                rows += phase(work, options)
    header = ["phase", "swift", "TRL", "ratio [95 %]", "swift min-max", "TRL min-max"]
    print(record.table(header, [cells(row) for row in rows]))
    print(f"recorded in {record.write('isolates', rows, options.results, work=work.name)}")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """The options; without any, the reference work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="measured turns of each side")
    parser.add_argument("--starts", type=int, default=3, help="measured starts of each side")
    parser.add_argument("--warmup", type=int, default=2, help="turns of each side before")
    parser.add_argument("--size", default="tiny", help="model of swift.models.tiny: nano 0.04M, tiny 0.6M, small 24M")
    parser.add_argument("--completion_tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, help="threads of either side; by default torch's own choice")
    parser.add_argument("--only", choices=["train", "generate", "start"], help="one phase")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    return parser.parse_args(words)


def compare(phase: str, unit: str, swift: list[float], trl: list[float], *, more_is_better: bool) -> dict[str, Any]:
    """One row; the ratio is above 1 where swift is better."""
    ratio = ratio_of_medians(swift, trl) if more_is_better else ratio_of_medians(trl, swift)
    return {
        "phase": phase,
        "unit": unit,
        "swift": spread(swift),
        "trl": spread(trl),
        "ratio": ratio.value,
        "ratio_95": [ratio.low, ratio.high],
    }


def compare_processor(phase: str, reports: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A row of seconds computed, which others on the machine hardly change."""
    computed = {side: seconds(reports[side], "processor_s") for side in reports}
    return compare(phase, "s", computed["swift"], computed["trl"], more_is_better=False)


def train(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward, backward, clipping and optimizer on frozen ids: no sampling, no rewards, no loop."""
    reports = alternate("train", work, pairs=options.pairs, warmup=options.warmup)
    took = {side: seconds(reports[side]) for side in reports}
    rate = {side: [r["tokens"] / r["seconds"] for r in reports[side]] for side in reports}
    return [
        compare("train", "s", took["swift"], took["trl"], more_is_better=False),
        compare("train", "tok/s", rate["swift"], rate["trl"], more_is_better=True),
        compare_processor("train, processor", reports),
    ]


def generate(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The whole batch, and the batch with one token each: the first is prefill + decode, the second prefill."""
    reports = alternate("generate", work, pairs=options.pairs, warmup=options.warmup)
    prefill: dict[str, list[float]] = {}
    decode: dict[str, list[float]] = {}
    for side, turns in reports.items():
        prefill[side] = [r["prompt_tokens"] / r["prefill_s"] for r in turns]
        decode[side] = [
            (r["completion_tokens"] - work.num_completions) / max(1e-9, r["whole_s"] - r["prefill_s"]) for r in turns
        ]
    whole = {side: seconds(reports[side], "whole_s") for side in reports}
    return [
        compare("generate", "s", whole["swift"], whole["trl"], more_is_better=False),
        compare("prefill", "tok/s", prefill["swift"], prefill["trl"], more_is_better=True),
        compare("decode", "tok/s", decode["swift"], decode["trl"], more_is_better=True),
    ]


def start(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """From the command to its first finished optimizer step, in a fresh process each time."""
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(options.starts + 1):
        for side, module in SIDES.items():
            wall_s, cpu_s = start_once(work, module)
            if number:  # the first fills the disk cache
                wall[side].append(wall_s)
                cpu[side].append(cpu_s)
    row = compare("start", "s", wall["swift"], wall["trl"], more_is_better=False)
    met = {"target_s": START_TARGET_S, "target_met": row["swift"]["median"] < START_TARGET_S}
    return [{**row, **met}, compare("start, processor", "s", cpu["swift"], cpu["trl"], more_is_better=False)]


def start_once(work: Work, side: Any) -> tuple[float, float]:
    """Seconds from the start of a process until its first step is logged, and those it computed (any core).

    Raises:
        RuntimeError: it ended without a step, or took longer than `START_LIMIT_S`.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(side.start_command(work, folder), cwd=BENCHMARKS, stdout=output, stderr=output)
        try:
            while not side.first_step_done(folder):
                ended, took = process.poll() is not None, time.perf_counter() - began
                if (ended and not side.first_step_done(folder)) or took > START_LIMIT_S:
                    output.seek(0)
                    raise RuntimeError(f"no first step after {took:.0f} s:\n{output.read().decode()[-4000:]}")
                time.sleep(0.005)
            return time.perf_counter() - began, processor_seconds(process.pid)
        finally:
            process.terminate()
            process.wait()


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    digits = 0 if row["unit"] == "tok/s" else 3
    swift, trl = row["swift"], row["trl"]
    low, high = row["ratio_95"]
    return [
        f"{row['phase']}, {row['unit']}",
        f"{swift['median']:.{digits}f}",
        f"{trl['median']:.{digits}f}",
        f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]",
        f"{swift['min']:.{digits}f}-{swift['max']:.{digits}f}",
        f"{trl['min']:.{digits}f}-{trl['max']:.{digits}f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
