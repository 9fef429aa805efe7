"""Rewards from features for GRPO's pipeline, and the cross-entropy of references: structured EBFT.

    groups -> FeatureRewards.score (every rank: its groups, one forward pass each) -> advantages -> REINFORCE
           -> reference_samples    -> cross-entropy (`swift.trainers.grpo.step`)

Prompts have the column `ground_truth`. Reward functions, if any are named, are logged and train nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from swift.models.features import FeatureNetwork, load_features
from swift.models.forward import TokenSequence
from swift.rl.energy import Energies, energies, pooled_whitening
from swift.rollout.round_result import fault
from swift.rollout.samples import TrainSample
from swift.trainers.ebft.references import References
from swift.trainers.token_budget import MOST_TOKENS
from swift.types import Completion, RolloutGroup

if TYPE_CHECKING:
    from swift.trainers.distributed import Collectives
    from swift.trainers.grpo.attempt import Attempt
    from swift.trainers.grpo.trainer import GRPOTrainer


def attach(run: Attempt, trainer: GRPOTrainer, model: Any) -> None:
    """Let the pipeline of `trainer` take its rewards from features of `model` as it is now, not wrapped or resumed."""
    parts = run.parts
    assert parts.references is not None, "prepared for another mode"
    report = parts.source.report
    network = load_features(parts.args, model, trainer.reference)
    if network.model not in trainer.frozen:
        trainer.frozen.append(network.model)
    trainer.pipeline.features = FeatureRewards(
        network,
        parts.references,
        parts.collectives,
        parts.args,
        device=trainer.args.device,
        max_tokens=lambda: trainer.planner.own_tokens or MOST_TOKENS,
        in_step=lambda: trainer.logprobs.in_step,
        on_progress=run.watchdog.touch,
        skipped_rows=lambda: report.num_deleted,
    )


def energy_options(args: Any) -> dict[str, Any]:
    """The settings of `swift.rl.energy.energies`."""
    return {
        "whitening": args.ebft_whitening,
        "alignment_coef": args.ebft_alignment_coef,
        "diversity_coef": args.ebft_diversity_coef,
        "estimator": args.ebft_advantage_estimator,
    }


@dataclass(eq=False)
class FeatureRewards:
    """Scores groups by their features.

    network: gives the features. references: token ids of the references. collectives: ranks share the groups. args: the
    settings of EBFT. max_tokens: of a forward pass, None before it is known. in_step: the network is sharded, so every
    rank makes the same number of passes. skipped_rows: rows left out for their length so far.
    """

    network: FeatureNetwork
    references: References
    collectives: Collectives
    args: Any
    _: KW_ONLY
    device: torch.device | str = "cpu"
    max_tokens: Callable[[], int | None] = lambda: None
    in_step: Callable[[], bool] = lambda: False
    on_progress: Callable[[], None] = lambda: None
    skipped_rows: Callable[[], int] = lambda: 0

    def score(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Give each group its rewards, as one more column, and its advantages; collective.

        Samples without a fault of the engine or environment count, whatever their other rewards.

        Returns:
            metrics `ebft/...`, means over groups.
        """
        ranks = self.collectives
        own = range(ranks.rank, len(groups), ranks.world_size)
        features = self._features([groups[i] for i in own])
        pooled = None
        if self.args.ebft_whitening == "pooled":
            starred = [
                feature for part in ranks.all_gather([feature[0].clone() for feature in features]) for feature in part
            ]
            pooled = pooled_whitening(torch.stack(starred), self.args.ebft_whitening_shrinkage)
        options = {**energy_options(self.args), "pooled": pooled}
        mine = {
            i: energies(feature[None, 1:], feature[:1], **options)
            for i, feature in zip(own, features, strict=True)
            if len(feature) > 1
        }
        found = ranks.merged(mine)
        for i, group in enumerate(groups):
            _book(group, found.get(i), self.args.ebft_rl_coef)
        scored = [found[i].metrics for i in sorted(found)]
        metrics = {name: fmean(values[name] for values in scored) for name in (scored[0] if scored else ())}
        advantages = [value for result in found.values() for value in result.advantages[0].tolist()]
        if len(advantages) > 1:
            metrics["ebft/advantages_std"] = stdev(advantages)
        return metrics | {"ebft/skipped_rows": float(self.skipped_rows())}

    def reference_samples(self, groups: Sequence[RolloutGroup]) -> list[TrainSample]:
        """The reference of each group as a completion to be learnt; none without `--ebft_ce_coef`."""
        if not self.args.ebft_ce_coef:
            return []
        samples = []
        for number, group in enumerate(groups):
            ids = np.asarray(self.references.of(group.prompt), dtype=np.int32)
            learnt = np.asarray(self.references.learnt(group.prompt), dtype=np.bool_)
            unknown = np.full(ids.size, np.nan, dtype=np.float32)
            prompt = np.asarray(group.prompt.token_ids, dtype=np.int32)
            samples.append(TrainSample(number, prompt, ids, unknown, learnt, 0.0))
        return samples

    # --- forward passes -------------------------------------------------------------------------------------------

    def _features(self, groups: Sequence[RolloutGroup]) -> list[Tensor]:
        """Features [1 + n, D] of each group, that of the reference first, in float64 on the CPU; collective."""
        sequences = [self._sequences(group) for group in groups]
        passes = [part for members in sequences for part in self._parts(members)]
        turns = max(self.collectives.all_gather(len(passes))) if self.in_step() else len(passes)
        rows: list[Tensor] = []
        for turn in range(turns):
            filler = passes[0][:1] if passes else [TokenSequence([0], [0])]
            found = self.network.of_sequences(passes[turn] if turn < len(passes) else filler, device=self.device)
            rows += [found] if turn < len(passes) else []
            self.on_progress()
        return list(torch.cat(rows).cpu().double().split([len(members) for members in sequences])) if rows else []

    def _sequences(self, group: RolloutGroup) -> list[TokenSequence]:
        """The reference and the samples without a fault, as they are compared: without a final stop token."""
        prompt = group.prompt.token_ids
        sequences = [TokenSequence(prompt, self.references.of(group.prompt))]
        for sample in _usable(group):
            own = sample.episode.prompt_ids if sample.episode is not None and sample.episode.prompt_ids else prompt
            sequences.append(TokenSequence(own, self.references.without_stop(sample.token_ids)))
        return sequences

    def _parts(self, sequences: list[TokenSequence]) -> list[list[TokenSequence]]:
        """The sequences of a group, split into forward passes within the limit of tokens."""
        limit, parts, tokens = self.max_tokens(), [list[TokenSequence]()], 0
        for sequence in sequences:
            own = len(sequence.completion_ids) + 1
            if parts[-1] and limit is not None and tokens + own > limit:
                parts.append([])
            tokens = tokens + own if parts[-1] else len(sequence.prompt_ids) + own
            parts[-1].append(sequence)
        return parts


def _usable(group: RolloutGroup) -> list[Completion]:
    return [sample for sample in group.completions if fault(sample) is None]


def _book(group: RolloutGroup, found: Energies | None, rl_coef: float) -> None:
    """Write rewards and advantages into the scores of a group; None: no sample has any."""
    assert group.scores is not None
    values = iter(zip(found.rewards[0].tolist(), found.advantages[0].tolist(), strict=True)) if found else iter(())
    group.scores.advantages = []
    for number, completion in enumerate(group.completions):
        problem = fault(completion)
        reward, advantage = next(values) if problem is None else (None, 0.0)
        group.scores.excluded[number] = problem
        group.scores.values[number] = [*group.scores.values[number], reward]
        group.scores.advantages.append(rl_coef * advantage)
