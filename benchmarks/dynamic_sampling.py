"""What does `--dynamic_sample true` save against drawing whole batches until enough groups have unequal rewards?

    python benchmarks/dynamic_sampling.py [--only transformers vllm-few] [--steps 20] [--turns 3] [--record]

Half of the prompts give equal rewards, so their groups teach nothing. Two commands take turns: one replaces such groups
while others decode, the other has no dynamic sampling. What whole batches would take is added up from the log of the
second: the seconds of its batches until as many informative groups are there as a step needs; left-overs are dropped.
Seconds are those of generation and reward. Lengths are long-tailed, and the learning rate changes no weight.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import record, tables
from harness.sides import SWIFT, Command, environment
from harness.turns import measure
from harness.works import Row, prepare

PROMPTS = 4000
WORK = Row(title="0.6M, lengths long-tailed to 256", completion_tokens=256, mean_tokens=60)
PLUGIN = '''"""The share of characters with an even code for prompts that teach, else 0."""

from swift.plugin import ORM, orms


class Half(ORM):
    def __call__(self, completions, teaches, **kwargs):
        rows = zip(completions, teaches, strict=True)
        return [t * sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text, t in rows]


orms["half"] = Half
'''


@dataclass(frozen=True, slots=True)
class Engine:
    """Who samples, and how many groups of how many completions a step trains on."""

    flags: str
    groups: int
    generations: int


VLLM = "--use_vllm true --vllm_enforce_eager true --vllm_mode colocate"
ENGINES = {
    "transformers": Engine("", 16, 8),
    "transformers-few": Engine("", 4, 4),
    "vllm": Engine(VLLM, 16, 8),
    "vllm-few": Engine(VLLM, 4, 4),
}
HEADER = ["engine", "dynamic s", "whole batches s", "ratio [95 %]", "groups sampled per step"]


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        rows = [one_row(name, ENGINES[name], Path(folder), options) for name in options.only]
    print(tables.aligned(HEADER, [cells(row) for row in rows]))
    print(f"written to {record.write(options.out, rows)}")
    if options.record:
        import page

        print(f"recorded in {record.merge(record.results_file('dynamic_sampling'), rows)}")
        page.main()
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--steps", type=int, default=20, help="of a run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    parser.add_argument("--out", type=Path, default=Path("output/bench/dynamic_sampling.json"))
    parser.add_argument("--record", action="store_true", help="put the rows into benchmarks/results and the docs")
    return parser.parse_args(words)


def one_row(name: str, engine: Engine, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of run in turns."""
    work = prepare(WORK, folder)
    (folder / "half.py").write_text(PLUGIN, encoding="utf-8")
    questions = [{"query": f"What is {i} + {i * 7 % 50}? ", "teaches": i * 7919 % 16 < 8} for i in range(PROMPTS)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions), encoding="utf-8")
    turns: dict[str, list[Any]] = {"dynamic": [], "whole": []}
    for turn in range(options.turns):
        for kind in turns:
            with tempfile.TemporaryDirectory() as output:
                words = command(work.model, folder, engine, Path(output), options.steps, turn, kind == "dynamic")
                measure(Command(words, environment("cpu"), Path(output)), options.steps)
                turns[kind].append(read(Path(output), engine, whole=kind == "whole"))
    found = {f"{kind}_s": [fmean(seconds) for seconds, _ in runs] for kind, runs in turns.items()}
    sampled = {kind: fmean(groups for _, groups in runs) for kind, runs in turns.items()}
    ratio = record.ratio(found["dynamic_s"], found["whole_s"])
    return {"row": name, "steps": options.steps, **found, "ratio": ratio, "groups_sampled": sampled}


def command(model: Path, folder: Path, engine: Engine, output: Path, steps: int, seed: int, dynamic: bool) -> list[str]:
    """A run of either kind."""
    words = (
        f"--rlhf_type grpo --loss_type dapo --model {model} --dataset {folder / 'questions.jsonl'} "
        f"--output_dir {output} --external_plugins {folder / 'half.py'} --reward_funcs half "
        f"--tuner_type full --torch_dtype float32 --num_generations {engine.generations} "
        f"--per_device_train_batch_size {engine.groups * engine.generations} --max_steps {steps} "
        f"--max_completion_length {WORK.completion_tokens} --learning_rate 1e-12 --seed {seed} --data_seed {seed} "
        f"--dynamic_sample {str(dynamic).lower()} --logging_steps 1 --save_strategy no --report_to none "
        f"--parity_check off --add_version false --gradient_checkpointing false --log_completions true {engine.flags}"
    )
    return [*SWIFT, "rlhf", *words.split()]


def read(output: Path, engine: Engine, *, whole: bool) -> tuple[list[float], float]:
    """Seconds until the groups of a step are there, for each step but the first, and the groups sampled for one."""
    rows = [row for row in _json_rows(output / "logging.jsonl") if "time/generate" in row]
    if whole:
        steps = list(whole_batches(rows[1:], engine.groups))
        return [seconds for seconds, _ in steps], engine.groups * fmean(draws for _, draws in steps)
    sampled = sum(1 for row in _json_rows(output / "completions.jsonl") if row["split"] == "train")
    return [_seconds(row) for row in rows[1:]], sampled / engine.generations / len(rows)


def whole_batches(rows: list[dict[str, Any]], groups: int) -> Iterator[tuple[float, int]]:
    """Seconds and batches of each step that is filled by whole batches."""
    seconds, kept, draws = 0.0, 0, 0
    for row in rows:
        seconds, draws = seconds + _seconds(row), draws + 1
        kept += round((1 - row["frac_reward_zero_std"]) * groups)
        if kept >= groups:
            yield seconds, draws
            seconds, kept, draws = 0.0, 0, 0


def _seconds(row: dict[str, Any]) -> float:
    return float(row["time/generate"]) + float(row.get("time/reward", 0.0))


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    ratio, sampled = row["ratio"], row["groups_sampled"]
    return [
        row["row"],
        f"{fmean(row['dynamic_s']):.3f}",
        f"{fmean(row['whole_s']):.3f}",
        f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
        f"{sampled['dynamic']:.1f} : {sampled['whole']:.1f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
