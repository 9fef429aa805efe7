"""How much of a step does `--async_generate true` hide? Real runs of `swift rlhf`, an engine in a process of its own.

    T_sync   generate, score, train in turns          T_async   the next batch is generated and scored while this trains
    bound    max(T_generate + T_reward, T_train)      no schedule of one batch ahead can be faster
    overlap efficiency = (T_sync - T_async) / (T_sync - bound)

Completions have long-tailed lengths and rewards take a random time; sizes are such that sampling and training take
about as long, which is where overlap matters most and is hardest. The learning rate is so small that no weight changes,
so both kinds of run sample the same tokens, and every step is compared with itself. They take turns. The script fails
when the median efficiency is below 0.85 or when the runs did not do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import record

from swift.bench.contest import set_threads
from swift.bench.ratios import spread
from swift.bench.work import Work, prepare

WANTED = 0.85
RUN_LIMIT_S = 300.0
WARMUP_STEPS = 2
END_TOKENS = [ord(letter) for letter in "aeinot"]
"""Any of these ends a completion: lengths of a random model are then geometric, 44 tokens on average."""

PLUGIN = '''"""A reward that takes {low_ms} to {high_ms} ms, as a judge would; how long depends on the group only."""

import asyncio
import random

from swift.plugin import AsyncORM, orms


class Judge(AsyncORM):
    async def __call__(self, completions, group_id, **kwargs):
        await asyncio.sleep(random.Random(group_id[0]).uniform({low_ms}, {high_ms}) / 1000)
        return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in completions]


orms["judge"] = Judge
'''


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    set_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(options, folder)
        pairs = [
            Pair(run(work, options, number, ahead=False), run(work, options, number, ahead=True))
            for number in range(options.pairs)
        ]
    row = summarise(pairs, options)
    print(record.table(HEADER, [cells(number, pair) for number, pair in enumerate(pairs, 1)]))
    print(f"overlap efficiency: median {row['efficiency']['median']:.3f} ({span(row['efficiency'])})")
    print(f"recorded in {record.write('overlap', [row], options.results)}")
    return verdict(row, enforce=not options.no_verdict)


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind, taken in turns")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each run")
    parser.add_argument("--size", default="tiny", help="model of swift.models.tiny: nano 0.04M, tiny 0.6M, small 24M")
    parser.add_argument("--groups", type=int, default=12, help="groups of 8 completions in a step")
    parser.add_argument("--completion_tokens", type=int, default=96, help="most tokens of a completion")
    parser.add_argument("--reward_ms", type=float, nargs=2, default=[0.0, 200.0], help="a group's reward takes so long")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--no_verdict", action="store_true", help="exit with 0 whatever comes out")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    return parser.parse_args(words)


def make_work(options: argparse.Namespace, folder: str) -> Work:
    """Model, prompts and reward."""
    work = Work(
        folder=folder,
        size=options.size,
        num_completions=8 * options.groups,
        completion_tokens=options.completion_tokens,
        lengths="natural",
    )
    prepare(work)
    low, high = options.reward_ms
    Path(work.plugin).write_text(PLUGIN.format(low_ms=low, high_ms=high), encoding="utf-8")
    path = Path(work.model) / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "eos_token_id": END_TOKENS}), encoding="utf-8")
    return work


def command(work: Work, options: argparse.Namespace, output_dir: str, *, ahead: bool) -> list[str]:
    """One run, synchronous or one batch ahead."""
    words = {
        "rlhf_type": "grpo",
        "model": work.model,
        "dataset": work.dataset,
        "external_plugins": work.plugin,
        "reward_funcs": "judge",
        "reward_workers": 1,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "beta": 0,
        "num_generations": work.num_generations,
        "per_device_train_batch_size": work.per_device,
        "gradient_accumulation_steps": work.accumulation,
        "max_length": 64,
        "max_completion_length": work.completion_tokens,
        "gradient_checkpointing": "false",
        "learning_rate": 1e-30,
        "max_steps": options.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "parity_check": "off",
        "add_version": "false",
        "output_dir": output_dir,
        "vllm_mode": "dedicated",
        "infer_backend": options.backend,
        "async_generate": str(ahead).lower(),
        "rollout_importance_sampling_mode": "none",
    }
    if options.backend == "vllm":
        words |= {"vllm_enforce_eager": "true", "vllm_max_num_seqs": 8 * options.groups}
    return [sys.executable, "-m", "swift", "rlhf", *(w for name, v in words.items() for w in (f"--{name}", str(v)))]


@dataclass(frozen=True, slots=True)
class Steps:
    """Median seconds over the steps of a run; `sampled` is what was trained on, in order.

    train_s: forward, backward, optimizer, logging: all that is neither waiting for samples nor publishing weights.
    """

    step_s: float
    generate_s: float
    reward_s: float
    sync_s: float
    train_s: float
    sampled: list[tuple[str, int, str]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A synchronous run and one with a batch ahead, one after the other."""

    sync: Steps
    ahead: Steps

    @property
    def bound_s(self) -> float:
        """What a step takes at least when generation and training run side by side."""
        return max(self.sync.generate_s + self.sync.reward_s, self.sync.train_s)

    @property
    def efficiency(self) -> float:
        """Share of what can be hidden that is."""
        return (self.sync.step_s - self.ahead.step_s) / (self.sync.step_s - self.bound_s)


