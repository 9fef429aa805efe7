"""The pipeline the trainer iterates over: prompts in, global batches out, with a state that can be saved.

    PromptSource -> RolloutScheduler -> RolloutCollector (engine, rewards) -> BatchMaker (advantages) -> RolloutBatch

The pipeline owns the rollout batch that is being trained on. Its state (scheduler, batch, what has been consumed of it)
goes into every checkpoint, exact to the last bit, so that a resumed run continues with the same samples.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from swift.rollout.saved_state import without_tokens
from swift.rollout.scheduler import LaunchLog, RolloutScheduler, SchedulerState
from swift.rollout.weights.sync import WeightSync
from swift.types import Prompt, RolloutGroup, TrainerProgress

ARRIVAL_S = 0.005
"""Time between two looks at what has been scored."""

GenerationPhase = Callable[..., AbstractContextManager[None]]
"""`phase(step, current=False, trainer_stays=False)`: a collective context in which the engine may sample.

step: optimizer steps done. current: the weights must be those of now, whether a weight sync is due or not (evaluation).
trainer_stays: the trainer's model is needed inside as well."""
Timer = Callable[[str], AbstractContextManager[Any]]


class PipelineState(msgspec.Struct):
    """What a checkpoint holds of a pipeline: exact to the last bit, so that a resumed run continues with equal samples.

    batch: what is left of the one that is trained on. ahead: rounds that are sampled and not trained on.
    """

    scheduler: SchedulerState
    weight_sync: dict[str, Any]
    batch: RolloutBatch | None
    ahead: list[RoundResult]
    replay: ReplayState | None


