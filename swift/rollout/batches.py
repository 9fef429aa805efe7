"""From the scored groups of a round to a rollout batch: advantages, data masks, replayed groups.

    groups -> rewards -> advantages (per generation batch) -> samples -> slots of zero-variance groups <- replay

Every rank has all scored groups of a round, so the result is the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from swift.rl.advantages import Advantages, compute_advantages, reward_matrix
from swift.rl.estimators import Scale
from swift.rollout.exclusions import reasons_of
from swift.rollout.replay import ReplayBuffer, ReplayEntry
from swift.rollout.round_result import fault
from swift.rollout.routes import routes_of
from swift.rollout.samples import RolloutBatch, TrainSample
from swift.rollout.saved_state import beside_tokens
from swift.rollout.scores import arrays_of
from swift.types import Completion, GroupScores, RolloutGroup

PartialBatch = tuple[list[TrainSample], torch.Tensor | None]
"""Samples with advantage 0, and k1 of each in nats, float64, or None without a KL in the reward."""

KLOfSamples = Callable[[Sequence[TrainSample]], Sequence[float]]
"""The k1 estimate of each sample's divergence from the reference, in nats, the same on every rank; collective."""

FrozenPass = Callable[[RolloutBatch], None]
"""Fills in the log-probs of frozen models for the samples that this rank will train on; collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Settings of the conversion from groups to samples.

    generation_batches: number of generation batches of a rollout batch, each with its own statistics.
    num_global_batches: number of optimizer steps in one pass over a rollout batch; num_iterations: number of passes.
    estimator_parameters: parameters of the advantage estimator; None takes its defaults.
    reward_kl: weight of the KL that is subtracted from rewards; 0 is off.
    """

    num_generations: int
    generation_batches: int
    num_global_batches: int
    num_iterations: int
    advantage_estimator: str = "grpo"
    estimator_parameters: Any = None
    scale_rewards: Scale | None = None
    reward_weights: Sequence[float] = ()
    overlong_filter: bool = False
    reward_kl: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(BatchConfig):
    """Settings of rounds and of the rollout batches made from them.

    prefetch_depth: number of rounds sampled ahead of the one that trains; 0 generates, then trains.
    in_flight_updates: whether weights may change while completions are being sampled.
    streaming_groups: number of informative groups to train on as soon as they are scored, while others are sampled; 0
        waits for the whole round. Needs one optimizer step per rollout batch, advantages of single groups, and an
        engine that samples outside of this thread.
    dynamic_sample, max_resample_times: see `swift.rollout.dynamic_sampling`.
    reroll_fail_reward: maximum reward of a failed completion; a prompt is re-rolled if all of its completions failed
        with equal rewards and the scheduler has re-rolls.
    max_excluded_frac: see `swift.rollout.exclusions`.
    """

    num_generations_eval: int
    prefetch_depth: int = 0
    in_flight_updates: bool = False
    streaming_groups: int = 0
    dynamic_sample: bool = False
    max_resample_times: int = 3
    reroll_fail_reward: float = 0.0
    max_excluded_frac: float = 1.0


