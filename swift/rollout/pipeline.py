"""The pipeline from prompts to global batches, with a state for checkpoints.

    PromptSource -> RolloutScheduler -> RolloutCollector (engine, rewards) -> BatchMaker (advantages) -> RolloutBatch

The pipeline owns the rollout batch that is being trained on. Its state (scheduler, rollout batch, position in it) is
part of every checkpoint, exact to the last bit, so that a resumed run continues with the same samples.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import msgspec
import torch

from swift.rl.advantages import Advantages
from swift.rollout.batches import BatchMaker, MadeBatch, PartialBatch, PipelineConfig, round_metrics
from swift.rollout.collector import RolloutCollector, launches_of
from swift.rollout.dynamic_sampling import GroupFilter, updated_rate
from swift.rollout.exclusions import ExclusionLimit
from swift.rollout.replay import ReplayBuffer, ReplayState
from swift.rollout.round import Round
from swift.rollout.round_result import RoundResult, ScoredRound
from swift.rollout.runner import RoundRunner
from swift.rollout.samples import Arrival, RolloutBatch, TrainerScores
from swift.rollout.saved_state import for_logs
from swift.rollout.scheduler import LaunchLog, RolloutScheduler, SchedulerState
from swift.rollout.weights.sync import WeightSync
from swift.types import Prompt, RolloutGroup, TrainerProgress

ARRIVAL_S = 0.005
"""Interval between checks for scored groups, in seconds."""

GenerationPhase = Callable[..., AbstractContextManager[None]]
"""`phase(step, current=False, trainer_stays=False)`: a collective context in which the engine may sample.

step: optimizer steps done. current: sync the current weights even if no weight sync is due (evaluation).
trainer_stays: the trainer's model is used inside as well."""
Timer = Callable[[str], AbstractContextManager[Any]]


class PipelineState(msgspec.Struct):
    """State of a pipeline in a checkpoint, exact to the last bit: a resumed run continues with equal samples.

    batch: the rollout batch that is being trained on. ahead: rounds that are sampled and not trained on yet.
    """

    scheduler: SchedulerState
    weight_sync: dict[str, Any]
    batch: RolloutBatch | None
    ahead: list[RoundResult]
    replay: ReplayState | None


