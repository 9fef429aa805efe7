"""The pipeline the trainer iterates over: prompts in, optimizer windows out, with a state that can be saved.

    PromptSource -> RolloutScheduler -> RolloutCollector (engine, rewards) -> advantages -> TrainUnit -> windows

The pipeline owns the unit that is being trained on. Its state (scheduler, unit, what has been consumed of it)
goes into every checkpoint as JSON, exact to the last bit, so that a resumed run continues with the same samples.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from swift.errors import SwiftError
from swift.rl.advantages import Advantages
from swift.rollout.admission import Admission
from swift.rollout.batch import Part, TrainUnit
from swift.rollout.collect import RolloutCollector, Round, RoundResult, launches_of
from swift.rollout.live import LiveRound
from swift.rollout.phase import GenerationPhase, PublishPhase
from swift.rollout.prefetch import GenerationThread
from swift.rollout.replay import ReplayBuffer
from swift.rollout.scheduler import Intake, RolloutScheduler
from swift.rollout.units import Begun, MadeUnit, UnitConfig, UnitMaker, round_metrics
from swift.rollout.weight_sync.publisher import WeightPublisher
from swift.types import Prompt, RolloutGroup, TrainerProgress

ARRIVAL_S = 0.005
"""Time between two looks at what has been scored."""

Timer = Callable[[str], AbstractContextManager[Any]]
Observer = Callable[["ScoredRound"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(UnitConfig):
    """How rounds are sampled and made into units.

    prefetch_depth: units sampled ahead of the one that trains; 0 generates, then trains.
    in_flight_updates: weights may change while completions are being sampled.
    streaming_groups: train on so many informative groups as soon as they are scored, while others are sampled; 0 waits
        for the whole round. Needs one window per unit, advantages that are a matter of single groups, and an engine
        that does not keep this thread busy.
    dynamic_sample: groups that teach nothing are replaced while others are sampled, within
        `max_resample_times` times as many extra launches as a unit has groups.
    reroll_fail_reward: a prompt all of whose completions have at most this reward, without a difference between them,
        is tried again where the scheduler does that.
    """

    num_generations_eval: int
    prefetch_depth: int = 0
    in_flight_updates: bool = False
    streaming_groups: int = 0
    dynamic_sample: bool = False
    max_resample_times: int = 3
    reroll_fail_reward: float = 0.0


@dataclass(slots=True)
class ScoredRound:
    """Groups with their rewards and advantages, for logs: one per round of training or evaluation.

    advantages: as trained on, in the order of the completions; None for excluded completions.
    excluded: why a completion takes no part, beyond the faults of reward functions ("overlong"), or None.
    used: false for completions of groups that were replaced.
    """

    split: str
    step: int
    groups: list[RolloutGroup]
    rewards: list[float | None]
    advantages: list[float | None]
    excluded: list[str | None]
    version: int
    metrics: dict[str, float] = field(default_factory=dict)
    used: list[bool] | None = None


@dataclass(slots=True)
class _Ahead:
    """A round that was asked for and not yet trained on.

    intake: what it began with. before: where launching stood before its launches; one of dynamic sampling notes that
    itself, when it begins. begun: what was done about its unit while it was scored. result: its scored groups once they
    are on every rank. failure: why there will be none.
    """

    intake: Intake
    before: dict[str, Any] | None = None
    current: Round | LiveRound | None = None
    live: LiveRound | None = None
    begun: Begun | None = None
    result: RoundResult | None = None
    failure: SwiftError | None = None

    @property
    def since(self) -> dict[str, Any] | None:
        """Where launching stood before this round launched anything; None when it has not."""
        return self.live.before if self.live is not None else self.before


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
        replay: groups to stand in for those that teach nothing.

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
        replay: ReplayBuffer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.collector = collector
        self.config = config
        self.units = UnitMaker(config, replay=replay)
        self.timer = timer
        self.observer = observer
        self.publisher = publisher
        self.phase: GenerationPhase = phase or PublishPhase(publisher)
        self.unit: TrainUnit | None = None
        self._ahead: deque[_Ahead] = deque()
        self._restarts = 0
        # with dynamic sampling the next prompts of the stream belong to the round that is sampled now
        overlap = config.in_flight_updates and not config.dynamic_sample
        self._thread = GenerationThread(collector, overlap=overlap)

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
        streams = self.config.streaming_groups > 0
        if not self._ahead:
            self._ahead.append(self._ask(progress, wait=not streams))
        if streams:
            self.unit = TrainUnit([], self.config.num_windows, self.config.num_iterations)
            self.unit.arriving = self._parts(self.unit, progress)
            return
        result, begun = self._first_result()
        self.unit = self._make_unit(result, progress, begun).unit
        self._ask_ahead(progress)

    def _parts(self, unit: TrainUnit, progress: TrainerProgress) -> Iterator[Part]:
        """The samples of a unit as they arrive; collective. Informative groups in launch order, then all others.

        Only the last part is of another size than `streaming_groups`, so what a part holds depends on no clock.
        """
        known: dict[str, int] = {}
        while groups := self._arrived(self._ahead[0], known):
            first, start = len(known), len(unit.samples)
            known |= {group.group_id: first + i for i, group in enumerate(groups)}
            unit.samples += self.units.samples(groups, first)
            yield Part(range(start, len(unit.samples)), last=False)
        try:
            result, _ = self._first_result()
            made = self._make_unit(result, progress, self.units.untouched(result.groups))  # its parts know their own
        except SwiftError:
            self.unit = None  # a part of it is nothing that could be saved
            raise
        unit.arriving = None
        start, size = len(unit.samples), self.config.num_generations
        order = sorted(range(len(made.group_ids)), key=lambda i: not made.informative[i])
        for number in (number for number in order if made.group_ids[number] not in known):
            rest = made.unit.samples[number * size : (number + 1) * size]
            for sample in rest:
                sample.group = len(unit.samples) // size
            unit.samples += rest
        self._ask_ahead(progress)
        yield Part(range(start, len(unit.samples)), last=True)

    def _arrived(self, one: _Ahead, known: Collection[str]) -> list[RolloutGroup]:
        """The next informative groups, waited for; none when too few are left for a part; collective."""
        ranks, size = self.collector.collectives, self.config.streaming_groups
        ready: list[RolloutGroup] = []
        if ranks.rank == 0:
            with self.timer("generate"):
                while True:
                    over, scored = self._scored_so_far(one)
                    ready = [group for group in scored if group.group_id not in known and self.units.informative(group)]
                    if over or len(ready) >= size:
                        break
                    time.sleep(ARRIVAL_S)
        return list(ranks.broadcast(ready[:size] if len(ready) >= size else []))

    def _scored_so_far(self, one: _Ahead) -> tuple[bool, list[RolloutGroup]]:
        """Whether no more will come before the round is finished, and what this rank has, in launch order."""
        if one.current is None:
            return True, one.result.groups[one.result.carried_in :] if one.result is not None else []
        over = not self._thread.samples(one.current) and self.collector.all_scored(one.current)
        return over, self.collector.arrived(one.current)

    def _first_result(self) -> tuple[RoundResult, Begun | None]:
        """The result of the next round, which leaves those ahead, and what was begun meanwhile; collective."""
        one = self._ahead[0]
        try:
            result = self._result(one, begins=self.units.can_begin and not self.config.streaming_groups)
        except SwiftError:  # nothing of this round was trained on: a checkpoint saved now draws it again
            self.scheduler.load_state_dict(self._without(list(self._ahead)))
            self._ahead.clear()
            raise
        self._ahead.popleft()
        self.scheduler.rate = self.scheduler.rate.updated(result.informative, result.launched)
        self.scheduler.carry(result.carried)
        return result, one.begun

    def _ask_ahead(self, progress: TrainerProgress) -> None:
        """Have the rounds sampled that may be."""
        while len(self._ahead) < self.config.prefetch_depth and self._wants_more(progress):
            self._ahead.append(self._ask(progress, wait=False))

    def _without(self, rounds: Sequence[_Ahead]) -> dict[str, Any]:
        """The scheduler's state as if these last rounds had not been asked for; what has ended stays ended."""
        since = next((one.since for one in rounds if one.since is not None), None)
        return self.scheduler.state_dict(since=since, units=len(rounds), intakes=[one.intake for one in rounds])

    @property
    def _updates(self) -> int:
        """Optimizer steps that a unit feeds."""
        return self.config.num_windows * self.config.num_iterations

    def _wants_more(self, progress: TrainerProgress) -> bool:
        """Whether a further unit will be trained on."""
        return progress.max_steps <= 0 or self.scheduler.units < math.ceil(progress.max_steps / self._updates)

    def _ask(self, progress: TrainerProgress, *, wait: bool) -> _Ahead:
        """Launch a round with the weights of now, if a publication is due, and sample it or start to.

        Weights change when nothing is in flight, or, with `in_flight_updates`, between two tokens.
        """
        one = self._new_round(progress)
        assert one.current is not None
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
            self.scheduler.load_state_dict(self._without([one]))
            raise
        return one

    def _new_round(self, progress: TrainerProgress) -> _Ahead:
        """The next round, with its launches where they do not depend on how it goes."""
        step = self.scheduler.units * self._updates + 1
        last = progress.max_steps > 0 and step + self._updates > progress.max_steps
        if not self.config.dynamic_sample:
            before = self.scheduler.launch_state()
            intake = self.scheduler.begin_unit(step)
            launches = self.scheduler.launch_unit(intake)
            generations = self.config.num_generations
            current = self.collector.prepare(launches, num_generations=generations, progress=progress)
            return _Ahead(intake, before, current)
        intake = self.scheduler.begin_unit(step)
        admission = Admission(
            quota=self.scheduler.groups_per_unit,
            carried=len(intake.carried),
            max_resample_times=self.config.max_resample_times,
            # nothing is left over at the end of the run, and what is trained on as it arrives is never too much
            rate=1.0 if last or self.config.streaming_groups else self.scheduler.rate.clipped,
        )
        live = self.collector.prepare_live(
            admission,
            self.scheduler,
            intake,
            num_generations=self.config.num_generations,
            progress=progress,
            informative=self.units.informative,
            failed=self._has_failed,
        )
        return _Ahead(intake, current=live, live=live)

    def _has_failed(self, group: RolloutGroup) -> bool:
        """Whether the prompt of a group is to be tried again later: scored, without a difference, and never well."""
        totals = [total for total in self.units.totals(group) if total == total]
        limit = self.config.reroll_fail_reward
        return bool(totals) and max(totals) <= limit and not self.units.informative(group)

    def _in_flight(self) -> bool:
        """Whether a round that was asked for has not been collected; the same answer on every rank."""
        return any(one.current is not None for one in self._ahead)

    def _sample(self, current: Round | LiveRound, *, wait: bool) -> None:
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

    def _result(self, one: _Ahead, *, begins: bool = False) -> RoundResult:
        """The scored groups of a round, waited for; collective.

        Args:
            one: the round.
            begins: whether it is trained on next, so that its unit can be begun while rewards are computed.

        Raises:
            SwiftError: on every rank, and at every call: its failure.
        """
        if one.current is not None:
            try:
                with self.timer("generate"):
                    self._thread.wait(one.current)
                one.result = self._finished(one, one.current, begins=begins)
            except SwiftError as error:
                one.failure = error
            one.current = None
        if one.failure is not None:
            raise one.failure
        assert one.result is not None
        return one.result

    def _finished(self, one: _Ahead, current: Round | LiveRound, *, begins: bool) -> RoundResult:
        if isinstance(current, LiveRound):  # which groups are trained on is a matter of their scores
            return self.collector.finish_live(current, timer=self.timer)
        carried = one.intake.carried

        def begin(groups: list[RolloutGroup]) -> None:
            one.begun = self.units.begin([*carried, *groups])

        groups, metrics = self.collector.finish(current, timer=self.timer, meanwhile=begin if begins else None)
        return RoundResult([*carried, *groups], metrics, carried_in=len(carried))

    def _settle(self) -> None:
        """Wait for the rounds ahead, so that the engine is free; collective. A failure is raised at its turn."""
        for one in self._ahead:
            with contextlib.suppress(SwiftError):
                self._result(one)

    def _make_unit(self, result: RoundResult, progress: TrainerProgress, begun: Begun | None = None) -> MadeUnit:
        made = self.units.make(result.groups, progress.global_step, begun)
        self.scheduler.end_unit(
            trained=made.trained,
            excluded=made.excluded + result.num_excluded,
            dropped=len(made.replayed) + result.num_dropped,
        )
        for prompt in [*result.failed, *(group.prompt for group in result.groups if self._has_failed(group))]:
            self.scheduler.try_again(prompt)
        sampled = result.sampled() or result.groups  # a round of nothing but carried groups sampled none
        known = len(made.plain) == 1 and list(map(id, sampled)) == list(map(id, result.groups))
        advantages_of = made.plain if known else [self.units.advantages(sampled)]
        metrics = {**round_metrics(sampled, advantages_of), **result.metrics, **made.metrics}
        if self.scheduler.reroll is not None:
            metrics["reroll/waiting"] = float(self.scheduler.waiting_again)
        plain, advantages = made.plain, made.advantages
        if result.dropped:
            dropped = self.units.advantages(result.dropped)
            plain, advantages = [*plain, dropped], [*advantages, *dropped.advantages_S.tolist()]
        unused = {group.group_id for group in result.dropped}
        unused |= {result.groups[number].group_id for number in made.replayed}
        step, groups = progress.global_step + 1, [*result.groups, *result.dropped]
        self._observe("train", step, groups, plain, advantages, metrics, unused=unused)
        return made

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
        result = self.units.advantages(groups)
        metrics = {**round_metrics(groups, [result]), **reward_metrics}
        self._observe("eval", progress.global_step, groups, [result], result.advantages_S.tolist(), metrics)
        return metrics

    def inspect(self, step: int, work: Callable[[], None]) -> None:
        """Let `work` look at the engine, which then has the weights of now and nothing to do; collective."""
        self._settle()
        with self.phase(step, current=True, trainer_stays=True):
            work()

    def _observe(
        self,
        split: str,
        step: int,
        groups: list[RolloutGroup],
        results: Sequence[Advantages],
        advantages: Sequence[float],
        metrics: dict[str, float],
        *,
        unused: Collection[str] = (),
    ) -> None:
        totals = torch.cat([result.rewards_S for result in results]).tolist()
        rewards = [None if total != total else total for total in totals]
        shown = [None if reward is None else value for reward, value in zip(rewards, advantages, strict=True)]
        version = self.publisher.version
        cut = self.units.cut
        excluded = ["overlong" if cut(completion) else None for g in groups for completion in g.completions]
        used = [group.group_id not in unused for group in groups for _ in group.completions]
        self.observer(ScoredRound(split, step, groups, rewards, shown, excluded, version, metrics, used))

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state: scheduler, publisher, what is left of the current unit, and the rounds asked for.

        Collective: rounds in flight are waited for and saved whole. One that fails is left out, and those after it:
        they are drawn again after a resume.
        """
        self._settle()
        whole = list(takewhile(lambda one: one.result is not None, self._ahead))
        pending = self.unit is not None and not self.unit.exhausted
        replay = self.units.replay
        return {
            "scheduler": self._without(list(self._ahead)[len(whole) :]),
            "publisher": self.publisher.state_dict(),
            "unit": self.unit.to_json() if pending and self.unit is not None else None,
            "ahead": [one.result.to_json() for one in whole if one.result is not None],
            "replay": replay.state_dict() if replay is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after `state`; the sampler gets the policy's weights before it is used again."""
        self.scheduler.load_state_dict(state["scheduler"])
        self.unit = TrainUnit.from_json(state["unit"]) if state["unit"] is not None else None
        self._ahead = deque(_Ahead(Intake(), result=RoundResult.from_json(saved)) for saved in state.get("ahead", []))
        if self.units.replay is not None and state.get("replay") is not None:
            self.units.replay.load_state_dict(state["replay"])
        if "publisher" in state:
            self.publisher.load_state_dict(state["publisher"])
