"""What the benchmark of dynamic sampling runs on: engines, prompts, and rewards of which half teach nothing."""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.demo import ROOT, demo_model
from harness.simulated import SimulatedEngine
from swift.rollout.collector import RolloutCollector
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.scheduler import RolloutScheduler
from swift.types import GroupScores, Prompt, Request, RolloutGroup, SamplingParams, TrainerProgress

SEED = 0
PROMPTS = 4000
"""More than any run here draws."""
ONE_STEP_S, ROW_S = 2e-3, 4e-6
"""A step of the simulated engine with 256 rows takes half as long again as one with a single row."""
TYPICAL_TOKENS, MOST_TOKENS = 60.0, 400


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
        return RolloutScheduler(Stream(self.prompts), groups_per_batch=self.groups, batches_per_epoch=None)

    @property
    def unit(self) -> dict[str, Any]:
        """How groups become units."""
        return {
            "num_generations": self.generations,
            "generation_batches": 1,
            "num_global_batches": 1,
            "num_iterations": 1,
            "reward_weights": [1.0],
        }

    def close(self) -> None:
        """End the engine and the reward thread."""
        self.engine.close()
        self.scorer.pool.shutdown()


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
