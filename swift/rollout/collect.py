"""One round of rollouts: launches go in, completed and scored groups come out, the same on every rank.

    prepare -> sample -> finish

Engines share a round (`EngineShare`): each takes a consecutive part of its completions, whole groups where that
divides evenly. Rank 0 scores. A group that its engine samples goes to the reward workers the moment its last
completion ends, while the others still decode. Completions that an engine gave up are excluded from training and from
the statistics of their group, with the reason.

`sample` touches the engine and the reward workers only, so it may run on another thread than the trainer's; `prepare`
and `finish` are collective and belong to the main thread.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from swift.errors import EngineError
from swift.rollout.batch import rank_slice
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.request_limit import generate_within
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


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Which part of every round the engine of this rank samples: part `index` of `count` equal ones.

    reports: this rank hands the completions on; with tensor parallelism over ranks only one of an engine's ranks does.
    """

    index: int = 0
    count: int = 1
    reports: bool = True


@dataclass(slots=True, eq=False)
class Round:
    """The groups of one round on their way, on one rank.

    requests: what this rank's engine samples. waiting: how many completions of each group this rank still waits for.
    failure: why it will not be completed.
    """

    groups: list[RolloutGroup]
    requests: list[Request]
    num_generations: int
    progress: TrainerProgress
    waiting: dict[str, int]
    done: dict[str, Completion] = field(default_factory=dict)
    futures: dict[str, Future[GroupScores]] = field(default_factory=dict)
    failure: Exception | None = None

    @property
    def complete(self) -> bool:
        """Whether every request of this rank has come back."""
        return len(self.done) == len(self.requests)

    def expects(self, request_id: str) -> bool:
        """Whether this rank asked for it and does not have it yet."""
        return self.waiting.get(request_id.rpartition("/")[0], 0) > 0 and request_id not in self.done


