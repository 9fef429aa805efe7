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
random one of 0.6M in vLLM. The script fails when the median unit takes more than 0.6 times as long as with batches, in
`simulated` or in `transformers-tail`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import page, record
from harness.demo import ROOT, demo_model
from harness.simulated import SimulatedEngine

from swift.bench.contest import set_threads
from swift.bench.ratios import ratio_of_medians, spread
from swift.rollout.collect import RolloutCollector
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.pipeline import PipelineConfig, RolloutPipeline, ScoredRound
from swift.rollout.scheduler import RolloutScheduler
from swift.rollout.units import UnitConfig, UnitMaker
from swift.rollout.weight_sync.publisher import WeightPublisher
from swift.types import GroupScores, Prompt, Request, RolloutGroup, SamplingParams, TrainerProgress

WANTED = 0.6
JUDGED = ("simulated", "transformers-tail")
MAX_RESAMPLE_TIMES = 3
SEED = 0
PROMPTS = 4000
"""More than any run here draws."""
ONE_STEP_S, ROW_S = 2e-3, 4e-6
"""A step of the simulated engine with 256 rows takes half as long again as one with a single row."""
TYPICAL_TOKENS, MOST_TOKENS = 60.0, 400


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


def teaches(prompt_id: str) -> bool:
    """Half of the prompts, by a hash."""
    return hashlib.blake2b(prompt_id.encode(), digest_size=1).digest()[0] < 128