@dataclass(slots=True)
class MadeBatch:
    """A rollout batch, with what the scheduler counts and what is logged.

    plain: advantages of each generation batch, without the KL in the reward. advantages: those trained on, one per
        completion.
    group_ids, informative: one entry per group of the round. replayed: slot -> the replay entry that fills it.
    trained, excluded: number of groups of the round; replaced groups count as neither.
    """

    batch: RolloutBatch
    plain: list[Advantages]
    advantages: list[float]
    replayed: dict[int, ReplayEntry]
    group_ids: list[str]
    informative: list[bool]
    trained: int
    excluded: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class BatchMaker:
    """Makes rollout batches of groups.

    replay: buffer of groups that replace zero-variance groups; None is off.
    kl_of: set by the trainer; required if `config.reward_kl` > 0.
    frozen_pass: set by the trainer for a loss with frozen models; None: it computes missing log-probs in its step.
    """

    config: BatchConfig
    replay: ReplayBuffer | None = None
    kl_of: KLOfSamples | None = None
    frozen_pass: FrozenPass | None = None

    @property
    def has_early_pass(self) -> bool:
        """Whether a frozen model can run before rewards are known; replayed groups depend on rewards."""
        return self.config.reward_kl > 0 or (self.frozen_pass is not None and self.replay is None)

    def with_frozen(self, groups: Sequence[RolloutGroup]) -> PartialBatch:
        """The samples of a round after the passes of frozen models, before rewards are needed; collective."""
        config, samples = self.config, self.unscored_samples(groups)
        if self.frozen_pass is not None and self.replay is None:
            self.frozen_pass(RolloutBatch(samples, config.num_global_batches, config.num_iterations))
        return samples, self._kl(groups) if config.reward_kl > 0 else None

    def samples(self, groups: Sequence[RolloutGroup], first: int) -> list[TrainSample]:
        """Samples with advantages, of groups that share no statistics with others; numbered from `first`."""
        samples = self.unscored_samples(groups, first)
        _note_scores(samples, groups)
        advantages = _overridden(groups, self.advantages(groups).advantages_S)
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = advantage
        return samples

    def make(self, groups: Sequence[RolloutGroup], step: int, partial: PartialBatch | None = None) -> MadeBatch:
        """The rollout batch of a round.

        Args:
            groups: scored, in launch order; as many as a rollout batch has.
            step: optimizer steps done.
            partial: samples of the same groups after `with_frozen`; None: nothing is computed yet.
        """
        config = self.config
        if partial is None:
            # the micro-batches of these passes ignore exclusions in any case, so they depend on no clock
            excludes = any(reason is not None for group in groups for reason in scores_of(group).excluded)
            early = excludes and self.has_early_pass
            partial = self.with_frozen(groups) if early else (self.unscored_samples(groups), None)
        samples, kl_S = partial
        _note_scores(samples, groups)
        size = len(groups) // config.generation_batches
        batches = [groups[i : i + size] for i in range(0, len(groups), size)]
        results = plain = [self.advantages(part) for part in batches]
        metrics: dict[str, float] = {}
        if config.reward_kl > 0:
            kl_S = kl_S if kl_S is not None else self._kl(groups)
            of_trained = [kl for kl, sample in zip(kl_S.tolist(), samples, strict=True) if sample.num_trained]
            metrics["kl_in_reward"] = fmean(of_trained or [0.0])
            for sample, kl in zip(samples, kl_S.tolist(), strict=True):
                sample.reward_kl = kl
            penalties = (config.reward_kl * kl_S).split([sum(len(g.completions) for g in part) for part in batches])
            results = [self.advantages(part, penalty) for part, penalty in zip(batches, penalties, strict=True)]
        advantages = _overridden(groups, torch.cat([result.advantages_S for result in results]))
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = advantage
        # a group whose rewards differ by the KL alone has no signal about the task
        informative = [differs for result in plain for differs in result.informative_P.tolist()]
        replayed: dict[int, ReplayEntry] = {}
        if self.replay is not None:
            replayed = self._replay(self.replay, groups, samples, informative, step)
            metrics |= {"replay/groups": float(len(replayed)), "replay/size": float(len(self.replay))}
            if replayed:
                metrics["replay/age"] = fmean(step - entry.step for entry in replayed.values())
        size = config.num_generations
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        has_none = [not any(sample.num_trained for sample in part) for part in parts]
        excluded = sum(none and number not in replayed for number, none in enumerate(has_none))
        return MadeBatch(
            RolloutBatch(samples, config.num_global_batches, config.num_iterations),
            plain,
            advantages,
            replayed,
            [group.group_id for group in groups],
            informative,
            trained=len(groups) - excluded - len(replayed),
            excluded=excluded,
            metrics=metrics,
        )

    def _kl(self, groups: Sequence[RolloutGroup]) -> torch.Tensor:
        """k1 of each completion, truncated ones included: their rewards count in the mean of the group."""
        assert self.kl_of is not None, "kl_of is not set"
        return torch.tensor(list(self.kl_of(self.unscored_samples(groups, with_overlong=True))), dtype=torch.float64)

    def advantages(self, groups: Sequence[RolloutGroup], kl_penalty_S: torch.Tensor | None = None) -> Advantages:
        """Advantages of scored groups that share their batch statistics."""
        scores = [scores_of(group) for group in groups]
        index = [number for number, group in enumerate(groups) for _ in group.completions]
        return compute_advantages(
            reward_matrix([row for of_group in scores for row in of_group.values]),
            torch.tensor(index, dtype=torch.long),
            weights_K=torch.tensor(list(self.config.reward_weights), dtype=torch.float64),
            excluded_S=torch.tensor(
                [reason is not None for of_group in scores for reason in of_group.excluded], dtype=torch.bool
            ),
            estimator=self.config.advantage_estimator,
            parameters=self.config.estimator_parameters,
            scale=self.config.scale_rewards,
            kl_penalty_S=kl_penalty_S,
        )

    def informative(self, group: RolloutGroup) -> bool:
        """Whether the rewards of a group differ, without the KL."""
        return bool(self.advantages([group]).informative_P[0])

    def totals(self, group: RolloutGroup) -> list[float]:
        """The weighted rewards of a group's completions, NaN where excluded."""
        return self.advantages([group]).rewards_S.tolist()

    def is_overlong(self, completion: Completion) -> bool:
        """Whether the overlong filter excludes a completion from the loss; it stays in the group's statistics."""
        return self.config.overlong_filter and completion.finish_reason == "length"

    def unscored_samples(
        self, groups: Sequence[RolloutGroup], first: int = 0, *, with_overlong: bool = False
    ) -> list[TrainSample]:
        """Samples of groups with advantage 0, numbered from `first`; `with_overlong` ignores the overlong filter."""
        samples = []
        for number, group in enumerate(groups, first):
            row_prompt = np.asarray(group.prompt.token_ids, dtype=np.int32)
            for index, completion in enumerate(group.completions):
                counts = fault(completion) is None and bool(completion.token_ids)
                counts = counts and (with_overlong or not self.is_overlong(completion))
                mask = np.asarray(completion.mask or [1] * len(completion.token_ids), dtype=np.bool_)
                prompt, ref_logprobs, token_advantages = row_prompt, None, None
                if (episode := completion.episode) is not None:
                    if episode.prompt_ids:
                        prompt = np.asarray(episode.prompt_ids, dtype=np.int32)
                    if episode.ref_logprobs:
                        ref_logprobs = np.asarray(episode.ref_logprobs, dtype=np.float32)
                    if episode.advantages:
                        token_advantages = np.asarray(episode.advantages, dtype=np.float32)
                taught: Any = {}
                if completion.teacher_prompt_ids:
                    taught["teacher_prompt_ids"] = np.asarray(completion.teacher_prompt_ids, dtype=np.int32)
                if completion.teacher_scores is not None:
                    names = "teacher_ids", "teacher_top", "teacher_logprobs"
                    taught |= zip(names, arrays_of(completion.teacher_scores), strict=True)
                samples.append(
                    TrainSample(
                        group=number,
                        prompt_ids=prompt,
                        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
                        sampler_logprobs=np.asarray(completion.full_logprobs, dtype=np.float32),
                        trained=mask & counts,
                        advantage=0.0,
                        versions=list(completion.versions),
                        ref_logprobs=ref_logprobs,
                        token_advantages=token_advantages,
                        routes=routes_of(completion, prompt.size) if counts else None,
                        group_id=group.group_id,
                        prompt_id=group.prompt.prompt_id,
                        index=index,
                        finish_reason=completion.finish_reason,
                        completion=beside_tokens(completion),
                        **taught,
                    )
                )
        return samples

    def _replay(
        self,
        buffer: ReplayBuffer,
        groups: Sequence[RolloutGroup],
        samples: list[TrainSample],
        informative: Sequence[bool],
        step: int,
    ) -> dict[int, ReplayEntry]:
        """Fill slots of zero-variance groups from the buffer, then store the informative ones."""
        size = self.config.num_generations
        slots = [number for number, differs in enumerate(informative) if not differs]
        entries = buffer.draw(len(slots), step, without={group.group_id for group in groups})
        replayed = dict(zip(slots, entries, strict=False))
        for number, (group, differs) in enumerate(zip(groups, informative, strict=True)):
            part = slice(number * size, (number + 1) * size)
            if number in replayed:
                samples[part] = buffer.samples_of(replayed[number], number)
            elif differs and any(sample.num_trained for sample in samples[part]):
                buffer.store(group.group_id, step, self._score(group, samples[part]), samples[part])
        return replayed

    def _score(self, group: RolloutGroup, samples: Sequence[TrainSample]) -> float:
        """`sum_i |A_i| * sum_k s_k`."""
        values_SK = reward_matrix(scores_of(group).values)
        known = [column[~column.isnan()] for column in values_SK.unbind(dim=1)]
        spread = sum(float(column.std()) for column in known if column.numel() >= 2)
        return sum(abs(sample.advantage) for sample in samples) * spread


