"""How long does learning from 64 completions take by the completions of a pass? What docs/memory.md says of passes.

    python benchmarks/pass_size.py [--only tiny tiny-prompt small small-prompt] [--rounds 9] [--threads 2]

The trainer of `swift rlhf` on frozen token ids, 8 prompts with 8 completions of 64 tokens: forward, backward, clipping
and optimizer. A trainer for each number of completions per pass, and one that chooses itself as a run without
`--mini_batch_size` does; they take turns in one process. Fails when the own choice takes more than 1.15 times as long
as the best.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from harness import page, record

SIZES = (4, 8, 16, 32, 64)
WORKS: dict[str, dict[str, Any]] = {
    "tiny": {"size": "tiny"},
    "tiny-prompt": {"size": "tiny", "prompt_tokens": 280},
    "small": {"size": "small"},
    "small-prompt": {"size": "small", "prompt_tokens": 280},
}
WORST = 1.15
WARMUP = 2


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    from swift.bench.contest import set_threads

    set_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            rows.append(measure(name, folder, options.rounds))
            print(record.table(header(), [cells(rows[-1])]), flush=True)
    path = record.write("pass_size", rows, options.results, threads=options.threads, rounds=options.rounds)
    print(f"recorded in {path}")
    if options.page is not None:
        page.write(options.page, "pass_size", page.table(header(), [cells(row) for row in rows]), path.name)
    failures = [row for row in rows if row["own"] > WORST * min(row["seconds"].values())]
    for row in failures:
        print(f"FAILED {row['work']}: its own choice takes {row['own']:.3f} s", file=sys.stderr)
    return int(bool(failures))


def measure(name: str, folder: str, rounds: int) -> dict[str, Any]:
    """Median seconds by completions per pass, and of the own choice."""
    from swift.bench.work import Work, prepare

    work = Work(folder=folder, **WORKS[name])
    prepare(work)
    turns = {str(size): learner(work, folder, size) for size in SIZES} | {"own": learner(work, folder, None)}
    seconds: dict[str, list[float]] = {size: [] for size in turns}
    for index in range(WARMUP + rounds):
        for size in sorted(turns, reverse=bool(index % 2)):
            began = time.perf_counter()
            turns[size]()
            seconds[size].append(time.perf_counter() - began)
    medians = {size: median(found[WARMUP:]) for size, found in seconds.items()}
    return {
        "work": work.name,
        "own": medians.pop("own"),
        "seconds": medians,
        "all_seconds": {size: [round(one, 4) for one in found] for size, found in seconds.items()},
    }


def learner(work: Any, folder: str, size: int | None) -> Callable[[], None]:
    """Learns once from the frozen completions of `work`, `size` of them per pass; None: as the planner chooses."""
    from swift.bench.rollouts import frozen
    from swift.bench.swift_side import backward, load_model, make_trainer

    trainer, rollouts = make_trainer(work, load_model(work), folder), frozen(work)
    if size is not None:
        fixed = {"slice_size": size, "merges_passes": False, "fits_memory": False}
        trainer.settings = dataclasses.replace(trainer.settings, **fixed)
    optimizer = trainer.create_optimizer()

    def learn() -> None:
        backward(trainer, rollouts)
        trainer._clip_grad_norm(trainer.model)
        optimizer.step()
        trainer.model.zero_grad()

    return learn


def header() -> list[str]:
    """Of the table."""
    return ["model, prompt and completion tokens", *map(str, SIZES), "own choice"]


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table, in milliseconds."""
    return [row["work"], *(f"{1e3 * row['seconds'][str(size)]:.0f} ms" for size in SIZES), f"{1e3 * row['own']:.0f} ms"]


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=9, help="turns of each that count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--page", type=Path, help="page to write the table into")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
