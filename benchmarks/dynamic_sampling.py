"""What does streaming dynamic sampling save against drawing whole batches again? Half of all prompts teach nothing.

    python benchmarks/dynamic_sampling.py [--only simulated transformers] [--steps 40] [--results DIR]

Both sides want 16 groups of 8 completions that teach something, and nothing is trained on in between.

    streaming   `swift.rollout.RolloutPipeline` with `dynamic_sample`: what a run of `swift rlhf` does
    batchwise   draw 16 groups, keep those that teach something, draw 16 more until 16 are kept, at most 4 draws;
                what is left over is thrown away. Trainers that filter after a batch do this.

The same engine, the same collector, the same rewards, the same stream of prompts and seeds. The sides take turns, one
unit each. `simulated` has an engine with a clock in place of a model, and room for two draws at once; `simulated-full`
has room for one; `transformers` decodes the demo's model; `transformers-few` the same with 4 groups of 4, so few rows
that a decode step costs the same for twice as many; `vllm` and `vllm-few` are these two in vLLM. The demo's
completions are all about as long; those of `transformers-tail`, of a random model of the same size, are long-tailed as
in `simulated`; `transformers-small-few-tail` is a model of 24M parameters with 4 groups of 4, `vllm-few-tail` the
random one of 0.6M in vLLM. Units take one wave of completions or two, so a run takes what the mean says; the script
fails when the mean unit takes more than 0.6 times as long as with batches, in `simulated` or in `vllm-few-tail`, whose
decode steps cost about the same for any number of rows.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import page, record
from harness.halves import BENCHES, Bench, OneRank, teaches

from swift.bench.contest import set_threads
from swift.bench.ratios import ratio_of_means, ratio_of_medians, spread
from swift.rollout.batches import BatchConfig, BatchMaker
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.pipeline import PipelineConfig, RolloutPipeline
from swift.rollout.round_result import ScoredRound
from swift.rollout.scheduler import LaunchLog
from swift.rollout.weight_sync.publisher import WeightPublisher
from swift.types import RolloutGroup, TrainerProgress

WANTED = 0.6
JUDGED = ("simulated", "vllm-few-tail")
MAX_RESAMPLE_TIMES = 3


@dataclass(slots=True)
class Turn:
    """One unit: how long it took, and what became of what was sampled.

    decode_steps, decode_rows: of the engine; a row counts once for each step that it was in.
    lengths: of the completions that are trained on.
    informative_lengths: of all completions of this turn's informative groups, trained on now, later or never.
    """

    seconds: float
    processor_s: float
    decode_steps: int
    decode_rows: int
    launched: int
    trained_groups: int
    dropped_tokens: int
    lengths: list[int] = field(default_factory=list)
    informative_lengths: list[int] = field(default_factory=list)


def progress(step: int) -> TrainerProgress:
    """A run without an end."""
    return TrainerProgress(step, 10**6, 0.0)


def streaming(bench: Bench) -> Iterator[Turn]:
    """Units of the real pipeline."""
    rounds: list[ScoredRound] = []
    scheduler, step = bench.scheduler(), 0
    pipeline = RolloutPipeline(
        scheduler,
        bench.collector(),
        PipelineConfig(
            **bench.unit, num_generations_eval=1, dynamic_sample=True, max_resample_times=MAX_RESAMPLE_TIMES
        ),
        timer=lambda phase: contextlib.nullcontext(),
        observer=rounds.append,
        publisher=WeightPublisher(bench.engine, source=_no_weights, ranks=OneRank()),
    )  # fmt: skip
    windows = pipeline.steps(lambda: progress(step))
    try:
        while True:
            rounds.clear()
            launched, carried = scheduler.launched, {group.group_id for group in scheduler.carried}
            watch = Watch(bench.engine)
            unit = next(windows)
            cost = watch.read()
            [scored] = rounds
            used = [
                group for i, group in enumerate(scored.groups) if scored.used and scored.used[i * bench.generations]
            ]
            dropped = [group for group in scored.groups if group not in used]
            new = [group for group in [*used, *scheduler.carried] if group.group_id not in carried]
            yield Turn(
                *cost,
                scheduler.launched - launched,
                len(unit.samples) // bench.generations,
                sum(lengths(dropped)),
                lengths(used),
                lengths(group for group in new if teaches(group.prompt.prompt_id)),
            )
            step += 1
            pipeline.step_done(step)
    finally:
        pipeline.close()


def batchwise(bench: Bench) -> Iterator[Turn]:
    """Units of whole batches, drawn again until enough groups teach something."""
    collector, scheduler, step = bench.collector(), bench.scheduler(), 0
    units = BatchMaker(BatchConfig(**bench.unit))
    while True:
        kept: list[RolloutGroup] = []
        zero_variance: list[RolloutGroup] = []
        launched, watch = scheduler.launched, Watch(bench.engine)
        for _ in range(1 + MAX_RESAMPLE_TIMES):
            groups, _ = collector.run(
                scheduler.launch(LaunchLog(), bench.groups),
                num_generations=bench.generations,
                progress=progress(step),
                timer=lambda phase: contextlib.nullcontext(),
            )
            for group in groups:
                (kept if units.informative(group) else zero_variance).append(group)
            if len(kept) >= bench.groups:
                break
        made = units.make([*kept, *zero_variance][: bench.groups], step)
        cost = watch.read()
        yield Turn(
            *cost,
            scheduler.launched - launched,
            len(made.batch.samples) // bench.generations,
            sum(lengths([*kept, *zero_variance][bench.groups :])),
            lengths(kept[: bench.groups]),
            lengths(kept),
        )
        step += 1


def _no_weights() -> Any:
    raise AssertionError("the engine has the weights already")


class Watch:
    """Seconds by the clock, seconds that this process computed, decode steps and rows of an engine."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.began = self._now()

    def _now(self) -> tuple[float, float, int, int]:
        counters = self.engine.counters
        return time.perf_counter(), time.process_time(), counters.decode_steps, counters.decode_rows

    def read(self) -> tuple[float, float, int, int]:
        """What it has been since the watch was made."""
        wall, processor, steps, rows = (now - then for now, then in zip(self._now(), self.began, strict=True))
        return wall, processor, int(steps), int(rows)