@dataclass(slots=True)
class RolloutCollector:
    """Samples and scores groups.

    engine: this rank's engine, or None. sampling: the training distribution; the seed of each sample is filled in.
    decode: token ids to the text that rewards see. share: what of a round the engine samples.
    around: entered by every rank around sampling, also by one without requests (a policy spread over ranks needs it).
    request_s: bound on each request, for an engine that has none of its own. progress: called for each completion.
    """

    engine: InferenceEngine | None
    sampling: SamplingParams
    seed: int
    decode: Callable[[Sequence[int]], str]
    scorer: Scorer
    collectives: Gatherer
    share: EngineShare | None = None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    request_s: float | None = None
    progress: Callable[[], None] = lambda: None
    _late: int = 0
    _late_told: int = 0

    def __post_init__(self) -> None:
        if self.share is None and self.engine is not None:
            self.share = EngineShare(self.collectives.rank, self.collectives.world_size)

    def run(
        self,
        launches: Sequence[Launch],
        *,
        num_generations: int,
        progress: TrainerProgress,
        timer: Callable[[str], Any],
        seed_namespace: str = "",
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Sample and score `num_generations` completions of each launch, here and now.

        Args:
            launches: the groups, the same on every rank.
            num_generations: G.
            progress: what reward functions see as `trainer_state`.
            timer: context manager factory for the phases "generate" and "reward".
            seed_namespace: keeps the seeds of evaluation apart from those of training.

        Returns:
            scored groups in launch order, on every rank, and the metrics of the reward functions (rank 0).
        """
        current = self.prepare(
            launches, num_generations=num_generations, progress=progress, seed_namespace=seed_namespace
        )
        with timer("generate"):
            self.sample(current)
        return self.finish(current, timer=timer)

    def prepare(
        self,
        launches: Sequence[Launch],
        *,
        num_generations: int,
        progress: TrainerProgress,
        seed_namespace: str = "",
    ) -> Round:
        """The round of these launches, and this rank's part of its requests."""
        groups = [RolloutGroup(one.group_id, one.index, one.launch, one.prompt) for one in launches]
        requests = [
            Request(
                f"{launch.group_id}/{sample}",
                launch.prompt.token_ids,
                self._sampling(launch, sample, seed_namespace),
            )
            for launch in launches
            for sample in range(num_generations)
        ]
        mine = [requests[i] for i in self._mine(len(groups), num_generations)]
        waiting = Counter(request.request_id.rpartition("/")[0] for request in mine)
        return Round(groups, mine, num_generations, progress, dict(waiting))

    def _mine(self, num_groups: int, num_generations: int) -> range:
        """Positions of this rank's requests: whole groups where these divide evenly."""
        if self.share is None:
            return range(0)
        return rank_slice(num_groups * num_generations, self.share.index, self.share.count)

    def sample(self, current: Round) -> None:
        """Sample this rank's requests; a failure is kept for `finish`, where every rank learns of it."""
        with self.around():
            if self.engine is None or not current.requests:
                return
            try:
                for completion in self._completions(self.engine, current.requests):
                    self.take(current, completion)
            except Exception as error:  # the other ranks wait in `finish` by now
                current.failure = error

    def _completions(self, engine: InferenceEngine, requests: Sequence[Request]) -> Iterator[Completion]:
        if self.request_s is None:
            return engine.generate(requests)
        return generate_within(engine, requests, self.request_s, self._book_late)

    def _book_late(self) -> None:
        self._late += 1

    def _new_late(self) -> int:
        """Requests of this rank that were aborted for their time since the last call."""
        late = self._late + getattr(self.engine, "late", 0)  # what an engine of another process counts itself
        new, self._late_told = late - self._late_told, late
        return new

    def take(self, current: Round, completion: Completion) -> None:
        """Add a finished completion; a group that is whole goes to the reward workers at once (rank 0).

        Raises:
            EngineError: nobody asked for it, or it came before.
        """
        if not current.expects(completion.request_id):
            raise stray(completion)
        self.progress()
        completion.text = self.decode(completion.token_ids)
        current.done[completion.request_id] = completion
        group_id = completion.request_id.rpartition("/")[0]
        current.waiting[group_id] -= 1
        if current.waiting[group_id] or self.collectives.rank != 0 or self.scorer.needs_whole_batch:
            return
        group = next(group for group in current.groups if group.group_id == group_id)
        ids = [f"{group_id}/{sample}" for sample in range(current.num_generations)]
        if all(one in current.done for one in ids):  # else another engine has a part of it
            group.completions = [current.done[one] for one in ids]
            current.futures[group_id] = self.scorer.submit(group, current.progress)

    def finish(self, current: Round, *, timer: Callable[[str], Any]) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Bring the parts of all ranks together and wait for the scores; see `run`.

        Raises:
            SwiftError: on every rank, what failed on any.
        """
        with timer("generate"):
            late = self._exchange(current)
        with timer("reward"):
            scores, metrics = self._agree(lambda: self._score(current))
        if late:
            metrics = {**metrics, "health/rollout_timeouts": float(late)}
        for group, score in zip(current.groups, scores, strict=True):
            score.excluded = [fault(one) or why for one, why in zip(group.completions, score.excluded, strict=True)]
            group.scores = score
        return current.groups, metrics

    def _score(self, current: Round) -> tuple[list[GroupScores], dict[str, float]]:
        """Wait for what was submitted while decoding, or submit now; rank 0 only."""
        groups, progress = current.groups, current.progress
        if self.scorer.needs_whole_batch:
            waiting = self.scorer.submit_batch(groups, progress)
        else:
            waiting = [current.futures.get(g.group_id) or self.scorer.submit(g, progress) for g in groups]
        scores = self.scorer.add_model_scores(groups, [future.result() for future in waiting])
        self.scorer.end_batch(groups)
        return scores, self.scorer.drain_metrics(groups)

    def _sampling(self, launch: Launch, sample: int, namespace: str) -> SamplingParams:
        seed = sample_seed(self.seed, namespace + launch.prompt.prompt_id, launch.launch, sample)
        return replace(self.sampling, seed=seed)

    def _exchange(self, current: Round) -> int:
        """Give every rank the completions of all ranks, or the first failure; returns how many requests were late."""
        everything: Any = current.done
        failure, late = current.failure, self._new_late()
        if self.collectives.active:
            reports = self.share is not None and self.share.reports
            parts = self.collectives.gather((_portable(failure), current.done if reports else {}, late))
            failure = next((error for error, _, _ in parts or [] if error is not None), None)
            merged = {name: completion for _, part, _ in parts or [] for name, completion in part.items()}
            total = sum(count for _, _, count in parts or [])
            failure, everything, late = self.collectives.broadcast((failure, merged, total))
        if failure is not None:
            if failure is not current.failure:
                failure.__cause__ = current.failure  # the traceback of this rank's own
            raise failure
        for group in current.groups:
            ids = [f"{group.group_id}/{sample}" for sample in range(current.num_generations)]
            if lost := [one for one in ids if one not in everything]:
                raise EngineError(f"engine: request {lost[0]}: it never came back; this is a defect of the engine")
            group.completions = group.completions or [everything[one] for one in ids]
        return late

    def _agree(self, work: Callable[[], Any]) -> Any:
        """Rank 0 works, every rank gets the result; a failure of rank 0 ends every rank with the same error."""
        outcome: Any = None
        if self.collectives.rank == 0:
            try:
                outcome = work()
            except Exception as error:  # travels to the other ranks, then is raised on all
                outcome = _portable(error) if self.collectives.active else error
        outcome = self.collectives.broadcast(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def stray(completion: Completion) -> EngineError:
    """What is wrong with a completion that nobody waits for."""
    return EngineError(
        f"engine: request {completion.request_id}: it came back twice, or nobody asked for it; "
        "this is a defect of the engine"
    )


def fault(completion: Completion) -> str | None:
    """Why the engine's part of a completion is not to be trained on: it was given up, or its log-probs do not fit."""
    if completion.finish_reason in ("error", "abort"):
        return f"engine: {completion.finish_reason}"
    if len(completion.logprobs) != len(completion.token_ids) or not all(map(math.isfinite, completion.logprobs)):
        return "engine: log-probs"
    return None


def _portable(error: Exception | None) -> Exception | None:
    """The error itself where it survives the way to another process, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is pickled
        return EngineError(f"{type(error).__name__}: {error}")
    return error


def launches_of(prompts: Iterable[Prompt]) -> list[Launch]:
    """Launches for evaluation: each prompt once, equal prompts told apart by their launch count."""
    earlier: Counter[str] = Counter()
    launches = []
    for index, prompt in enumerate(prompts):
        launches.append(Launch(index, earlier[prompt.prompt_id], prompt, 0))
        earlier[prompt.prompt_id] += 1
    return launches
