"""The pipeline the trainer iterates over: prompts in, optimizer windows out, with a state that can be saved.

    PromptSource -> RolloutScheduler -> RolloutCollector (engine, rewards) -> advantages -> TrainUnit -> windows

The pipeline owns the unit that is being trained on. Its state (scheduler, unit, what has been consumed of it)
goes into every checkpoint as JSON, exact to the last bit, so that a resumed run continues with the same samples.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from statistics import fmean
from typing import Any

import numpy as np
import torch

from swift.errors import SwiftError
from swift.rl.advantages import Advantages, Estimator, Scale, compute_advantages, reward_matrix
from swift.rollout.batch import TrainSample, TrainUnit
from swift.rollout.collect import RolloutCollector, Round, launches_of
from swift.rollout.phase import GenerationPhase, PublishPhase
from swift.rollout.prefetch import GenerationThread
from swift.rollout.scheduler import Launch, RolloutScheduler
from swift.rollout.weight_sync.publisher import WeightPublisher
from swift.types import Completion, GroupScores, Prompt, RolloutGroup, TrainerProgress

Timer = Callable[[str], AbstractContextManager[Any]]
Observer = Callable[["ScoredRound"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How a unit is made of groups.

    generation_batches: generation batches of a unit, each with its own batch statistics.
    num_windows: optimizer windows that a unit feeds; num_iterations: how often.
    prefetch_depth: units sampled ahead of the one that trains; 0 generates, then trains.
    in_flight_updates: weights may change while completions are being sampled.
    """

    num_generations: int
    num_generations_eval: int
    generation_batches: int
    num_windows: int
    num_iterations: int
    max_completion_length: int
    advantage_estimator: Estimator = "grpo"
    scale_rewards: Scale | None = None
    reward_weights: Sequence[float] = ()
    overlong_filter: bool = False
    prefetch_depth: int = 0
    in_flight_updates: bool = False


@dataclass(slots=True)
class ScoredRound:
    """Groups with their rewards and advantages, for logs: one per round of training or evaluation.

    advantages: as trained on, in the order of the completions; None for excluded completions.
    excluded: why a completion takes no part, beyond the faults of reward functions ("overlong"), or None.
    """

    split: str
    step: int
    groups: list[RolloutGroup]
    rewards: list[float | None]
    advantages: list[float | None]
    excluded: list[str | None]
    version: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Ahead:
    """A round that was asked for and not yet trained on.

    before: the scheduler's state before its launches: what a checkpoint falls back to when the round is not saved.
    result: its scored groups and reward metrics once they are on every rank. failure: why there will be none.
    """

    launches: list[Launch]
    before: dict[str, Any]
    current: Round | None = None
    result: tuple[list[RolloutGroup], dict[str, float]] | None = None
    failure: SwiftError | None = None


