"""From the scored groups of a round to a rollout batch: advantages, data masks, replayed groups.

    groups -> rewards -> advantages (per generation batch) -> samples -> slots of zero-variance groups <- replay

Everything here is the same on every rank, because every rank has all scored groups of a round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from swift.rl.advantages import Advantages, compute_advantages, reward_matrix
from swift.rl.estimators import Scale
from swift.rollout.exclusions import exclusion_metrics
from swift.rollout.replay import ReplayBuffer, ReplayEntry
from swift.rollout.round_result import fault
from swift.rollout.samples import RolloutBatch, TrainSample
from swift.types import Completion, GroupScores, RolloutGroup

PartialBatch = tuple[list[TrainSample], torch.Tensor | None]
"""Samples with advantage 0, and k1 of each in nats, float64, where the reward has a KL."""

KLOfSamples = Callable[[Sequence[TrainSample]], Sequence[float]]
"""The k1 estimate of each sample's divergence from the reference, in nats, the same on every rank; collective."""

Refer = Callable[[RolloutBatch], None]
"""Fills in the reference's log-probs of the samples that this rank will train on; collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How groups become samples.

    generation_batches: generation batches of a rollout batch, each with its own statistics.
    num_global_batches: optimizer steps that one visit of a rollout batch feeds; num_iterations: visits.
    estimator_parameters: of the advantage estimator; None takes its defaults.
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
    """How rounds are sampled and made into rollout batches.

    prefetch_depth: rounds sampled ahead of the one that trains; 0 generates, then trains.
    in_flight_updates: weights may change while completions are being sampled.
    streaming_groups: train on so many informative groups as soon as they are scored, while others are sampled; 0 waits
        for the whole round. Needs one optimizer step per rollout batch, advantages of single groups, and an engine
        that does not keep this thread busy.
    dynamic_sample, max_resample_times: see `swift.rollout.dynamic_sampling`.
    reroll_fail_reward: most reward of a completion that counts as failed; a prompt all of whose completions failed
        alike is re-rolled if the scheduler does that.
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
    """A rollout batch and what the books and logs need to know of it.

    plain: advantages before any KL, of each generation batch. advantages: as computed for training, one per completion.
    group_ids, informative: of the round's groups, slot by slot. replayed: slot -> the entry that fills it.
    trained, excluded: how many groups of the round; those replayed over are neither.
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


class BatchMaker:
    """Makes rollout batches of groups.

    The trainer sets `kl_of`, needed when `config.reward_kl` > 0, and `refer`, for a loss with a KL; without it the
    trainer finds log-probs missing and makes them.
    """

    def __init__(self, config: BatchConfig, *, replay: ReplayBuffer | None = None) -> None:
        self.config, self.replay = config, replay
        self.kl_of: KLOfSamples | None = None
        self.refer: Refer | None = None

    @property
    def refers_early(self) -> bool:
        """Whether a reference has passes that need no scores; which groups are replayed is a matter of scores."""
        return self.config.reward_kl > 0 or (self.refer is not None and self.replay is None)

    def partial(self, groups: Sequence[RolloutGroup]) -> PartialBatch:
        """The samples of a round of which nothing has been computed."""
        return list(self._samples(groups)), None

    def batch(self, samples: list[TrainSample]) -> RolloutBatch:
        return RolloutBatch(samples, self.config.num_global_batches, self.config.num_iterations)

    def referred(self, groups: Sequence[RolloutGroup]) -> PartialBatch:
        """A round after the passes of the reference, while its rewards may still be computed; collective."""
        samples, _ = self.partial(groups)
        if self.config.reward_kl > 0:
            return samples, self._kl(groups)
        if self.refer is not None:
            self.refer(self.batch(samples))
        return samples, None

    def samples(self, groups: Sequence[RolloutGroup], first: int) -> list[TrainSample]:
        """Samples with advantages of groups that share no statistics with others; numbered from `first`."""
        samples = list(self._samples(groups, first))
        _leave_out(samples, groups)
        for sample, advantage in zip(samples, _given(groups, self.advantages(groups).advantages_S), strict=True):
            sample.advantage = advantage
        return samples

    def make(self, groups: Sequence[RolloutGroup], step: int, partial: PartialBatch | None = None) -> MadeBatch:
        """The rollout batch of a round.

        Args:
            groups: scored, in launch order; as many as a rollout batch has.
            step: optimizer steps done.
            partial: what was computed of the same groups before.
        """
        config = self.config
        if partial is None:
            # where scores leave samples out, passes are cut without that in any case: it depends on no clock
            left_out = any(reason is not None for group in groups for reason in scores_of(group).excluded)
            partial = self.referred(groups) if left_out and self.refers_early else self.partial(groups)
        samples, kl_S = partial
        _leave_out(samples, groups)
        penalty = None
        metrics: dict[str, float] = {}
        if config.reward_kl > 0:
            kl_S = kl_S if kl_S is not None else self._kl(groups)
            penalty = config.reward_kl * kl_S
            of_trained = [kl for kl, sample in zip(kl_S.tolist(), samples, strict=True) if sample.num_trained]
            metrics["kl_in_reward"] = fmean(of_trained or [0.0])
        size = len(groups) // config.generation_batches
        batches = [groups[i : i + size] for i in range(0, len(groups), size)]
        results = plain = [self.advantages(part) for part in batches]
        if penalty is not None:
            pieces = penalty.split([sum(len(g.completions) for g in part) for part in batches])
            results = [self.advantages(part, kl) for part, kl in zip(batches, pieces, strict=True)]
        advantages = _given(groups, torch.cat([result.advantages_S for result in results]))
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = advantage
        # what the KL alone tells apart teaches nothing about the task
        informative = [one for result in plain for one in result.informative_P.tolist()]
        replayed = self._replay(groups, samples, informative, step)
        size = config.num_generations
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        has_none = [not any(sample.num_trained for sample in part) for part in parts]
        excluded = sum(none and number not in replayed for number, none in enumerate(has_none))
        return MadeBatch(
            self.batch(samples),
            plain,
            advantages,
            replayed,
            [group.group_id for group in groups],
            informative,
            trained=len(groups) - excluded - len(replayed),
            excluded=excluded,
            metrics={**metrics, **self._replay_metrics(replayed, step)},
        )

    def _kl(self, groups: Sequence[RolloutGroup]) -> torch.Tensor:
        """k1 of each completion; of cut ones too, because their rewards count in the group's mean."""
        assert self.kl_of is not None, "the trainer has not said how the KL is computed"
        return torch.tensor(list(self.kl_of(list(self._samples(groups, with_cut=True)))), dtype=torch.float64)

    def advantages(self, groups: Sequence[RolloutGroup], kl_penalty_S: torch.Tensor | None = None) -> Advantages:
        """Advantages of scored groups that share their batch statistics."""
        scores = [scores_of(group) for group in groups]
        index = [number for number, group in enumerate(groups) for _ in group.completions]
        return compute_advantages(
            reward_matrix([row for one in scores for row in one.values]),
            torch.tensor(index, dtype=torch.long),
            weights_K=torch.tensor(list(self.config.reward_weights), dtype=torch.float64),
            excluded_S=torch.tensor(
                [reason is not None for one in scores for reason in one.excluded], dtype=torch.bool
            ),
            estimator=self.config.advantage_estimator,
            parameters=self.config.estimator_parameters,
            scale=self.config.scale_rewards,
            kl_penalty_S=kl_penalty_S,
        )

    def informative(self, group: RolloutGroup) -> bool:
        """Whether the rewards of a group differ; of what is known before any KL."""
        return bool(self.advantages([group]).informative_P[0])

    def totals(self, group: RolloutGroup) -> list[float]:
        """The weighted rewards of a group's completions, NaN where excluded."""
        return self.advantages([group]).rewards_S.tolist()

    def cut(self, completion: Completion) -> bool:
        """Whether the overlong filter takes a completion out of the loss; it stays in the group's statistics."""
        return self.config.overlong_filter and completion.finish_reason == "length"

    def _samples(
        self, groups: Sequence[RolloutGroup], first: int = 0, *, with_cut: bool = False
    ) -> Iterator[TrainSample]:
        for number, group in enumerate(groups, first):
            prompt = np.asarray(group.prompt.token_ids, dtype=np.int32)
            for completion in group.completions:
                counts = fault(completion) is None and bool(completion.token_ids)
                counts = counts and (with_cut or not self.cut(completion))
                sampled = np.asarray(completion.mask or [1] * len(completion.token_ids), dtype=np.bool_)
                episode = completion.episode
                own = np.asarray(episode.prompt_ids, dtype=np.int32) if episode and episode.prompt_ids else prompt
                referred = episode.ref_logprobs if episode else []
                by_token = episode.advantages if episode else []
                yield TrainSample(
                    group=number,
                    prompt_ids=own,
                    token_ids=np.asarray(completion.token_ids, dtype=np.int32),
                    sampler_logprobs=np.asarray(completion.full_logprobs, dtype=np.float32),
                    trained=sampled & counts,
                    advantage=0.0,
                    versions=list(completion.versions),
                    ref_logprobs=np.asarray(referred, dtype=np.float32) if referred else None,
                    token_advantages=np.asarray(by_token, dtype=np.float32) if by_token else None,
                )

    def _replay(
        self, groups: Sequence[RolloutGroup], samples: list[TrainSample], informative: Sequence[bool], step: int
    ) -> dict[int, ReplayEntry]:
        """Fill slots of zero-variance groups from the buffer, then store the informative ones."""
        if self.replay is None:
            return {}
        size = self.config.num_generations
        slots = [number for number, differs in enumerate(informative) if not differs]
        entries = self.replay.draw(len(slots), step, without={group.group_id for group in groups})
        replayed = dict(zip(slots, entries, strict=False))
        for number, (group, differs) in enumerate(zip(groups, informative, strict=True)):
            part = slice(number * size, (number + 1) * size)
            if number in replayed:
                samples[part] = self.replay.samples_of(replayed[number], number)
            elif differs and any(sample.num_trained for sample in samples[part]):
                self.replay.store(group.group_id, step, self._score(group, samples[part]), samples[part])
        return replayed

    def _score(self, group: RolloutGroup, samples: Sequence[TrainSample]) -> float:
        """`sum_i |A_i| * sum_k s_k`."""
        values_SK = reward_matrix(scores_of(group).values)
        stds = [column[~column.isnan()] for column in values_SK.unbind(dim=1)]
        spread = sum(float(column.std()) for column in stds if column.numel() >= 2)
        return sum(abs(sample.advantage) for sample in samples) * spread

    def _replay_metrics(self, replayed: dict[int, ReplayEntry], step: int) -> dict[str, float]:
        if self.replay is None:
            return {}
        metrics = {"replay/groups": float(len(replayed)), "replay/size": float(len(self.replay))}
        if replayed:
            metrics["replay/age"] = fmean(step - entry.step for entry in replayed.values())
        return metrics