def _note_scores(samples: Sequence[TrainSample], groups: Sequence[RolloutGroup]) -> None:
    """Note the rewards of samples, and clear the data mask of those that the scores exclude."""
    scores = [scores_of(group) for group in groups]
    reasons = [reason for of_group in scores for reason in of_group.excluded]
    values = [row for of_group in scores for row in of_group.values]
    for sample, reason, rewards in zip(samples, reasons, values, strict=True):
        sample.rewards, sample.excluded = list(rewards), reason
        if reason is not None:
            sample.trained[:] = False


def _overridden(groups: Sequence[RolloutGroup], advantages_S: torch.Tensor) -> list[float]:
    """The advantages, replaced where the scores or an environment provide their own."""
    episodes = [completion.episode for group in groups for completion in group.completions]
    own = [None if episode is None or episode.problem else episode.advantage for episode in episodes]
    if any(scores_of(group).advantages for group in groups):
        own = [value for group in groups for value in scores_of(group).advantages]
    return [computed if given is None else given for given, computed in zip(own, advantages_S.tolist(), strict=True)]


def scores_of(group: RolloutGroup) -> GroupScores:
    """The scores of a scored group."""
    assert group.scores is not None
    return group.scores


def round_metrics(groups: Sequence[RolloutGroup], result: Advantages) -> dict[str, float]:
    """Metrics of a round of rollouts; docs/output_files.md describes each name."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    scored = result.rewards_S[~result.rewards_S.isnan()]
    ended = [len(c.token_ids) for c in completions if c.finish_reason == "stop"] or [0]
    excluded = reasons_of(groups)
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/mean_terminated_length": fmean(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
        "completions/clipped_ratio": fmean(c.finish_reason == "length" for c in completions),
        "completions/excluded_ratio": float(result.rewards_S.isnan().double().mean()),
        "health/excluded_samples": float(excluded.total()),
        **{f"health/excluded/{reason.replace(': ', '/')}": float(count) for reason, count in excluded.items()},
    }
    episodes = [c.episode for c in completions if c.episode is not None]
    if episodes:
        turns = [episode.num_turns for episode in episodes]
        metrics |= {
            "rollout/num_turns/mean": fmean(turns),
            "rollout/num_turns/min": float(min(turns)),
            "rollout/num_turns/max": float(max(turns)),
        }
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for episode in episodes for item in episode.metrics.items()):
        by_name[name].append(value)
    metrics |= {name: fmean(values) for name, values in by_name.items()}
    if any(row for group in groups for row in scores_of(group).values):  # else there are no reward functions
        metrics["reward_std"] = float(result.std_P.mean())
        metrics["frac_reward_zero_std"] = 1.0 - float(result.informative_P.double().mean())
        if scored.numel():
            metrics["reward"] = float(scored.mean())
    return metrics