class RolloutPipeline:
    """Makes units and hands out their windows.

    Args:
        scheduler: decides what is sampled.
        collector: samples and scores.
        config: how groups become units.
        timer: context manager factory for the phases of a step.
        observer: gets every scored round, on every rank.
        publisher: gives the sampler new weights.
        phase: makes the engine ready for generation; None publishes and nothing else.

    With `config.prefetch_depth` > 0 the next rounds are sampled on a thread while this one trains. Every decision
    (what is launched, when weights are published) still falls on the main thread, at points that depend on step
    numbers only, so the run does not depend on how fast anything was.
    """

    def __init__(
        self,
        scheduler: RolloutScheduler,
        collector: RolloutCollector,
        config: PipelineConfig,
        *,
        timer: Timer,
        observer: Observer,
        publisher: WeightPublisher,
        phase: GenerationPhase | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.collector = collector
        self.config = config
        self.timer = timer
        self.observer = observer
        self.publisher = publisher
        self.phase: GenerationPhase = phase or PublishPhase(publisher)
        self.unit: TrainUnit | None = None
        self.epoch = 0.0
        self._ahead: deque[_Ahead] = deque()
        self._restarts = 0
        self._thread = GenerationThread(collector, overlap=config.in_flight_updates)

    def windows(self, progress: Callable[[], TrainerProgress]) -> Iterator[TrainUnit]:
        """For each optimizer step the unit to train on; `unit.window_index` says which window of it.

        The trainer calls `step_done` after each step.
        """
        while True:
            if self.unit is None or self.unit.exhausted:
                self.unit = None  # freed before the next one is made
                self._next_unit(progress())
                assert self.unit is not None
            yield self.unit

    def step_done(self, step: int | None = None) -> None:
        """Book one optimizer step on the current unit; `step` steps are done now."""
        assert self.unit is not None
        self.unit.position += 1
        mid_unit = not self.unit.exhausted and not self._ahead
        if step is not None and mid_unit and self.publisher.interval > 1 and self.publisher.due(step):
            with self.phase(step):
                pass

    def close(self) -> None:
        """End the generation thread; the engine is closed by its owner, right after."""
        self._thread.close()

    def _next_unit(self, progress: TrainerProgress) -> None:
        """Make the unit to train on, and ask for the rounds that are sampled meanwhile."""
        if not self._ahead:
            self._ahead.append(self._ask(progress, wait=True))
        try:
            groups, reward_metrics = self._result(self._ahead[0])
        except SwiftError:  # nothing of this round was trained on: a checkpoint saved now draws it again
            self.scheduler.load_state_dict(self._without_ahead())
            self._ahead.clear()
            raise
        self._ahead.popleft()
        self.unit = self._make_unit(groups, reward_metrics, progress)
        while len(self._ahead) < self.config.prefetch_depth and self._wants_more(progress):
            self._ahead.append(self._ask(progress, wait=False))

    def _without_ahead(self) -> dict[str, Any]:
        """The scheduler's state as if the rounds ahead had not been launched; what has ended meanwhile stays ended."""
        now = self.scheduler.state_dict()
        if not self._ahead:
            return now
        return {**self._ahead[0].before, **{name: now[name] for name in ("trained", "excluded", "dropped")}}

    def _wants_more(self, progress: TrainerProgress) -> bool:
        """Whether a further unit will be trained on."""
        updates = self.config.num_windows * self.config.num_iterations
        return progress.max_steps <= 0 or self.scheduler.units < math.ceil(progress.max_steps / updates)

    def _ask(self, progress: TrainerProgress, *, wait: bool) -> _Ahead:
        """Launch a round with the weights of now, if a publication is due, and sample it or start to.

        Weights change when nothing is in flight, or, with `in_flight_updates`, between two tokens.
        """
        before = self.scheduler.state_dict()
        one = _Ahead(self.scheduler.launch_unit(), before)
        one.current = self.collector.prepare(
            one.launches, num_generations=self.config.num_generations, progress=progress
        )
        try:
            if not self.publisher.due(progress.global_step) or not self._in_flight():
                with self.phase(progress.global_step):
                    self._sample(one.current, wait=wait)
            elif self.config.in_flight_updates:
                self._publish_in_flight(progress.global_step)
                self._sample(one.current, wait=wait)
            else:
                with self.timer("generate"):
                    self._thread.drain()
                with self.phase(progress.global_step):
                    self._sample(one.current, wait=wait)
        except SwiftError:
            self.scheduler.load_state_dict(before)
            raise
        return one

    def _in_flight(self) -> bool:
        """Whether a round that was asked for has not been collected; the same answer on every rank."""
        return any(one.current is not None for one in self._ahead)

    def _sample(self, current: Round, *, wait: bool) -> None:
        if not wait:
            self._thread.start(current)
            return
        with self.timer("generate"):
            self.collector.sample(current)

    def _publish_in_flight(self, step: int) -> None:
        """Pause the engine between two tokens, publish, go on; a rank that cannot tells the others."""
        engine = self.collector.engine
        try:
            self._everywhere(self._thread.hold)
            self.publisher.publish(step)
            self._everywhere(engine.resume if engine is not None else lambda: None)
        finally:
            self._thread.release()

    def _everywhere(self, work: Callable[[], None]) -> None:
        """Work of this rank alone; what fails on any rank is raised on all."""
        failure = None
        try:
            work()
        except SwiftError as error:
            failure = error
        failures = [one for one in self.publisher.ranks.all_gather(failure) if one is not None]
        if failures:
            raise failure or failures[0]

    def _result(self, one: _Ahead) -> tuple[list[RolloutGroup], dict[str, float]]:
        """The scored groups of a round, waited for; collective.

        Raises:
            SwiftError: on every rank, and at every call: its failure.
        """
        if one.current is not None:
            try:
                with self.timer("generate"):
                    self._thread.wait(one.current)
                one.result = self.collector.finish(one.current, timer=self.timer)
            except SwiftError as error:
                one.failure = error
            one.current = None
        if one.failure is not None:
            raise one.failure
        assert one.result is not None
        return one.result

    def _settle(self) -> None:
        """Wait for the rounds ahead, so that the engine is free; collective. A failure is raised at its turn."""
        for one in self._ahead:
            with contextlib.suppress(SwiftError):
                self._result(one)

    def _make_unit(
        self, groups: list[RolloutGroup], reward_metrics: dict[str, float], progress: TrainerProgress
    ) -> TrainUnit:
        results = [self._advantages(part) for part in self._batches(groups)]
        advantages = torch.cat([result.advantages_S for result in results]).tolist()
        samples = list(self._samples(groups, advantages))
        used = [sample.num_trained > 0 for sample in samples]
        excluded = sum(
            not any(used[i * self.config.num_generations : (i + 1) * self.config.num_generations])
            for i in range(len(groups))
        )
        self.scheduler.end_unit(trained=len(groups) - excluded, excluded=excluded)
        self._observe("train", progress.global_step + 1, groups, results, advantages, reward_metrics)
        return TrainUnit(samples, self.config.num_windows, self.config.num_iterations)

    def staleness(self, step: int) -> dict[str, float]:
        """How many optimizer steps the weights that sampled the current window are behind those trained now, per token.

        Completions that are not trained on do not count.

        Args:
            step: optimizer steps done before this one.
        """
        assert self.unit is not None
        samples = [self.unit.samples[i] for i in self.unit.window(self.unit.window_index)]
        ages = [
            (step - self.publisher.step_of(version), count)
            for sample in samples
            if sample.num_trained
            for version, count in sample.tokens_of_versions()
        ]
        tokens = sum(count for _, count in ages)
        return {
            "off_policy/mean": sum(age * count for age, count in ages) / max(1, tokens),
            "off_policy/max": float(max((age for age, _ in ages), default=0)),
        }

    def engine_health(self) -> dict[str, float]:
        """Restarts of engine processes since the last call; nothing where the trainer's own model samples."""
        engine = self.collector.engine
        if engine is None or engine.capabilities.shares_weights:
            return {}
        restarts, self._restarts = engine.counters.restarts - self._restarts, engine.counters.restarts
        return {"health/engine_restarts": float(restarts)}

    def evaluate(self, prompts: Sequence[Prompt], progress: TrainerProgress) -> dict[str, float]:
        """Sample and score held-out prompts under the current policy; the training stream is untouched.

        Returns:
            metrics without a prefix: `reward`, `reward_std`, `rewards/<name>/mean`, `completions/...`.
        """
        self._settle()  # they keep the weights that they were asked for with
        with self.phase(progress.global_step, current=True):
            groups, reward_metrics = self.collector.run(
                launches_of(prompts),
                num_generations=self.config.num_generations_eval,
                progress=progress,
                timer=self.timer,
                seed_namespace="eval:",
            )
        result = self._advantages(groups)
        return self._observe(
            "eval", progress.global_step, groups, [result], result.advantages_S.tolist(), reward_metrics
        )

    def inspect(self, step: int, work: Callable[[], None]) -> None:
        """Let `work` look at the engine, which then has the weights of now and nothing to do; collective."""
        self._settle()
        with self.phase(step, current=True, trainer_stays=True):
            work()

    def _batches(self, groups: list[RolloutGroup]) -> list[list[RolloutGroup]]:
        size = len(groups) // self.config.generation_batches
        return [groups[i : i + size] for i in range(0, len(groups), size)]

    def _advantages(self, groups: Sequence[RolloutGroup]) -> Advantages:
        values: list[list[float | None]] = []
        excluded: list[bool] = []
        index: list[int] = []
        for number, group in enumerate(groups):
            assert group.scores is not None
            values += group.scores.values
            excluded += [reason is not None for reason in group.scores.excluded]
            index += [number] * len(group.completions)
        return compute_advantages(
            reward_matrix(values),
            torch.tensor(index),
            weights_K=torch.tensor(list(self.config.reward_weights), dtype=torch.float64),
            excluded_S=torch.tensor(excluded),
            estimator=self.config.advantage_estimator,
            scale=self.config.scale_rewards,
        )

    def _samples(self, groups: Sequence[RolloutGroup], advantages: Sequence[float]) -> Iterator[TrainSample]:
        position = 0
        for number, group in enumerate(groups):
            assert group.scores is not None
            prompt = np.asarray(group.prompt.token_ids, dtype=np.int32)
            for completion, reason in zip(group.completions, group.scores.excluded, strict=True):
                counts = reason is None and bool(completion.token_ids) and not self._cut(completion)
                trained = np.full(len(completion.token_ids), counts, dtype=np.bool_)
                yield TrainSample(
                    group=number,
                    prompt_ids=prompt,
                    token_ids=np.asarray(completion.token_ids, dtype=np.int32),
                    sampler_logprobs=np.asarray(completion.logprobs, dtype=np.float32),
                    trained=trained,
                    advantage=advantages[position],
                    versions=list(completion.versions),
                )
                position += 1

    def _cut(self, completion: Completion) -> bool:
        """Whether the overlong filter takes a completion out of the loss; it stays in the group's statistics."""
        return self.config.overlong_filter and completion.finish_reason == "length"

    def _observe(
        self,
        split: str,
        step: int,
        groups: list[RolloutGroup],
        results: Sequence[Advantages],
        advantages: Sequence[float],
        reward_metrics: dict[str, float],
    ) -> dict[str, float]:
        totals = torch.cat([result.rewards_S for result in results]).tolist()
        rewards = [None if total != total else total for total in totals]
        shown = [None if reward is None else value for reward, value in zip(rewards, advantages, strict=True)]
        metrics = {**round_metrics(groups, results), **reward_metrics}
        version = self.publisher.version
        excluded = ["overlong" if self._cut(completion) else None for g in groups for completion in g.completions]
        self.observer(ScoredRound(split, step, groups, rewards, shown, excluded, version, metrics))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state: scheduler, publisher, what is left of the current unit, and the rounds asked for.

        Collective: rounds in flight are waited for and saved whole. One that fails is left out, and those after it:
        they are drawn again after a resume.
        """
        self._settle()
        whole = list(takewhile(lambda one: one.result is not None, self._ahead))
        pending = self.unit is not None and not self.unit.exhausted
        return {
            "scheduler": self._without_ahead(),
            "publisher": self.publisher.state_dict(),
            "unit": self.unit.to_json() if pending and self.unit is not None else None,
            "ahead": [_result_to_json(*one.result) for one in whole if one.result is not None],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after `state`; the sampler gets the policy's weights before it is used again."""
        self.scheduler.load_state_dict(state["scheduler"])
        self.unit = TrainUnit.from_json(state["unit"]) if state["unit"] is not None else None
        self._ahead.clear()
        for saved in state.get("ahead", []):
            before = self.scheduler.state_dict()
            launches = self.scheduler.launch_unit()
            groups = [_scored_from_json(*pair) for pair in zip(launches, saved["groups"], strict=True)]
            self._ahead.append(_Ahead(launches, before, result=(groups, saved["metrics"])))
        if "publisher" in state:
            self.publisher.load_state_dict(state["publisher"])


def _result_to_json(groups: Sequence[RolloutGroup], metrics: dict[str, float]) -> dict[str, Any]:
    return {"groups": [_scored_to_json(group) for group in groups], "metrics": metrics}


def _scored_to_json(group: RolloutGroup) -> dict[str, Any]:
    """Completions and scores of a group; its prompt is launched again when it is read."""
    assert group.scores is not None
    return {"completions": [asdict(one) for one in group.completions], "scores": asdict(group.scores)}


def _scored_from_json(launch: Launch, state: dict[str, Any]) -> RolloutGroup:
    completions = [
        Completion(**{**one, "versions": [tuple(v) for v in one["versions"]]}) for one in state["completions"]
    ]
    scores = GroupScores(**state["scores"])
    return RolloutGroup(launch.group_id, launch.index, launch.launch, launch.prompt, completions, scores)


def round_metrics(groups: Sequence[RolloutGroup], results: Sequence[Advantages]) -> dict[str, float]:
    """What a round of rollouts says in numbers; see docs/output_files.md for each name."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    rewards = torch.cat([result.rewards_S for result in results])
    scored = rewards[~rewards.isnan()]
    stds = torch.cat([result.std_P for result in results])
    informative = torch.cat([result.informative_P for result in results])
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": fmean(c.finish_reason == "length" for c in completions),
        "reward_std": float(stds.mean()),
        "frac_reward_zero_std": 1.0 - float(informative.double().mean()),
        "excluded": float(rewards.isnan().sum()),
    }
    if scored.numel():
        metrics["reward"] = float(scored.mean())
    return metrics