class RolloutPipeline:
    """Makes rollout batches and yields one for each optimizer step.

    Args:
        scheduler: draws the prompts.
        collector: samples and scores.
        config: settings of rounds and rollout batches.
        timer: context manager factory for the phases of a step.
        observer: called with every scored round, on every rank.
        weight_sync: updates the weights of the rollout engine.
        phase: prepares the engine for generation (`swift.trainers.memory.colocate`); None syncs weights only.
        replay: buffer of groups that replace zero-variance groups.

    Attributes:
        features: scores from the trainer's models, set by the trainer; None is off.
        overlaps: whether sampling and training run at the same time.

    With `config.prefetch_depth` > 0 the next rounds are sampled on a background thread while this one trains; with
    streaming this one is. The main thread launches rounds and syncs weights, at points that depend on step numbers
    only. So the run does not depend on timing.
    """

    def __init__(
        self,
        scheduler: RolloutScheduler,
        collector: RolloutCollector,
        config: PipelineConfig,
        *,
        timer: Timer,
        observer: Callable[[ScoredRound], None],
        weight_sync: WeightSync,
        phase: GenerationPhase | None = None,
        replay: ReplayBuffer | None = None,
    ) -> None:
        self.scheduler, self.collector, self.config = scheduler, collector, config
        self.timer, self.observer, self.weight_sync = timer, observer, weight_sync
        self.batches = BatchMaker(config, replay=replay)
        self.phase: GenerationPhase = phase or self._weights_only
        self.batch: RolloutBatch | None = None
        self.features: TrainerScores | None = None
        self._ahead: deque[Round] = deque()
        self._restarts = 0
        self._exclusions = ExclusionLimit(config.max_excluded_frac)
        self._updates = config.num_global_batches * config.num_iterations  # per rollout batch
        self._consistent = True
        """Whether every launch has ended, or belongs to a round ahead or to the batch."""
        self.overlaps = config.prefetch_depth > 0 or config.streaming_groups > 0
        # with dynamic sampling the next prompts of the stream belong to the current round
        overlap = config.in_flight_updates and not config.dynamic_sample
        self._runner = RoundRunner(collector, threaded=self.overlaps, overlap=overlap)

    def steps(self, progress: Callable[[], TrainerProgress]) -> Iterator[RolloutBatch]:
        """For each optimizer step the rollout batch to train on; `RolloutBatch.global_batch()` is the part of the step.

        The trainer calls `step_done` after each step.
        """
        while True:
            if self.batch is None or self.batch.exhausted:
                self.batch = None  # freed before the next one is made
                self._next_batch(progress())
                assert self.batch is not None
            yield self.batch

    def doing(self) -> str:
        """How far the round is that the trainer waits for, in words; any thread may call it."""
        current = next(iter(list(self._ahead)), self.collector.current)
        return current.tally() if current is not None else ""

    def idle_s(self) -> float:
        """Seconds in which this rank had no round to sample, since the last call."""
        return self._runner.take_idle_s()

    @property
    def can_be_saved(self) -> bool:
        """Whether a run can be resumed exactly from `state`, after an error."""
        arriving = self.config.streaming_groups > 0 and self.batch is not None and not self.batch.exhausted
        return self._consistent and not arriving

    def step_done(self, step: int) -> None:
        """Count an optimizer step on the current rollout batch; step: optimizer steps done, this one included."""
        assert self.batch is not None
        self.batch.position += 1
        mid_batch = not self.batch.exhausted and not self._ahead
        if mid_batch and self.weight_sync.interval > 1 and self.weight_sync.due(step):
            with self.phase(step):
                pass

    @contextlib.contextmanager
    def _weights_only(self, step: int, *, current: bool = False, trainer_stays: bool = False) -> Iterator[None]:
        """The phase of engines that share no memory with the trainer, or share its weights."""
        self.weight_sync.update(step, current=current)
        yield

    def close(self) -> None:
        """End the rollout thread and close the source; the owner of the engine closes it afterwards."""
        self._runner.close()
        if self.collector.source is not None:
            self.collector.source.close()

    def _next_batch(self, progress: TrainerProgress) -> None:
        """Make the rollout batch to train on, and start to sample the rounds ahead of it."""
        config, streams = self.config, self.config.streaming_groups > 0
        if not self._ahead:
            self._ahead.append(self._launch_round(progress, wait=not streams))
        if streams:
            self.batch = RolloutBatch([], config.num_global_batches, config.num_iterations)
            self.batch.arriving = self._arrivals(self.batch, progress)
            return
        result, partial = self._first_result()
        self.batch = self._make_batch(result, progress, partial).batch
        if config.prefetch_depth > 0:
            self._launch_ahead(progress)

    def _arrivals(self, batch: RolloutBatch, progress: TrainerProgress) -> Iterator[Arrival]:
        """Samples as they arrive: informative groups in launch order, then all others; collective.

        Every arrival but the last has `streaming_groups` groups, so its contents do not depend on timing.
        """
        known: dict[str, int] = {}
        while groups := self._next_informative(self._ahead[0], known):
            first, start = len(known), len(batch.samples)
            known |= {group.group_id: first + i for i, group in enumerate(groups)}
            batch.samples += self.batches.samples(groups, first)
            yield Arrival(range(start, len(batch.samples)), last=False)
        try:
            result, _ = self._first_result()
            # without passes of frozen models: the step runs them for each arrival
            made = self._make_batch(result, progress, (self.batches.unscored_samples(result.groups), None))
        except Exception:
            self.batch = None  # an incomplete batch cannot be saved
            raise
        batch.arriving = None
        start, size = len(batch.samples), self.config.num_generations
        order = sorted(range(len(made.group_ids)), key=lambda i: not made.informative[i])
        for number in (number for number in order if made.group_ids[number] not in known):
            rest = made.batch.samples[number * size : (number + 1) * size]
            for sample in rest:
                sample.group = len(batch.samples) // size
            batch.samples += rest
        if self.config.prefetch_depth > 0:
            self._launch_ahead(progress)
        yield Arrival(range(start, len(batch.samples)), last=True)

    def _next_informative(self, current: Round, known: Collection[str]) -> list[RolloutGroup]:
        """Wait for the next informative groups of a round; [] if too few are left; collective."""
        ranks, size = self.collector.collectives, self.config.streaming_groups
        ready: list[RolloutGroup] = []
        if ranks.rank == 0:
            with self.timer("generate"):
                while True:
                    complete, scored = self._scored_so_far(current)
                    new = (group for group in scored if group.group_id not in known)
                    ready = [group for group in new if self.batches.informative(group)]
                    if complete or len(ready) >= size:
                        break
                    time.sleep(ARRIVAL_S)
        return list(ranks.broadcast(ready[:size] if len(ready) >= size else []))

    def _scored_so_far(self, current: Round) -> tuple[bool, list[RolloutGroup]]:
        """The scored groups of a round in launch order, after whether no more will be scored before it is finished."""
        if current.finished:
            result = current.result
            return True, result.groups[result.carried_in :] if result is not None else []
        return not self._runner.samples(current) and current.all_scored, current.scored()

    def _first_result(self) -> tuple[RoundResult, PartialBatch | None]:
        """Remove the first round ahead; its result, and its samples after early passes of frozen models; collective."""
        current = self._ahead[0]
        early = self.batches.has_early_pass and not self.config.streaming_groups
        try:
            result = self._result(current, early_pass=early)
        except Exception:  # a checkpoint saved now draws these rounds again
            self.scheduler.load(self.scheduler.state([ahead.log for ahead in self._ahead]))
            self._ahead.clear()
            raise
        self._consistent = False  # until `_make_batch` returns
        self._ahead.popleft()
        if result.launched:  # with dynamic sampling
            self.scheduler.rate = updated_rate(self.scheduler.rate, result.informative, result.launched)
            self.scheduler.carried.extend(result.carried)
        return result, current.partial_batch

    def _launch_ahead(self, progress: TrainerProgress) -> None:
        """Start to sample further rounds, up to `prefetch_depth` and to the end of the run."""
        most = math.ceil(progress.max_steps / self._updates) if progress.max_steps > 0 else math.inf
        while len(self._ahead) < self.config.prefetch_depth and self.scheduler.rounds < most:
            self._ahead.append(self._launch_round(progress, wait=False))

    def _launch_round(self, progress: TrainerProgress, *, wait: bool) -> Round:
        """Launch a round, after a weight sync if one is due; wait: sample it now, or else in the background.

        Weights change when no request is in flight, or, with `in_flight_updates`, between two tokens.
        """
        self._consistent = False
        current = self._new_round(progress)
        step = progress.global_step
        due_in_flight = self.weight_sync.due(step) and any(not ahead.finished for ahead in self._ahead)
        phase: AbstractContextManager[None] = contextlib.nullcontext()
        try:
            if due_in_flight and self.config.in_flight_updates:
                self._sync_in_flight(step)
            else:
                if due_in_flight:
                    with self.timer("generate"):
                        self._runner.drain()
                phase = self.phase(step)
            with phase:
                if wait:
                    with self.timer("generate"):
                        self._runner.sample(current)
                else:
                    self._runner.start(current)
        except Exception:
            self.scheduler.load(self.scheduler.state([current.log]))
            self._consistent = True
            raise
        self._consistent = True
        return current

    def _new_round(self, progress: TrainerProgress) -> Round:
        """The next round, with its launches unless dynamic sampling draws them."""
        config, step = self.config, self.scheduler.rounds * self._updates + 1
        last = progress.max_steps > 0 and step + self._updates > progress.max_steps
        log, group_filter = self.scheduler.begin_round(step), None
        if config.dynamic_sample:
            group_filter = GroupFilter(
                quota=self.scheduler.groups_per_batch,
                carried=len(log.carried),
                max_resample_times=config.max_resample_times,
                # no surplus at the end of the run, nor for a batch that is trained on as it arrives
                rate=1.0 if last or config.streaming_groups else self.scheduler.rate,
            )
        else:
            self.scheduler.launch_batch(log)
        return self.collector.prepare(
            log,
            num_generations=config.num_generations,
            progress=progress,
            group_filter=group_filter,
            draw=functools.partial(self.scheduler.launch, log),
            informative=self.batches.informative,
            failed=self._has_failed,
        )

    def _has_failed(self, group: RolloutGroup) -> bool:
        """Whether the prompt of a scored group is to be re-rolled: rewards are equal, and none is above the limit."""
        totals = [total for total in self.batches.totals(group) if total == total]
        limit = self.config.reroll_fail_reward
        return bool(totals) and max(totals) <= limit and not self.batches.informative(group)

    def _sync_in_flight(self, step: int) -> None:
        """Pause the engine between two tokens, sync weights, resume; an error of one rank is raised on all."""
        engine = self.collector.engine
        try:
            with self.collector.collectives.together():
                self._runner.hold()
            self.weight_sync.sync(step)
            with self.collector.collectives.together():
                if engine is not None:
                    engine.resume()
        finally:
            self._runner.release()

    def _result(self, current: Round, *, early_pass: bool = False) -> RoundResult:
        """Wait for the scored groups of a round; collective. Its failure is raised on every rank, at every call.

        early_pass: run the passes of frozen models while rewards are computed; for the round that is trained on next.
        """

        def run_frozen(groups: list[RolloutGroup]) -> None:
            current.partial_batch = self.batches.with_frozen([*current.log.carried, *groups])

        if not current.finished:
            try:
                if self.overlaps:
                    with self.timer("generate"):
                        self._runner.wait(current)
                meanwhile = run_frozen if early_pass else None
                current.result = self.collector.finish(current, timer=self.timer, meanwhile=meanwhile)
            except Exception as error:
                current.failure = error
            current.finished = True
        if current.result is None:
            assert current.failure is not None
            raise current.failure
        return current.result

    def _finish_ahead(self) -> None:
        """Wait for the rounds ahead, so that the engine is free; collective."""
        for ahead in self._ahead:
            with contextlib.suppress(Exception):  # raised when its batch is made
                self._result(ahead)

    def _make_batch(
        self, result: RoundResult, progress: TrainerProgress, partial: PartialBatch | None = None
    ) -> MadeBatch:
        own_scores = self._score(self.features, result.groups) if self.features is not None else {}
        made = self.batches.make(result.groups, progress.global_step, partial)
        if self.features is not None:
            made.batch.references = self.features.reference_samples(result.groups)
        self.scheduler.end_round(
            trained=made.trained,
            excluded=made.excluded + result.num_excluded,
            dropped=len(made.replayed) + result.num_dropped,
        )
        # a round whose groups are all carried over has sampled none
        sampled = [*result.groups[result.carried_in :], *result.carried, *result.dropped] or result.groups
        metrics = round_metrics(sampled, self.batches.advantages(sampled))
        metrics |= {**result.metrics, **made.metrics, **own_scores}
        if self.scheduler.reroll is not None:
            failed = [group.prompt for group in result.groups if self._has_failed(group)]
            for prompt in [*result.failed, *failed]:
                self.scheduler.queue_reroll(prompt)
            metrics["reroll/waiting"] = float(self.scheduler.rerolls_waiting)
        dropped = [self.batches.advantages(result.dropped)] if result.dropped else []
        unused = {group.group_id for group in result.dropped}
        unused |= {result.groups[number].group_id for number in made.replayed}
        self._observe(
            "train",
            progress.global_step + 1,
            [*result.groups, *result.dropped],
            [*made.plain, *dropped],
            [*made.advantages, *(value for of_dropped in dropped for value in of_dropped.advantages_S.tolist())],
            metrics,
            unused=unused,
        )
        self._consistent = True
        self._exclusions.add(result.num_samples, result.reasons)
        return made

    def _score(self, features: TrainerScores, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        with self.timer("reward"):
            return features.score(groups)

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
        completions = [completion for group in groups for completion in group.completions]
        excluded = ["overlong" if self.batches.is_overlong(completion) else None for completion in completions]
        used = [group.group_id not in unused for group in groups for _ in group.completions]
        version = self.weight_sync.version
        self.observer(ScoredRound(split, step, groups, rewards, shown, excluded, version, metrics, used))

    def staleness(self, step: int) -> dict[str, float]:
        """Age of the weights that sampled each token of the current global batch, in optimizer steps.

        Completions that are not trained on do not count. step: optimizer steps done before.
        """
        assert self.batch is not None
        samples = [self.batch.samples[i] for i in self.batch.global_batch()]
        ages = [
            (step - self.weight_sync.step_of(version), end - start)
            for sample in samples
            if sample.num_trained
            for version, start, end in sample.versions
        ]
        tokens = sum(count for _, count in ages)
        return {
            "off_policy/mean": sum(age * count for age, count in ages) / max(1, tokens),
            "off_policy/max": float(max((age for age, _ in ages), default=0)),
        }

    def engine_health(self) -> dict[str, float]:
        """Restarts of engine processes since the last call; {} if the trainer's own model samples."""
        engine = self.collector.engine
        if engine is None or engine.capabilities.shares_weights:
            return {}
        restarts, self._restarts = engine.counters.restarts - self._restarts, engine.counters.restarts
        return {"health/engine_restarts": float(restarts)}

    def evaluate(self, prompts: Sequence[Prompt], progress: TrainerProgress) -> dict[str, float]:
        """Sample and score held-out prompts under the current policy; does not change the training stream.

        The metrics have no prefix: `reward`, `reward_std`, `rewards/<name>/mean`, `completions/...`.
        """
        self._finish_ahead()  # with the weights that they were launched with
        with self.phase(progress.global_step, current=True):
            current = self.collector.prepare(
                LaunchLog(launches=launches_of(prompts)),
                num_generations=self.config.num_generations_eval,
                progress=progress,
                seed_namespace="eval:",
            )
            with self.timer("generate"):
                self._runner.sample(current)
            scored = self.collector.finish(current, timer=self.timer)
        own_scores = self._score(self.features, scored.groups) if self.features is not None else {}
        result = self.batches.advantages(scored.groups)
        metrics = {**round_metrics(scored.groups, result), **scored.metrics, **own_scores}
        self._observe("eval", progress.global_step, scored.groups, [result], result.advantages_S.tolist(), metrics)
        return metrics

    def inspect(self, step: int, work: Callable[[], None]) -> None:
        """Call `work` while the engine has the current weights and no requests; collective."""
        self._finish_ahead()
        with self.phase(step, current=True, trainer_stays=True):
            work()

    def state(self) -> PipelineState:
        """A copy of the state: scheduler, weight sync, the rest of the current batch, and the rounds ahead.

        Collective: waits for the rounds in flight, which are saved with their samples. A failed round and those after
        it are left out; a resumed run draws them again.
        """
        self._finish_ahead()
        valid = [ahead.result for ahead in takewhile(lambda ahead: ahead.result is not None, self._ahead)]
        pending = self.batch is not None and not self.batch.exhausted
        replay = self.batches.replay
        return PipelineState(
            scheduler=self.scheduler.state([ahead.log for ahead in list(self._ahead)[len(valid) :]]),
            weight_sync=self.weight_sync.state_dict(),
            batch=replace(self.batch) if pending and self.batch is not None else None,
            ahead=[
                replace(result, dropped=[for_logs(group) for group in result.dropped])
                for result in valid
                if result is not None
            ],
            replay=replay.state() if replay is not None else None,
        )

    def load(self, state: PipelineState) -> None:
        """Continue exactly after `state`; the engine gets the policy's weights before it samples."""
        self.scheduler.load(state.scheduler)
        self.batch = replace(state.batch) if state.batch is not None else None
        self._ahead = deque(Round(self.collector, LaunchLog(), result=result, finished=True) for result in state.ahead)
        if self.batches.replay is not None and state.replay is not None:
            self.batches.replay.load(state.replay)
        self.weight_sync.load_state_dict(state.weight_sync)