class RolloutPipeline:
    """Makes rollout batches and hands out their global batches.

    Args:
        scheduler: decides what is sampled.
        collector: samples and scores.
        config: how groups become rollout batches.
        timer: context manager factory for the phases of a step.
        observer: gets every scored round, on every rank.
        weight_sync: gives the rollout engine new weights.
        phase: makes the engine ready for generation (`swift.trainers.memory.colocate`); None syncs weights only.
        replay: groups to stand in for zero-variance groups.

    With `config.prefetch_depth` > 0 the next rounds are sampled on a thread while this one trains. Every decision
    (what is launched, when weights are synced) still falls on the main thread, at points that depend on step numbers
    only, so the run does not depend on how fast anything was.
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
        self.phase: GenerationPhase = phase or self._synced
        self.batch: RolloutBatch | None = None
        self.features: TrainerScores | None = None
        self._ahead: deque[Round] = deque()
        self._restarts = 0
        self._exclusions = ExclusionLimit(config.max_excluded_frac)
        self._whole = True
        """Whether every launch is booked as ended, or belongs to a round ahead or to the batch."""
        # with dynamic sampling the next prompts of the stream belong to the round that is sampled now
        overlap = config.in_flight_updates and not config.dynamic_sample
        self._runner = RoundRunner(collector, threaded=self.overlaps, overlap=overlap)

    def steps(self, progress: Callable[[], TrainerProgress]) -> Iterator[RolloutBatch]:
        """For each optimizer step the rollout batch to train on; its `global_batch_index` says which part of it.

        The trainer calls `step_done` after each step.
        """
        while True:
            if self.batch is None or self.batch.exhausted:
                self.batch = None  # freed before the next one is made
                self._next_batch(progress())
                assert self.batch is not None
            yield self.batch

    @property
    def overlaps(self) -> bool:
        return self.config.prefetch_depth > 0 or self.config.streaming_groups > 0

    def idle_s(self) -> float:
        """Seconds in which this rank had nothing to sample, since the last call."""
        return self._runner.take_idle_s()

    @property
    def can_be_saved(self) -> bool:
        """Whether `state` is one that a run continues from exactly, now that something has failed."""
        arriving = self.config.streaming_groups > 0 and self.batch is not None and not self.batch.exhausted
        return self._whole and not arriving

    def step_done(self, step: int) -> None:
        """Book one optimizer step on the current rollout batch; `step` steps are done now."""
        assert self.batch is not None
        self.batch.position += 1
        mid_batch = not self.batch.exhausted and not self._ahead
        if mid_batch and self.weight_sync.interval > 1 and self.weight_sync.due(step):
            with self.phase(step):
                pass

    @contextlib.contextmanager
    def _synced(self, step: int, *, current: bool = False, trainer_stays: bool = False) -> Iterator[None]:
        """The phase of engines that share the trainer's weights, or have memory of their own."""
        self.weight_sync.update(step, current=current)
        yield

    def close(self) -> None:
        """End the rollout thread and the source; the owner of its engine closes that right after."""
        self._runner.close()
        if self.collector.source is not None:
            self.collector.source.close()

    def _next_batch(self, progress: TrainerProgress) -> None:
        """Make the rollout batch to train on, and ask for the rounds that are sampled meanwhile."""
        streams = self.config.streaming_groups > 0
        if not self._ahead:
            self._ahead.append(self._ask(progress, wait=not streams))
        if streams:
            self.batch = self.batches.batch([])
            self.batch.arriving = self._arrivals(self.batch, progress)
            return
        result, partial = self._first_result()
        self.batch = self._make_batch(result, progress, partial).batch
        self._ask_ahead(progress)

    def _arrivals(self, batch: RolloutBatch, progress: TrainerProgress) -> Iterator[Arrival]:
        """Samples as they arrive: informative groups in launch order, then all others; collective.

        Only the last arrival is of another size than `streaming_groups`, so what each holds depends on no clock.
        """
        known: dict[str, int] = {}
        while groups := self._arrived(self._ahead[0], known):
            first, start = len(known), len(batch.samples)
            known |= {group.group_id: first + i for i, group in enumerate(groups)}
            batch.samples += self.batches.samples(groups, first)
            yield Arrival(range(start, len(batch.samples)), last=False)
        try:
            result, _ = self._first_result()
            made = self._make_batch(result, progress, self.batches.partial(result.groups))  # arrivals know their own
        except Exception:
            self.batch = None  # a part of it is nothing that could be saved
            raise
        batch.arriving = None
        start, size = len(batch.samples), self.config.num_generations
        order = sorted(range(len(made.group_ids)), key=lambda i: not made.informative[i])
        for number in (number for number in order if made.group_ids[number] not in known):
            rest = made.batch.samples[number * size : (number + 1) * size]
            for sample in rest:
                sample.group = len(batch.samples) // size
            batch.samples += rest
        self._ask_ahead(progress)
        yield Arrival(range(start, len(batch.samples)), last=True)

    def _arrived(self, one: Round, known: Collection[str]) -> list[RolloutGroup]:
        """The next informative groups, waited for; none when too few are left; collective."""
        ranks, size = self.collector.collectives, self.config.streaming_groups
        ready: list[RolloutGroup] = []
        if ranks.rank == 0:
            with self.timer("generate"):
                while True:
                    over, scored = self._scored_so_far(one)
                    new = (group for group in scored if group.group_id not in known)
                    ready = [group for group in new if self.batches.informative(group)]
                    if over or len(ready) >= size:
                        break
                    time.sleep(ARRIVAL_S)
        return list(ranks.broadcast(ready[:size] if len(ready) >= size else []))

    def _scored_so_far(self, one: Round) -> tuple[bool, list[RolloutGroup]]:
        """Whether no more will come before the round is finished, and what this rank has, in launch order."""
        if one.settled:
            return True, one.result.groups[one.result.carried_in :] if one.result is not None else []
        return not self._runner.samples(one) and one.all_scored, one.scored()

    def _first_result(self) -> tuple[RoundResult, PartialBatch | None]:
        """The result of the next round, which leaves those ahead, and what is known of its batch; collective."""
        one = self._ahead[0]
        try:
            result = self._result(one, refers=self.batches.refers_early and not self.config.streaming_groups)
        except Exception:  # nothing of this round was trained on: a checkpoint saved now draws it again
            self.scheduler.load(self._without(self._ahead))
            self._ahead.clear()
            raise
        self._whole = False  # until `_make_batch` is done
        self._ahead.popleft()
        self.scheduler.rate = updated_rate(self.scheduler.rate, result.informative, result.launched)
        self.scheduler.carry(result.carried)
        return result, one.partial_batch

    def _ask_ahead(self, progress: TrainerProgress) -> None:
        """Have the rounds sampled that may be, and that will be trained on."""
        most = math.ceil(progress.max_steps / self._updates) if progress.max_steps > 0 else math.inf
        while len(self._ahead) < self.config.prefetch_depth and self.scheduler.rounds < most:
            self._ahead.append(self._ask(progress, wait=False))

    def _without(self, rounds: Iterable[Round]) -> SchedulerState:
        """The scheduler's state as if these last rounds had not been asked for; what has ended stays ended."""
        return self.scheduler.state([one.log for one in rounds])

    @property
    def _updates(self) -> int:
        """Optimizer steps that a rollout batch feeds."""
        return self.config.num_global_batches * self.config.num_iterations

    def _ask(self, progress: TrainerProgress, *, wait: bool) -> Round:
        """Launch a round with the weights of now, if a weight sync is due, and sample it or start to.

        Weights change when nothing is in flight, or, with `in_flight_updates`, between two tokens.
        """
        self._whole = False
        one = self._new_round(progress)
        step = progress.global_step
        due_in_flight = self.weight_sync.due(step) and any(not other.settled for other in self._ahead)
        try:
            if due_in_flight and self.config.in_flight_updates:
                self._sync_in_flight(step)
                self._sample(one, wait=wait)
            else:
                if due_in_flight:
                    with self.timer("generate"):
                        self._runner.drain()
                with self.phase(step):
                    self._sample(one, wait=wait)
        except Exception:
            self.scheduler.load(self._without([one]))
            self._whole = True
            raise
        self._whole = True
        return one

    def _new_round(self, progress: TrainerProgress) -> Round:
        """The next round, with its launches if they do not depend on how it goes."""
        config, step = self.config, self.scheduler.rounds * self._updates + 1
        last = progress.max_steps > 0 and step + self._updates > progress.max_steps
        log, group_filter = self.scheduler.begin_round(step), None
        if config.dynamic_sample:
            group_filter = GroupFilter(
                quota=self.scheduler.groups_per_batch,
                carried=len(log.carried),
                max_resample_times=config.max_resample_times,
                # nothing is left over at the end of the run, and what is trained on as it arrives is never too much
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
        """Whether the prompt of a group is to be re-rolled: scored, without a difference, and never well."""
        totals = [total for total in self.batches.totals(group) if total == total]
        limit = self.config.reroll_fail_reward
        return bool(totals) and max(totals) <= limit and not self.batches.informative(group)

    def _sample(self, current: Round, *, wait: bool) -> None:
        if not wait:
            self._runner.start(current)
            return
        with self.timer("generate"):
            self._runner.sample(current)

    def _sync_in_flight(self, step: int) -> None:
        """Pause the engine between two tokens, sync, go on; a rank that cannot tells the others."""
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

    def _result(self, one: Round, *, refers: bool = False) -> RoundResult:
        """The scored groups of a round, waited for; collective. Its failure is raised on every rank, at every call.

        refers: it is trained on next, so the reference can work on it while rewards are computed.
        """

        def refer(groups: list[RolloutGroup]) -> None:
            one.partial_batch = self.batches.referred([*one.log.carried, *groups])

        if not one.settled:
            try:
                with self.timer("generate"):
                    self._runner.wait(one)
                one.result = self.collector.finish(one, timer=self.timer, meanwhile=refer if refers else None)
            except Exception as error:
                one.failure = error
            one.settled = True
        if one.result is None:
            assert one.failure is not None
            raise one.failure
        return one.result

    def _settle(self) -> None:
        """Wait for the rounds ahead, so that the engine is free; collective."""
        for one in self._ahead:
            with contextlib.suppress(Exception):  # raised at its turn
                self._result(one)

    def _make_batch(
        self, result: RoundResult, progress: TrainerProgress, partial: PartialBatch | None = None
    ) -> MadeBatch:
        own_scores = self._score(result.groups)
        made = self.batches.make(result.groups, progress.global_step, partial)
        if self.features is not None:
            made.batch.references = self.features.reference_samples(result.groups)
        self.scheduler.end_round(
            trained=made.trained,
            excluded=made.excluded + result.num_excluded,
            dropped=len(made.replayed) + result.num_dropped,
        )
        for prompt in [*result.failed, *(group.prompt for group in result.groups if self._has_failed(group))]:
            self.scheduler.queue_reroll(prompt)
        sampled = result.sampled() or result.groups  # a round of nothing but carried groups sampled none
        metrics = round_metrics(sampled, self.batches.advantages(sampled))
        metrics |= {**result.metrics, **made.metrics, **own_scores}
        if self.scheduler.reroll is not None:
            metrics["reroll/waiting"] = float(self.scheduler.rerolls_waiting)
        dropped = [self.batches.advantages(result.dropped)] if result.dropped else []
        unused = {group.group_id for group in result.dropped}
        unused |= {result.groups[number].group_id for number in made.replayed}
        self._observe(
            "train",
            progress.global_step + 1,
            [*result.groups, *result.dropped],
            [*made.plain, *dropped],
            [*made.advantages, *(value for one in dropped for value in one.advantages_S.tolist())],
            metrics,
            unused=unused,
        )
        self._whole = True
        self._exclusions.add(result.num_samples, result.reasons)
        return made

    def _score(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        if self.features is None:
            return {}
        with self.timer("reward"):
            return self.features.score(groups)

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
        cut = ["overlong" if self.batches.cut(one) else None for group in groups for one in group.completions]
        used = [group.group_id not in unused for group in groups for _ in group.completions]
        version = self.weight_sync.version
        self.observer(ScoredRound(split, step, groups, rewards, shown, cut, version, metrics, used))

    def staleness(self, step: int) -> dict[str, float]:
        """Per token, how many optimizer steps the weights that sampled it are behind those that are trained now.

        Of the current global batch; completions that are not trained on do not count. step: optimizer steps done
        before.
        """
        assert self.batch is not None
        samples = [self.batch.samples[i] for i in self.batch.global_batch(self.batch.global_batch_index)]
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
        """Restarts of engine processes since the last call; nothing where the trainer's own model samples."""
        engine = self.collector.engine
        if engine is None or engine.capabilities.shares_weights:
            return {}
        restarts, self._restarts = engine.counters.restarts - self._restarts, engine.counters.restarts
        return {"health/engine_restarts": float(restarts)}

    def evaluate(self, prompts: Sequence[Prompt], progress: TrainerProgress) -> dict[str, float]:
        """Sample and score held-out prompts under the current policy; the training stream is untouched.

        The metrics have no prefix: `reward`, `reward_std`, `rewards/<name>/mean`, `completions/...`.
        """
        self._settle()  # they keep the weights that they were asked for with
        with self.phase(progress.global_step, current=True):
            current = self.collector.prepare(
                LaunchLog(launches=launches_of(prompts)),
                num_generations=self.config.num_generations_eval,
                progress=progress,
                seed_namespace="eval:",
            )
            self._sample(current, wait=True)
            scored = self.collector.finish(current, timer=self.timer)
        own_scores = self._score(scored.groups)
        result = self.batches.advantages(scored.groups)
        metrics = {**round_metrics(scored.groups, result), **scored.metrics, **own_scores}
        self._observe("eval", progress.global_step, scored.groups, [result], result.advantages_S.tolist(), metrics)
        return metrics

    def inspect(self, step: int, work: Callable[[], None]) -> None:
        """Let `work` look at the engine, which then has the weights of now and nothing to do; collective."""
        self._settle()
        with self.phase(step, current=True, trainer_stays=True):
            work()

    def state(self) -> PipelineState:
        """A copy of the state: scheduler, weight_sync, what is left of the current batch, and the rounds asked for.

        Collective: rounds in flight are waited for and saved whole. One that fails is left out, and those after it:
        they are drawn again after a resume.
        """
        self._settle()
        valid = [one.result for one in takewhile(lambda one: one.result is not None, self._ahead)]
        pending = self.batch is not None and not self.batch.exhausted
        replay = self.batches.replay
        return PipelineState(
            scheduler=self._without(list(self._ahead)[len(valid) :]),
            weight_sync=self.weight_sync.state_dict(),
            batch=replace(self.batch) if pending and self.batch is not None else None,
            ahead=[replace(one, dropped=[without_tokens(group) for group in one.dropped]) for one in valid if one],
            replay=replay.state() if replay is not None else None,
        )

    def load(self, state: PipelineState) -> None:
        """Continue exactly after `state`; the engine gets the policy's weights before it is used again."""
        self.scheduler.load(state.scheduler)
        self.batch = replace(state.batch) if state.batch is not None else None
        self._ahead = deque(Round(self.collector, LaunchLog(), result=one, settled=True) for one in state.ahead)
        if self.batches.replay is not None and state.replay is not None:
            self.batches.replay.load(state.replay)
        self.weight_sync.load_state_dict(state.weight_sync)
