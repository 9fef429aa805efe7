"""One round of rollouts: launches go in, completed and scored groups come out, the same on every rank.

    prepare -> sample -> finish

Engines share a round (`EngineShare`): each takes a consecutive part of its completions, whole groups where that
divides evenly. Rank 0 scores. A group that its engine samples goes to the reward workers the moment its last
completion ends, while the others still decode. Completions that an engine gave up are excluded from training and from
the statistics of their group, with the reason.

`sample` touches the engine and the reward workers only, so it may run on another thread than the trainer's; `prepare`
and `finish` are collective and belong to the main thread.

With dynamic sampling a round has no fixed groups (`prepare_live`, `finish_live`): it draws launches while it is
sampled, until enough groups teach something (`swift.rollout.live`).
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
from functools import partial
from typing import Any, Protocol

from swift.errors import EngineError, SwiftError
from swift.rollout.admission import Admission
from swift.rollout.batch import rank_slice
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.live import Board, LiveRound, OtherRankFailed, Seat
from swift.rollout.request_limit import RequestClock, generate_within
from swift.rollout.saved_groups import (
    group_from_json,
    group_to_json,
    prompt_from_json,
    prompt_to_json,
    seen_from_json,
    seen_to_json,
)
from swift.rollout.scheduler import Intake, Launch, RolloutScheduler
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
    lockstep: other ranks hold parts of this engine, so all of them must give it the same requests at the same step.
    """

    index: int = 0
    count: int = 1
    reports: bool = True
    lockstep: bool = False


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
    def samples_here(self) -> bool:
        """Whether this rank has anything to sample."""
        return bool(self.requests)

    @property
    def complete(self) -> bool:
        """Whether every request of this rank has come back."""
        return len(self.done) == len(self.requests)

    @property
    def outstanding(self) -> list[str]:
        """Requests that have not come back."""
        return [one.request_id for one in self.requests if one.request_id not in self.done]

    def expects(self, request_id: str) -> bool:
        """Whether this rank asked for it and does not have it yet."""
        return self.waiting.get(request_id.rpartition("/")[0], 0) > 0 and request_id not in self.done


