"""Sums and extremes of one optimizer step, gathered micro-batch by micro-batch and merged over ranks once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swift.observability.metrics import Values, kind_of
from swift.rl.correction import effective_sample_size, mismatch_statistics
from swift.rl.objective import LossOutput, SamplerCorrection
from swift.rollout.samples import RolloutBatch
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.micro_batch import MicroBatch

if TYPE_CHECKING:
    from swift.trainers.grpo.settings import GRPOSettings


class StepMetrics(Values):
    """What one optimizer step measures on one rank; merged over ranks once, by rank 0."""

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a mean."""
        self.combine(name, "mean", total, count)

    def add_extreme(self, name: str, value: float) -> None:
        """Widen a maximum or a minimum; its name says which (`kind_of`). A NaN stays."""
        self.combine(name, kind_of(name), value)

    def add_pairs(self, pairs: dict[str, Tensor]) -> None:
        """Add to means; a value is (sum, count). All come from their device at once."""
        if pairs:
            values = torch.stack([pair.double() for pair in pairs.values()]).tolist()
            for name, (total, count) in zip(pairs, values, strict=True):
                self.add(name, total, count)

    def merge(self, other: StepMetrics) -> None:
        """Add another rank's values."""
        for name, value in other.items():
            self.combine(name, value.kind, value.total, value.weight)


def observe(
    report: StepMetrics,
    batch: MicroBatch,
    policy_logprobs_N: Tensor,
    output: LossOutput,
    settings: GRPOSettings,
    correction: SamplerCorrection | None,
) -> None:
    """Add what one micro-batch says; `correction`: the weights of its tokens, if any."""
    report.add_pairs(output.means)
    report.combine("policy_loss", "sum", float(output.policy_loss))
    for name, value in output.extremes.items():
        report.add_extreme(name, float(value))
    policy_logprobs_N = policy_logprobs_N.detach()
    if settings.correctable_sampling:
        _observe_sampler(report, batch, policy_logprobs_N, settings)
    if correction is not None and (weights := correction.weights_T[batch.mask_N]).numel():
        report.add("mismatch/is_weight_mean", float(weights.double().sum()), weights.numel())
        report.add_extreme("mismatch/is_weight_min", float(weights.min()))
        report.add_extreme("mismatch/is_weight_max", float(weights.max()))
    if settings.log_offpolicy:
        for name, chosen_N in (("positive", batch.advantages_N > 0), ("negative", batch.advantages_N < 0)):
            values = policy_logprobs_N[batch.mask_N & chosen_N]
            report.add(f"logp/{name}_advantage_mean", float(values.double().sum()), values.numel())


def _observe_sampler(report: StepMetrics, batch: MicroBatch, policy_logprobs_N: Tensor, settings: GRPOSettings) -> None:
    """Ratios of trainer and sampler as they are, whatever the correction makes of them."""
    from_sampler = settings.old_logprobs == "sampler"  # then only the policy of now says how far they are
    pairs, extremes = mismatch_statistics(
        policy_logprobs_N if from_sampler else batch.old_or(policy_logprobs_N),
        batch.sampler_logprobs_N,
        batch.mask_N,
        threshold=settings.correction.threshold,
        lower=settings.correction.lower,
    )
    report.add_pairs(pairs)
    for name, value in extremes.items():
        report.add_extreme(name, float(value))


def summarise(
    report: StepMetrics, loss: float, batch: RolloutBatch, settings: GRPOSettings, collectives: Collectives
) -> dict[str, float]:
    """The metrics of an update from the sums of all ranks; {} on ranks other than 0. Collective."""
    report.add("loss", loss / collectives.world_size, 0.0)
    reports = collectives.gather(report)
    if reports is None:
        return {}
    for other in reports[1:]:
        report.merge(other)
    values = {"loss": report.pop("loss").total, **report.results()}
    if values.pop("mismatch/ratio_squared", None) is not None:
        mean, squared = (report[f"mismatch/ratio_{name}"] for name in ("mean", "squared"))
        values["mismatch/ess"] = effective_sample_size(mean.total, mean.weight, squared.total)
    if not settings.comparable_sampling:
        values["mismatch/biased"] = 1.0
    chosen = batch.global_batch(batch.global_batch_index)
    values["tokens/trained"] = float(sum(batch.samples[i].num_trained for i in chosen))
    return values
