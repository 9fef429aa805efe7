"""The pipeline the trainer iterates over: prompts in, optimizer windows out, with a state that can be saved.

    PromptSource -> RolloutScheduler -> RolloutCollector (engine, rewards) -> advantages -> TrainUnit -> windows

The pipeline owns the unit that is being trained on. Its state (scheduler, unit, what has been consumed of it)
goes into every checkpoint as JSON, exact to the last bit, so that a resumed run continues with the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from swift.errors import SwiftError
from swift.rl.advantages import Advantages, Estimator, Scale, compute_advantages, reward_matrix
from swift.rollout.batch import TrainSample, TrainUnit
from swift.rollout.collect import RolloutCollector, launches_of
from swift.rollout.scheduler import RolloutScheduler
from swift.types import Completion, Prompt, RolloutGroup, TrainerProgress

Timer = Callable[[str], AbstractContextManager[Any]]
Observer = Callable[["ScoredRound"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How a unit is made of groups.

    generation_batches: generation batches of a unit, each with its own batch statistics.
    num_windows: optimizer windows that a unit feeds; num_iterations: how often.
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


class RolloutPipeline:
    """Makes units and hands out their windows.

    Args:
        scheduler: decides what is sampled.
        collector: samples and scores.
        config: how groups become units.
        timer: context manager factory for the phases of a step.
        observer: gets every scored round, on every rank.
    """

    def __init__(
        self,
        scheduler: RolloutScheduler,
        collector: RolloutCollector,
        config: PipelineConfig,
        *,
        timer: Timer,
        observer: Observer,
    ) -> None:
        self.scheduler = scheduler
        self.collector = collector
        self.config = config
        self.timer = timer
        self.observer = observer
        self.unit: TrainUnit | None = None
        self.epoch = 0.0

    def windows(self, progress: Callable[[], TrainerProgress]) -> Iterator[TrainUnit]:
        """For each optimizer step the unit to train on; `unit.window_index` says which window of it.

        The trainer calls `step_done` after each step.
        """
        while True:
            if self.unit is None or self.unit.exhausted:
                self.unit = None  # freed before the next one is made
                self.unit = self._make_unit(progress())
            yield self.unit

    def step_done(self) -> None:
        """Book one optimizer step on the current unit."""
        assert self.unit is not None
        self.unit.position += 1

    def _make_unit(self, progress: TrainerProgress) -> TrainUnit:
        self.collector.engine.publish(progress.global_step)
        before = self.scheduler.state_dict()
        launches = self.scheduler.launch_unit()
        try:
            groups, reward_metrics = self.collector.run(
                launches, num_generations=self.config.num_generations, progress=progress, timer=self.timer
            )
        except SwiftError:  # nothing of this round was trained on: a checkpoint saved now draws it again
            self.scheduler.load_state_dict(before)
            raise
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

    def evaluate(self, prompts: Sequence[Prompt], progress: TrainerProgress) -> dict[str, float]:
        """Sample and score held-out prompts under the current policy; the training stream is untouched.

        Returns:
            metrics without a prefix: `reward`, `reward_std`, `rewards/<name>/mean`, `completions/...`.
        """
        self.collector.engine.publish(progress.global_step)
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
                counts = reason is None and not self._cut(completion)
                trained = np.full(len(completion.token_ids), counts, dtype=np.bool_)
                yield TrainSample(
                    group=number,
                    prompt_ids=prompt,
                    token_ids=np.asarray(completion.token_ids, dtype=np.int32),
                    sampler_logprobs=np.asarray(completion.logprobs, dtype=np.float32),
                    trained=trained,
                    advantage=advantages[position],
                    version=completion.versions[0][0] if completion.versions else 0,
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
        version = self.collector.engine.version
        excluded = ["overlong" if self._cut(completion) else None for g in groups for completion in g.completions]
        self.observer(ScoredRound(split, step, groups, rewards, shown, excluded, version, metrics))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state: the scheduler and what is left of the current unit."""
        pending = self.unit is not None and not self.unit.exhausted
        return {
            "scheduler": self.scheduler.state_dict(),
            "unit": self.unit.to_json() if pending and self.unit is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after `state`."""
        self.scheduler.load_state_dict(state["scheduler"])
        self.unit = TrainUnit.from_json(state["unit"]) if state["unit"] is not None else None


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