def _leave_out(samples: Sequence[TrainSample], groups: Sequence[RolloutGroup]) -> None:
    """Train on no sample that its scores exclude."""
    reasons = [reason for group in groups for reason in scores_of(group).excluded]
    for sample, reason in zip(samples, reasons, strict=True):
        if reason is not None:
            sample.trained[:] = False


def _given(groups: Sequence[RolloutGroup], advantages_S: torch.Tensor) -> list[float]:
    """Advantages, with those that scores or an environment gave of their own."""
    episodes = [one.episode for group in groups for one in group.completions]
    own = [None if one is None or one.problem else one.advantage for one in episodes]
    if any(scores_of(group).advantages for group in groups):
        own = [value for group in groups for value in scores_of(group).advantages]
    return [value if one is None else one for one, value in zip(own, advantages_S.tolist(), strict=True)]


def scores_of(group: RolloutGroup) -> GroupScores:
    """The scores that a group must have by now."""
    assert group.scores is not None
    return group.scores


def round_metrics(groups: Sequence[RolloutGroup], result: Advantages) -> dict[str, float]:
    """What a round of rollouts says in numbers; see docs/output_files.md for each name."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    scored = result.rewards_S[~result.rewards_S.isnan()]
    ended = [len(one.token_ids) for one in completions if one.finish_reason == "stop"] or [0]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/mean_terminated_length": fmean(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
        "completions/clipped_ratio": fmean(c.finish_reason == "length" for c in completions),
        "completions/excluded_ratio": float(result.rewards_S.isnan().double().mean()),
        "reward_std": float(result.std_P.mean()),
        "frac_reward_zero_std": 1.0 - float(result.informative_P.double().mean()),
        **exclusion_metrics(groups),
    }
    episodes = [one.episode for one in completions if one.episode is not None]
    if episodes:
        turns = [one.num_turns for one in episodes]
        metrics |= {
            "rollout/num_turns/mean": fmean(turns),
            "rollout/num_turns/min": float(min(turns)),
            "rollout/num_turns/max": float(max(turns)),
        }
    told: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for one in episodes for item in one.metrics.items()):
        told[name].append(value)
    metrics |= {name: fmean(values) for name, values in told.items()}
    if scored.numel():
        metrics["reward"] = float(scored.mean())
    return metrics