def lengths(groups: Any) -> list[int]:
    """Tokens of every completion."""
    return [len(completion.token_ids) for group in groups for completion in group.completions]


def measure(name: str, steps: int, warmup: int) -> dict[str, Any]:
    """One engine, as a row."""
    bench = BENCHES[name]()
    sides = {"streaming": streaming(bench), "batchwise": batchwise(bench)}
    turns: dict[str, list[Turn]] = {side: [] for side in sides}
    try:
        for step in range(warmup + steps):
            for side in sorted(sides, reverse=bool(step % 2)):
                turns[side].append(next(sides[side]))
    finally:
        sides["streaming"].close()
        bench.close()
    seconds = {side: [turn.seconds for turn in of_side[warmup:]] for side, of_side in turns.items()}
    processor = {side: [turn.processor_s for turn in of_side[warmup:]] for side, of_side in turns.items()}
    ratio = ratio_of_medians(seconds["streaming"], seconds["batchwise"])
    of_means = ratio_of_means(seconds["streaming"], seconds["batchwise"])
    of_processor = ratio_of_medians(processor["streaming"], processor["batchwise"])
    return {
        "engine": name,
        "steps": steps,
        "warmup": warmup,
        "groups": bench.groups,
        "num_generations": bench.generations,
        "ratio": ratio.value,
        "ratio_95": [ratio.low, ratio.high],
        "ratio_of_means": of_means.value,
        "ratio_of_means_95": [of_means.low, of_means.high],
        "processor_ratio": of_processor.value,
        "processor_ratio_95": [of_processor.low, of_processor.high],
        **{side: summary(of_side, warmup) for side, of_side in turns.items()},
    }


def summary(turns: list[Turn], warmup: int) -> dict[str, Any]:
    """One side: seconds of a unit, and means over the units of what was sampled for it."""
    counted = turns[warmup:]
    trained = [tokens for turn in counted for tokens in turn.lengths]
    informative = [tokens for turn in counted for tokens in turn.informative_lengths]
    return {
        **spread([turn.seconds for turn in counted]),
        "mean": fmean(turn.seconds for turn in counted),
        "all_seconds": [round(turn.seconds, 4) for turn in turns],
        "all_processor_s": [round(turn.processor_s, 4) for turn in turns],
        "decode_steps": fmean(turn.decode_steps for turn in counted),
        "decode_rows": fmean(turn.decode_rows for turn in counted),
        "all_decode_steps": [turn.decode_steps for turn in turns],
        "launched": fmean(turn.launched for turn in counted),
        "trained": fmean(turn.trained_groups for turn in counted),
        "dropped_tokens": fmean(turn.dropped_tokens for turn in counted),
        "mean_length_trained": fmean(trained),
        "mean_length_informative": fmean(informative),
    }


HEADER = [
    "engine", "streaming s", "batchwise s", "ratio [95 %]", "of means [95 %]", "processor", "decode steps", "launches",
    "dropped tokens", "length",
]  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table; pairs are streaming : batchwise."""
    a, b = row["streaming"], row["batchwise"]
    low, high = row["ratio_95"]
    means = ratio_of_means(*(side["all_seconds"][row["warmup"] :] for side in (a, b)))
    return [
        row["engine"],
        f"{a['median']:.3f}",
        f"{b['median']:.3f}",
        f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]",
        str(means),
        f"{row['processor_ratio']:.2f}",
        f"{a['decode_steps']:.0f} : {b['decode_steps']:.0f}",
        f"{a['launched']:.1f} : {b['launched']:.1f}",
        f"{a['dropped_tokens']:.0f} : {b['dropped_tokens']:.0f}",
        f"{a['mean_length_trained']:.1f} of {a['mean_length_informative']:.1f}",
    ]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the page."""
    return page.table(HEADER, [cells(row) for row in rows])


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it must be."""
    return [
        f"{row['engine']}: {row['ratio_of_means']:.2f} of the time of whole batches in the mean, wanted {WANTED}"
        for row in rows
        if row["engine"] in JUDGED and row["ratio_of_means"] > WANTED
    ]


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(BENCHES), choices=list(BENCHES))
    parser.add_argument("--steps", type=int, default=40, help="units of each side that count")
    parser.add_argument("--warmup", type=int, default=12, help="units before; the informative rate is learned in them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no_verdict", action="store_true", help="exit with 0 whatever comes out")
    parser.add_argument("--page", type=Path, help="page to write the table into")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    return parser.parse_args(words)


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    set_threads(options.threads)
    rows = [measure(name, options.steps, options.warmup) for name in options.only]
    print(record.table(HEADER, [cells(row) for row in rows]))
    path = record.write("dynamic_sampling", rows, options.results)
    print(f"recorded in {path}")
    if options.page is not None:
        page.write(options.page, "dynamic_sampling", markdown(rows), path.name)
    failures = verdict(rows)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures and not options.no_verdict else 0


if __name__ == "__main__":
    sys.exit(main())