@dataclass(slots=True)
class RoundResult:
    """How a round ended, the same on every rank but for `dropped`.

    groups: to train on, those carried in included, in launch order. The rest is of dynamic sampling. carried: for the
    next unit. dropped: rank 0 only, for the log; `num_dropped` of them were scored, `num_excluded` had no score at all.
    failed: prompts of dropped groups on which every completion failed. launched, informative: of this round.
    carried_in: how many of `groups`, the first ones, were scored in an earlier round.
    """

    groups: list[RolloutGroup]
    metrics: dict[str, float]
    carried: list[RolloutGroup] = field(default_factory=list)
    dropped: list[RolloutGroup] = field(default_factory=list)
    failed: list[Prompt] = field(default_factory=list)
    launched: int = 0
    informative: int = 0
    num_dropped: int = 0
    num_excluded: int = 0
    carried_in: int = 0

    def sampled(self) -> list[RolloutGroup]:
        """The groups that this round sampled and scored itself; of dropped ones, those that this rank knows."""
        return [*self.groups[self.carried_in :], *self.carried, *self.dropped]

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe copy; of dropped groups what logs need."""
        return {
            "groups": [group_to_json(group) for group in self.groups],
            "metrics": self.metrics,
            "carried": [group_to_json(group) for group in self.carried],
            "dropped": [seen_to_json(group) for group in self.dropped],
            "failed": [prompt_to_json(prompt) for prompt in self.failed],
            "counts": [self.launched, self.informative, self.num_dropped, self.num_excluded, self.carried_in],
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> RoundResult:
        """The inverse of `to_json`."""
        groups, carried = ([group_from_json(group) for group in state[name]] for name in ("groups", "carried"))
        dropped = [seen_from_json(group) for group in state["dropped"]]
        failed = [prompt_from_json(prompt) for prompt in state["failed"]]
        return cls(groups, state["metrics"], carried, dropped, failed, *state["counts"])


@dataclass(slots=True)
class RolloutCollector:
    """Samples and scores groups.

    engine: this rank's engine, or None. sampling: the training distribution; the seed of each sample is filled in.
    decode: token ids to the text that rewards see. share: what of a round the engine samples.
    around: entered by every rank around sampling, also by one without requests (a policy spread over ranks needs it).
    request_s: bound on each request, for an engine that has none of its own. progress: called for each completion.
    board: messages between the ranks while they sample; needed for dynamic sampling on several. pulse: changes while
    this rank gets on. heard: called when another rank does, while this one waits for it.
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
    board: Board | None = None
    pulse: Callable[[], Any] = lambda: None
    heard: Callable[[], None] = lambda: None
    _live: LiveRound | None = None
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
                launch.prompt,
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

    def prepare_live(
        self,
        admission: Admission,
        scheduler: RolloutScheduler,
        intake: Intake,
        *,
        num_generations: int,
        progress: TrainerProgress,
        informative: Callable[[RolloutGroup], bool],
        failed: Callable[[RolloutGroup], bool] = lambda group: False,
    ) -> LiveRound:
        """A round of dynamic sampling.

        Args:
            admission: decides what is launched, kept and dropped.
            scheduler: where launches come from.
            intake: what the round begins with.
            num_generations: G.
            progress: what reward functions see as `trainer_state`.
            informative: whether a scored group teaches something.
            failed: whether every completion of a scored group failed, so that its prompt is tried again later.
        """

        def judged(group: RolloutGroup) -> bool:
            self._exclude_faults(group)
            return informative(group)

        self._live = LiveRound(
            admission=admission,
            scheduler=scheduler,
            intake=intake,
            num_generations=num_generations,
            progress=progress,
            request=lambda launch, sample: Request(
                f"{launch.group_id}/{sample}",
                launch.prompt.token_ids,
                self._sampling(launch, sample, ""),
                launch.prompt,
            ),
            informative=judged,
            failed=failed,
            scorer=self.scorer,
            seat=self._seat(),
            board=self.board,
            pulse=self.pulse,
            heard=self.heard,
        )
        return self._live

    def awaited(self) -> str:
        """For whom a round of dynamic sampling waits, if it does; from any thread."""
        return self._live.awaited() if self._live is not None else ""

    def _seat(self) -> Seat:
        """Where this rank sits in a round of dynamic sampling; collective."""
        mine = self.share.count if self.share is not None else 0
        engines = max((self.collectives.broadcast(mine), mine))
        if self.share is None:
            return Seat(rank=self.collectives.rank, engine=None, engines=engines)
        return Seat(
            rank=self.collectives.rank,
            engine=self.share.index,
            engines=engines,
            reports=self.share.reports,
            lockstep=self.share.lockstep,
        )

    def sample(self, current: Round | LiveRound) -> None:
        """Sample this rank's requests; a failure is kept for `finish`, where every rank learns of it."""
        with self.around():
            if self.engine is None or not current.samples_here:
                return
            try:
                if isinstance(current, LiveRound):
                    self._sample_live(self.engine, current)
                    return
                for completion in self._completions(self.engine, current.requests):
                    self.take(current, completion)
            except Exception as error:  # the other ranks wait in `finish` by now
                if isinstance(current, LiveRound):
                    with contextlib.suppress(SwiftError):  # the first error is the one to show
                        empty(self.engine)
                    current.fail(error)
                current.failure = error

    def _sample_live(self, engine: InferenceEngine, current: LiveRound) -> None:
        """Sample until the round has what it wants; what it asks for meanwhile joins the engine's running batch."""
        with contextlib.ExitStack() as stack:
            clock = None
            if self.request_s is not None:
                clock = stack.enter_context(RequestClock(engine, (), self.request_s, self._book_late))
            submit = partial(self.submit_due, engine, current, clock)
            current.begin()
            stack.enter_context(between_steps(engine, submit))
            while not current.complete:
                if not submit():
                    current.rest()
                for completion in engine.stream():
                    if clock is None or clock.takes(completion):
                        self.take(current, completion)
                if current.outstanding:
                    raise lost(current.outstanding[0])

    def submit_due(self, engine: InferenceEngine, current: LiveRound, clock: RequestClock | None = None) -> bool:
        """Give the engine what a round wants sampled now; whether there was anything."""
        requests = current.due()
        for request in requests:
            engine.check_length(request)
        for request in requests:
            if clock is not None:
                clock.add(request)
            engine.submit(request)
        return bool(requests)

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

    def take(self, current: Round | LiveRound, completion: Completion) -> None:
        """Add a finished completion; a group that is whole goes to the reward workers at once (rank 0).

        Raises:
            EngineError: nobody asked for it, or it came before.
        """
        if not current.expects(completion.request_id):
            raise stray(completion)
        self.progress()
        completion.text = self.decode(completion.token_ids)
        if isinstance(current, LiveRound):
            current.take(completion)
            return
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

    def arrived(self, current: Round | LiveRound) -> list[RolloutGroup]:
        """Groups of a round that are scored, before the round is over, in launch order; rank 0 only.

        In launch order means that the list ends before the first group that is not scored yet. Groups that this rank
        learns of at the end of the round only are left out.
        """
        if isinstance(current, LiveRound):
            return current.judged()
        groups = []
        for group in current.groups:
            if group.group_id not in current.waiting:
                continue
            future = current.futures.get(group.group_id)
            if future is None or not future.done() or future.exception() is not None:
                break
            if group.scores is None:
                group.scores = future.result()
                self._exclude_faults(group)
            groups.append(group)
        return groups

    @staticmethod
    def all_scored(current: Round | LiveRound) -> bool:
        """Whether nothing that was given to the reward workers so far is still with them; rank 0 only."""
        return isinstance(current, LiveRound) or all(future.done() for future in current.futures.values())

    def finish(
        self,
        current: Round,
        *,
        timer: Callable[[str], Any],
        meanwhile: Callable[[list[RolloutGroup]], None] | None = None,
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Bring the parts of all ranks together and wait for the scores; see `run`.

        Args:
            current: the round.
            timer: context manager factory for the phases "generate" and "reward".
            meanwhile: called on every rank with the sampled groups, if reward functions still work on them.

        Raises:
            SwiftError: on every rank, what failed on any.
        """
        with timer("generate"):
            late = self._exchange(current)
        # the answer of the moment decides when something is done, never what
        if meanwhile is not None and self._agree(partial(self._still_scoring, current)):
            meanwhile(current.groups)
        with timer("reward"):
            scores, metrics = self._agree(lambda: self._score(current))
        if late:
            metrics = {**metrics, "health/rollout_timeouts": float(late)}
        for group, score in zip(current.groups, scores, strict=True):
            group.scores = score
            self._exclude_faults(group)
        return current.groups, metrics

    def finish_live(self, current: LiveRound, *, timer: Callable[[str], Any]) -> RoundResult:
        """Bring a round of dynamic sampling to every rank.

        Raises:
            SwiftError: on every rank, what failed on any.
        """
        with timer("generate"):
            failures = self.collectives.gather((_portable(current.failure), self._new_late()))
            failure, late = self.collectives.broadcast(_first_failure(failures or []))
        if failure is not None:
            if failure is not current.failure:
                failure.__cause__ = current.failure
            raise failure
        with timer("reward"):
            ended = self._agree(lambda: self._ended_live(current))
        if self.board is not None:
            self.board.sweep()
        if current.before is None:  # this rank has no engine
            current.begin()
        current.catch_up(ended["upto"])
        kept = {}
        for index, (completions, scores) in ended["kept"].items():
            kept[index] = current.groups.get(index) or current.group(index, completions)
            kept[index].scores = scores
        groups = [*current.intake.carried, *(kept[index] for index in ended["trained"])]
        if late:
            ended["metrics"]["health/rollout_timeouts"] = float(late)
        return RoundResult(
            groups=sorted(groups, key=lambda group: group.launch_index),
            metrics=ended["metrics"],
            carried=[kept[index] for index in ended["carried"]],
            dropped=[current.groups[index] for index in ended["dropped"] if index in current.groups],
            failed=[current.group(index, []).prompt for index in ended["failed"]],
            launched=ended["launched"],
            informative=ended["informative"],
            num_dropped=ended["num_dropped"],
            num_excluded=len(ended["dropped"]) - ended["num_dropped"],
            carried_in=len(current.intake.carried),
        )

    def _ended_live(self, current: LiveRound) -> dict[str, Any]:
        """What the other ranks need to know of a round; rank 0 only."""
        admission = current.admission
        outcome = admission.outcome()
        groups = [current.groups[index] for index in sorted(current.groups)]
        if groups:
            self.scorer.end_batch(groups)
        metrics = self.scorer.drain_metrics(groups)
        metrics |= {
            "dynamic_sample/launched": float(admission.launched),
            "dynamic_sample/informative": float(admission.informative),
            "dynamic_sample/zero_variance": float(admission.launched - admission.informative),
            "dynamic_sample/filled": float(len(outcome.filled)),
            "dynamic_sample/budget_exhausted": float(admission.budget_exhausted),
            "dynamic_sample/carried_in": float(len(current.intake.carried)),
            "dynamic_sample/carried_out": float(len(outcome.carried)),
            "dynamic_sample/dropped_tokens": float(
                sum(len(one.token_ids) for index in outcome.dropped for one in current.groups[index].completions)
            ),
        }
        kept = sorted({*outcome.trained, *outcome.filled, *outcome.carried})
        return {
            "upto": current.scheduler.launched,
            "kept": {index: (current.groups[index].completions, current.groups[index].scores) for index in kept},
            "trained": sorted({*outcome.trained, *outcome.filled}),
            "carried": list(outcome.carried),
            "dropped": list(outcome.dropped),
            "failed": [index for index in outcome.dropped if current.failed(current.groups[index])],
            "num_dropped": sum(is_scored(current.groups[index]) for index in outcome.dropped),
            "launched": admission.launched,
            "informative": admission.informative,
            "metrics": metrics,
        }

    @staticmethod
    def _exclude_faults(group: RolloutGroup) -> None:
        """Note with the scores which completions the engine gave up."""
        scores = group.scores
        assert scores is not None
        scores.excluded = [fault(one) or why for one, why in zip(group.completions, scores.excluded, strict=True)]

    def _score(self, current: Round) -> tuple[list[GroupScores], dict[str, float]]:
        """Wait for the scores of a round; rank 0 only."""
        groups = current.groups
        self._submit(current)
        results = [current.futures[group.group_id].result() for group in groups]
        scores = self.scorer.add_model_scores(groups, results)
        self.scorer.end_batch(groups)
        return scores, self.scorer.drain_metrics(groups)

    def _still_scoring(self, current: Round) -> bool:
        """Whether reward workers have anything of a round left, now that they were given all; rank 0 only."""
        self._submit(current)
        return not self.all_scored(current)

    def _submit(self, current: Round) -> None:
        """Give the reward workers what they did not get while it was sampled; rank 0 only."""
        groups, futures = current.groups, current.futures
        waiting = [group for group in groups if group.group_id not in futures]
        if waiting and self.scorer.needs_whole_batch:
            submitted = self.scorer.submit_batch(groups, current.progress)
            futures.update(zip([group.group_id for group in groups], submitted, strict=True))
            return
        for group in waiting:
            futures[group.group_id] = self.scorer.submit(group, current.progress)

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
            if missing := [one for one in ids if one not in everything]:
                raise lost(missing[0])
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


def lost(request_id: str) -> EngineError:
    """What is wrong when an engine has ended its stream without a request."""
    return EngineError(f"engine: request {request_id}: it never came back; this is a defect of the engine")


def fault(completion: Completion) -> str | None:
    """Why the engine's part of a completion is not to be trained on: it was given up, or its log-probs do not fit."""
    if completion.finish_reason in ("error", "abort"):
        return f"engine: {completion.finish_reason}"
    if len(completion.logprobs) != len(completion.token_ids) or not all(map(math.isfinite, completion.logprobs)):
        return "engine: log-probs"
    return None


def is_scored(group: RolloutGroup) -> bool:
    """Whether any completion of a group takes part in anything."""
    return group.scores is not None and any(reason is None for reason in group.scores.excluded)


def empty(engine: InferenceEngine) -> None:
    """Give up what is still in an engine."""
    engine.abort()
    for _ in engine.stream():
        pass


@contextlib.contextmanager
def between_steps(engine: InferenceEngine, work: Callable[[], Any]) -> Iterator[None]:
    """Have an engine call `work` between its decode steps."""
    engine.between_steps = work
    try:
        yield
    finally:
        engine.between_steps = None


def _first_failure(parts: Sequence[tuple[Exception | None, int]]) -> tuple[Exception | None, int]:
    """The failure that counts, one with a reason of its own if there is any, and how many requests were late."""
    failures = [error for error, _ in parts if error is not None]
    own = [error for error in failures if not isinstance(error, OtherRankFailed)]
    return next(iter([*own, *failures]), None), sum(late for _, late in parts)


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