class Scorer:
    """Groups of half of the prompts get equal rewards, the others two different ones; scored on another thread."""

    needs_whole_batch = False

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def submit(self, group: RolloutGroup, progress: TrainerProgress) -> Future[GroupScores]:
        """Score a finished group off the main thread."""
        return self.pool.submit(self._score, group)

    @staticmethod
    def _score(group: RolloutGroup) -> GroupScores:
        differ, size = teaches(group.prompt.prompt_id), len(group.completions)
        return GroupScores([[float(differ and i % 2)] for i in range(size)], [None] * size)

    def submit_batch(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> list[Future[GroupScores]]:
        """Score the groups of a round off the main thread."""
        return [self.submit(group, progress) for group in groups]

    def add_model_scores(self, groups: Sequence[RolloutGroup], scores: Sequence[GroupScores]) -> list[GroupScores]:
        """There are no reward models."""
        return list(scores)

    def end_batch(self, groups: Sequence[RolloutGroup] | None = None) -> None:
        """Nothing to judge."""

    def drain_metrics(self, groups: Sequence[RolloutGroup] | None = None) -> dict[str, float]:
        """No metrics."""
        return {}


class OneRank:
    """The collectives of a single process."""

    rank, world_size, active = 0, 1, False

    def gather(self, value: Any) -> list[Any]:
        """Of one rank."""
        return [value]

    all_gather = gather

    def broadcast(self, value: Any) -> Any:
        """To nobody else."""
        return value


class Stream:
    """Prompts in order."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts, self.drawn = prompts, 0

    def next(self) -> tuple[Prompt, int, int]:
        """The next prompt."""
        epoch, row = divmod(self.drawn, len(self.prompts))
        self.drawn += 1
        return self.prompts[row], epoch, row

    def skip_to_epoch_end(self) -> None:
        """Never wanted here."""
        raise AssertionError("units draw as many prompts as they need")

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self.drawn = state["drawn"]


@dataclass(slots=True)
class Bench:
    """What both sides share: an engine, prompts, rewards, and the size of a unit."""

    engine: InferenceEngine
    prompts: list[Prompt]
    most_tokens: int
    groups: int = 16
    generations: int = 8
    scorer: Scorer = field(default_factory=Scorer)

    def collector(self) -> RolloutCollector:
        """The collector of one side."""
        sampling = SamplingParams(max_new_tokens=self.most_tokens, temperature=1.0)
        return RolloutCollector(self.engine, sampling, SEED, lambda ids: "", self.scorer, OneRank())

    def scheduler(self) -> RolloutScheduler:
        """The scheduler of one side."""
        return RolloutScheduler(Stream(self.prompts), groups_per_unit=self.groups, units_per_epoch=None)

    @property
    def unit(self) -> dict[str, Any]:
        """How groups become units."""
        return {
            "num_generations": self.generations,
            "generation_batches": 1,
            "num_windows": 1,
            "num_iterations": 1,
            "reward_weights": [1.0],
        }

    def close(self) -> None:
        """End the engine and the reward thread."""
        self.engine.close()
        self.scorer.pool.shutdown()


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
    windows = pipeline.windows(lambda: progress(step))
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
    units = UnitMaker(UnitConfig(**bench.unit))
    while True:
        kept: list[RolloutGroup] = []
        dull: list[RolloutGroup] = []
        launched, watch = scheduler.launched, Watch(bench.engine)
        for _ in range(1 + MAX_RESAMPLE_TIMES):
            groups, _ = collector.run(
                scheduler.launch(bench.groups),
                num_generations=bench.generations,
                progress=progress(step),
                timer=lambda phase: contextlib.nullcontext(),
            )
            for group in groups:
                (kept if units.informative(group) else dull).append(group)
            if len(kept) >= bench.groups:
                break
        made = units.make([*kept, *dull][: bench.groups], step)
        cost = watch.read()
        yield Turn(
            *cost,
            scheduler.launched - launched,
            len(made.unit.samples) // bench.generations,
            sum(lengths([*kept, *dull][bench.groups :])),
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


def simulated(slots: int) -> Bench:
    """A clock with long-tailed lengths."""
    engine = SimulatedEngine(slots=slots, fixed_s=ONE_STEP_S, row_s=ROW_S, typical_tokens=TYPICAL_TOKENS)
    return Bench(engine, [Prompt(f"p{i}", [], [i]) for i in range(PROMPTS)], MOST_TOKENS)


def transformers(groups: int = 16, generations: int = 8) -> Bench:
    """The demo's model and problems in the transformers engine."""
    from transformers import AutoModelForCausalLM

    from swift.rollout.engines.transformers import TransformersEngine

    with tempfile.TemporaryDirectory() as folder:
        path = demo_model(Path(folder))
        prompts = demo_prompts(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    ends = model.generation_config.eos_token_id
    engine = TransformersEngine(model, eos_token_ids=ends if isinstance(ends, list) else [ends])
    return Bench(engine, prompts, 48, groups, generations)


def transformers_tail(groups: int = 16, generations: int = 8, size: str = "tiny") -> Bench:
    """A random model of 0.6M parameters ("small": 24M) that never ends, with the lengths of the simulated engine."""
    from transformers import AutoModelForCausalLM

    from swift.models.tiny import build_tiny
    from swift.rollout.engines.transformers import TransformersEngine

    with tempfile.TemporaryDirectory() as folder:
        build_tiny(folder, size=size, seed=SEED)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    engine = long_tailed(TransformersEngine(model, eos_token_ids=()))
    return Bench(engine, tail_prompts(), MOST_TOKENS, groups, generations)


def long_tailed(engine: InferenceEngine) -> InferenceEngine:
    """Every request has a limit by its seed: exponential, cut at the longest."""
    submit = engine.submit

    def limited(request: Request) -> None:
        word = hashlib.blake2b(str(request.sampling.seed).encode(), digest_size=8).digest()
        drawn = -TYPICAL_TOKENS * math.log1p(-int.from_bytes(word, "big") / 2**64)
        sampling = replace(request.sampling, max_new_tokens=max(1, min(MOST_TOKENS, round(drawn))))
        submit(replace(request, sampling=sampling))

    engine.submit = limited  # type: ignore[method-assign]
    return engine


def tail_prompts() -> list[Prompt]:
    """For a model that knows no language."""
    return [Prompt(f"p{i}", [], [1 + i % 200, 1 + i // 200] * 8) for i in range(PROMPTS)]


def vllm(groups: int = 16, generations: int = 8) -> Bench:
    """The demo's model and problems in vLLM."""
    from transformers import GenerationConfig

    with tempfile.TemporaryDirectory() as folder:
        path = demo_model(Path(folder))
        prompts = demo_prompts(path)
        ends = GenerationConfig.from_pretrained(path).eos_token_id
        engine = vllm_engine(path, ends if isinstance(ends, list) else [ends], 128)
    return Bench(engine, prompts, 48, groups, generations)


def vllm_tail(groups: int, generations: int) -> Bench:
    """As `transformers_tail`, in vLLM."""
    from swift.models.tiny import build_tiny

    with tempfile.TemporaryDirectory() as folder:
        build_tiny(folder, size="tiny", seed=SEED)
        engine = vllm_engine(Path(folder), [], 512)
    return Bench(long_tailed(engine), tail_prompts(), MOST_TOKENS, groups, generations)


def vllm_engine(model: Path, ends: Sequence[int], max_model_len: int) -> InferenceEngine:
    """An engine of vLLM in this process; its weights stay as they are, so nothing is published."""
    from swift.rollout.engines.spec import EngineSpec, build_engine

    spec = EngineSpec(
        backend="vllm",
        model=str(model),
        eos_token_ids=tuple(ends),
        max_model_len=max_model_len,
        max_num_seqs=512,
        enforce_eager=True,
    )
    engine = build_engine(spec)
    engine.capabilities = replace(engine.capabilities, shares_weights=True)
    return engine


def demo_prompts(model: Path) -> list[Prompt]:
    """The demo's problems in a fixed order."""
    from transformers import AutoTokenizer

    sys.path.insert(0, str(ROOT / "examples" / "demo"))
    from problems import all_problems

    tokenizer = AutoTokenizer.from_pretrained(model)
    problems = sorted(all_problems(), key=lambda one: hashlib.blake2b(one.query.encode()).digest())[:PROMPTS]
    prompts = []
    for problem in problems:
        messages = [{"role": "user", "content": problem.query}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompts.append(Prompt(problem.query, messages, list(ids)))
    return prompts


BENCHES: dict[str, Callable[[], Bench]] = {
    "simulated": lambda: simulated(256),
    "simulated-full": lambda: simulated(128),
    "transformers": transformers,
    "transformers-few": lambda: transformers(4, 4),
    "transformers-tail": transformers_tail,
    "transformers-few-tail": lambda: transformers_tail(4, 4),
    "transformers-small-few-tail": lambda: transformers_tail(4, 4, "small"),
    "vllm": vllm,
    "vllm-few": lambda: vllm(4, 4),
    "vllm-few-tail": lambda: vllm_tail(4, 4),
}


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
    of_processor = ratio_of_medians(processor["streaming"], processor["batchwise"])
    return {
        "engine": name,
        "steps": steps,
        "warmup": warmup,
        "groups": bench.groups,
        "num_generations": bench.generations,
        "ratio": ratio.value,
        "ratio_95": [ratio.low, ratio.high],
        "ratio_of_means": fmean(seconds["streaming"]) / fmean(seconds["batchwise"]),
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
    "engine", "streaming s", "batchwise s", "ratio [95 %]", "of means", "processor", "decode steps", "launches",
    "dropped tokens", "length",
]  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table; pairs are streaming : batchwise."""
    a, b = row["streaming"], row["batchwise"]
    low, high = row["ratio_95"]
    return [
        row["engine"],
        f"{a['median']:.3f}",
        f"{b['median']:.3f}",
        f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]",
        f"{row['ratio_of_means']:.2f}",
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
        f"{row['engine']}: {row['ratio']:.2f} of the time of whole batches, wanted {WANTED}"
        for row in rows
        if row["engine"] in JUDGED and row["ratio"] > WANTED
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
