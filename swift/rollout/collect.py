"""One round of rollouts: launches go in, completed and scored groups come out, the same on every rank.

Each rank samples a consecutive part of the round's completions; rank 0 scores. In a single process a group goes
to the reward workers the moment its last completion ends, while the others still decode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swift.rollout.batch import rank_slice
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.scheduler import Launch
from swift.rollout.seeds import sample_seed
from swift.types import (
    Completion,
    GroupScores,
    Prompt,
    Request,
    RolloutGroup,
    SamplingParams,
    TrainerProgress,
)


class Scorer(Protocol):
    """The part of `swift.rewards.RewardPipeline` that a round needs."""

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a function must see the whole round in one call."""
        ...

    def submit(self, group: RolloutGroup, progress: TrainerProgress) -> Future[GroupScores]:
        """Score a finished group off the main thread."""
        ...

    def submit_batch(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> list[Future[GroupScores]]:
        """Score the groups of a round off the main thread."""
        ...

    def add_model_scores(self, groups: Sequence[RolloutGroup], scores: Sequence[GroupScores]) -> list[GroupScores]:
        """Fill in what reward models say, on the main thread."""
        ...

    def end_batch(self, groups: Sequence[RolloutGroup] | None = None) -> None:
        """Judge a finished round; raises when a function keeps failing."""
        ...

    def drain_metrics(self, groups: Sequence[RolloutGroup] | None = None) -> dict[str, float]:
        """What the functions report about these groups."""
        ...


class Gatherer(Protocol):
    """The collectives that a round needs; see `swift.trainers.distributed`."""

    rank: int
    world_size: int
    active: bool

    def gather(self, value: Any) -> list[Any] | None:
        """Values of all ranks, on rank 0."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, everywhere."""
        ...


@dataclass(slots=True)
class RolloutCollector:
    """Samples and scores groups.

    sampling: the training distribution; the seed of each sample is filled in.
    decode: token ids to the text that rewards see.
    """

    engine: InferenceEngine
    sampling: SamplingParams
    seed: int
    decode: Callable[[Sequence[int]], str]
    scorer: Scorer
    collectives: Gatherer

    def run(
        self,
        launches: Sequence[Launch],
        *,
        num_generations: int,
        progress: TrainerProgress,
        timer: Callable[[str], Any],
        seed_namespace: str = "",
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Sample and score `num_generations` completions of each launch.

        Args:
            launches: the groups, the same on every rank.
            num_generations: G.
            progress: what reward functions see as `trainer_state`.
            timer: context manager factory for the phases "generate" and "reward".
            seed_namespace: keeps the seeds of evaluation apart from those of training.

        Returns:
            scored groups in launch order, on every rank, and the metrics of the reward functions (rank 0).
        """
        requests = [
            Request(
                f"{launch.group_id}/{sample}",
                launch.prompt.token_ids,
                self._sampling(launch, sample, seed_namespace),
            )
            for launch in launches
            for sample in range(num_generations)
        ]
        mine = rank_slice(len(requests), self.collectives.rank, self.collectives.world_size)
        groups = [RolloutGroup(one.group_id, one.index, one.launch, one.prompt) for one in launches]
        by_id = {group.group_id: group for group in groups}
        futures: dict[str, Future[GroupScores]] = {}
        streaming = not self.collectives.active and not self.scorer.needs_whole_batch
        with timer("generate"):
            done: dict[str, Completion] = {}
            pending = {group.group_id: num_generations for group in groups}
            for completion in self.engine.generate([requests[i] for i in mine]):
                completion.text = self.decode(completion.token_ids)
                done[completion.request_id] = completion
                group_id = completion.request_id.rpartition("/")[0]
                pending[group_id] -= 1
                if streaming and pending[group_id] == 0:
                    group = by_id[group_id]
                    _fill(group, done, num_generations)
                    futures[group_id] = self.scorer.submit(group, progress)
            if not streaming:
                self._exchange(groups, done, num_generations)
        with timer("reward"):
            scores, metrics = self._agree(lambda: self._score(groups, futures, progress))
        for group, score in zip(groups, scores, strict=True):
            group.scores = score
        return groups, metrics

    def _score(
        self, groups: list[RolloutGroup], futures: dict[str, Future[GroupScores]], progress: TrainerProgress
    ) -> tuple[list[GroupScores], dict[str, float]]:
        """Wait for what was submitted while decoding, or submit now; rank 0 only."""
        waiting = [futures[g.group_id] for g in groups] if futures else self.scorer.submit_batch(groups, progress)
        scores = self.scorer.add_model_scores(groups, [future.result() for future in waiting])
        self.scorer.end_batch(groups)
        return scores, self.scorer.drain_metrics(groups)

    def _sampling(self, launch: Launch, sample: int, namespace: str) -> SamplingParams:
        seed = sample_seed(self.seed, namespace + launch.prompt.prompt_id, launch.launch, sample)
        return replace(self.sampling, seed=seed)

    def _exchange(self, groups: Sequence[RolloutGroup], done: dict[str, Completion], count: int) -> None:
        """Give every rank the completions of all ranks."""
        parts = self.collectives.gather(done)
        everything: dict[str, Completion] = {}
        for part in parts or []:
            everything.update(part)
        everything = self.collectives.broadcast(everything)
        for group in groups:
            _fill(group, everything, count)

    def _agree(self, work: Callable[[], Any]) -> Any:
        """Rank 0 works, every rank gets the result; a failure of rank 0 ends every rank with the same error."""
        outcome: Any = None
        if self.collectives.rank == 0:
            try:
                outcome = work()
            except Exception as error:  # travels to the other ranks, then is raised on all
                outcome = error
        outcome = self.collectives.broadcast(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _fill(group: RolloutGroup, done: dict[str, Completion], count: int) -> None:
    group.completions = [done[f"{group.group_id}/{sample}"] for sample in range(count)]


def launches_of(prompts: Iterable[Prompt]) -> list[Launch]:
    """Launches for evaluation: each prompt once, equal prompts told apart by their launch count."""
    earlier: Counter[str] = Counter()
    launches = []
    for index, prompt in enumerate(prompts):
        launches.append(Launch(index, earlier[prompt.prompt_id], prompt, 0))
        earlier[prompt.prompt_id] += 1
    return launches