def run(work: Work, options: argparse.Namespace, number: int, *, ahead: bool) -> Steps:
    """One run from its start to its end.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    folder = Path(work.folder) / f"{'ahead' if ahead else 'sync'}-{number}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(
        command(work, options, str(folder), ahead=ahead),
        env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{folder.name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return read(folder, last_step=options.steps)


def read(folder: Path, *, last_step: int) -> Steps:
    """The steps after the warm-up; the last one generates nothing ahead, so it does not count either."""
    rows = [row for row in json_rows(folder / "logging.jsonl") if WARMUP_STEPS < row.get("step", 0) < last_step]
    sampled = [
        (row["group_id"], row["index"], row["completion"]) for row in json_rows(folder / "completions.jsonl")
    ]  # fmt: skip
    phases = [[row.get(f"time/{name}", 0.0) for name in ("generate", "reward", "sync")] for row in rows]
    generate_s, reward_s, sync_s = (median(seconds) for seconds in zip(*phases, strict=True))
    return Steps(
        step_s=median(row["step_time"] for row in rows),
        generate_s=generate_s,
        reward_s=reward_s,
        sync_s=sync_s,
        train_s=median(row["step_time"] - sum(seconds) for row, seconds in zip(rows, phases, strict=True)),
        sampled=sampled,
    )


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file."""
    with path.open(encoding="utf-8") as file:  # not splitlines(): texts may hold line ends of other kinds
        for line in file:
            yield json.loads(line)


def summarise(pairs: list[Pair], options: argparse.Namespace) -> dict[str, Any]:
    """Everything measured, as one row."""
    figures = {
        "t_sync": [pair.sync.step_s for pair in pairs],
        "t_async": [pair.ahead.step_s for pair in pairs],
        "t_generate": [pair.sync.generate_s for pair in pairs],
        "t_reward": [pair.sync.reward_s for pair in pairs],
        "t_train": [pair.sync.train_s for pair in pairs],
        "t_weights": [pair.sync.sync_s for pair in pairs],
        "speedup": [pair.sync.step_s / pair.ahead.step_s for pair in pairs],
        "efficiency": [pair.efficiency for pair in pairs],
    }
    return {
        "backend": options.backend,
        "work": f"{options.size}, {8 * options.groups} x up to {options.completion_tokens} tokens",
        "reward_ms": options.reward_ms,
        "steps": options.steps,
        "same_samples": all(pair.sync.sampled == pair.ahead.sampled for pair in pairs),
        **{name: {**spread(values), "all": values} for name, values in figures.items()},
    }


HEADER = ["pair", "T_sync s", "T_async s", "T_generate s", "T_reward s", "T_train s", "T_weights s", "efficiency"]


def cells(number: int, pair: Pair) -> list[str]:
    """A line of the table."""
    sync = pair.sync
    values = (sync.step_s, pair.ahead.step_s, sync.generate_s, sync.reward_s, sync.train_s, sync.sync_s)
    return [str(number), *(f"{value:.3f}" for value in values), f"{pair.efficiency:.3f}"]


def span(values: dict[str, float]) -> str:
    """`min to max`."""
    return f"{values['min']:.3f} to {values['max']:.3f}"


def verdict(row: dict[str, Any], *, enforce: bool) -> int:
    """0 when the runs did the same work and enough of it was hidden."""
    failures = [] if row["same_samples"] else ["the runs did not sample the same completions"]
    if row["efficiency"]["median"] < WANTED:
        failures.append(f"overlap efficiency {row['efficiency']['median']:.3f}, wanted {WANTED}")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures and enforce else 0


if __name__ == "__main__":
    sys.exit(main())
