"""Metrics of one optimizer step: added by each micro-batch, read from the device once, merged over the ranks once.

Reading a number from an accelerator waits for all work that is queued there. So `StepMetrics.add` leaves tensors on
their device, and `StepMetrics.collect` moves those of the whole step in one transfer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swift.observability.metrics import HELD_UP, Kind, Values, kind_of
from swift.rl.correction import effective_sample_size, mismatch_statistics
from swift.rl.objective import LossOutput, SamplerCorrection
from swift.rl.segments import largest, smallest
from swift.rollout.samples import RolloutBatch
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.micro_batch import MicroBatch

if TYPE_CHECKING:
    from swift.trainers.grpo.settings import GRPOSettings


NO_VALUE = (("max", -math.inf), ("min", math.inf))
"""What an extreme of no values is."""


EVEN = 0.1
"""Ranks that differ in a phase by less than this share of the slowest one's time are equally fast."""


class StepMetrics(Values):
    """What one optimizer step measures on one rank; the mapping holds the values that `collect` has read.

    own_s: seconds of the phases that all ranks have a part of, without waiting for each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own_s: Mapping[str, float] = {}
        self._added: list[tuple[str, Kind, Tensor | float, Tensor | float]] = []

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1.0, *, kind: Kind = "mean") -> None:
        """Add a scalar, without synchronising the device; for a mean, `total` is the sum of `count` values."""
        self._added.append((name, kind, total, count))

    def add_mean(self, name: str, values_N: Tensor, chosen_N: Tensor) -> None:
        """Add the mean of the chosen values, in float64."""
        self.add(name, torch.where(chosen_N, values_N, 0).double().sum(), chosen_N.sum())

    def clear(self) -> None:
        """Forget all values, read or not."""
        super().clear()
        self._added.clear()

    def collect(self) -> None:
        """Read the added tensors in one transfer and combine all values, in the order of the calls; repeatable."""
        added, self._added = self._added, []
        tensors = [value.double() for entry in added for value in entry[2:] if isinstance(value, Tensor)]
        numbers = iter(torch.stack(tensors).tolist() if tensors else ())
        for name, kind, *values in added:
            total, count = (next(numbers) if isinstance(value, Tensor) else value for value in values)
            if (kind, total) not in NO_VALUE:
                self.combine(name, kind, total, count)

    def merge(self, other: StepMetrics) -> None:
        """Combine with the collected values of another rank."""
        for name, value in other.items():
            self.combine(name, value.kind, value.total, value.weight)


def held_up(own_s: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each phase the slowest rank, and the seconds that the others wait for it; none where ranks are equally fast.

    own_s: by rank, the seconds of each phase without waiting. The others are those of median speed.

    Example: `held_up([{"train": 1.0}, {"train": 3.0}])` is `{"time/held_up/train/rank-1": 2.0}`.
    """
    found = {}
    for phase in own_s[0] if len(own_s) > 1 else ():
        seconds = [one.get(phase, 0.0) for one in own_s]
        slowest = seconds.index(max(seconds))
        waits = seconds.pop(slowest) - statistics.median(seconds)
        if waits > EVEN * own_s[slowest][phase]:
            found[f"{HELD_UP}{phase}/rank-{slowest}"] = waits
    return found


def observe(
    report: StepMetrics,
    batch: MicroBatch,
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    output: LossOutput,
    settings: GRPOSettings,
    correction: SamplerCorrection | None,
) -> None:
    """Add the metrics of one micro-batch; log-probs without gradient, `correction`: the weights of its tokens, if any.

    The ratios of trainer and sampler are those before the correction.
    """
    report.add("policy_loss", output.policy_loss, kind="sum")
    _add_statistics(report, output.means, output.extremes)
    # if the old log-probs are the sampler's, the current policy gives the distance to the sampler
    from_sampler = settings.old_logprobs == "sampler"
    observe_mismatch(report, batch, policy_logprobs_N if from_sampler else old_logprobs_N, settings)
    if correction is not None:
        report.add_mean("mismatch/is_weight_mean", correction.weights_T, batch.mask_N)
        report.add("mismatch/is_weight_min", smallest(correction.weights_T, batch.mask_N), kind="min")
        report.add("mismatch/is_weight_max", largest(correction.weights_T, batch.mask_N), kind="max")
    if settings.log_offpolicy:
        for name, chosen_N in (("positive", batch.advantages_N > 0), ("negative", batch.advantages_N < 0)):
            report.add_mean(f"logp/{name}_advantage_mean", policy_logprobs_N, batch.mask_N & chosen_N)
    if settings.ce_coef is not None:
        reinforce = -(batch.weights_N * batch.advantages_N * policy_logprobs_N.double()).sum()
        report.add("ebft/rl_loss", reinforce / (settings.rl_coef or 1.0), kind="sum")


def observe_mismatch(report: StepMetrics, batch: MicroBatch, logprobs_N: Tensor, settings: GRPOSettings) -> None:
    """Add the distance of the trainer's log-probs, without gradient, to the sampler's, if comparable."""
    if settings.correctable_sampling:
        threshold, lower = settings.correction.threshold, settings.correction.lower
        _add_statistics(
            report,
            *mismatch_statistics(logprobs_N, batch.sampler_logprobs_N, batch.mask_N, threshold=threshold, lower=lower),
        )


def _add_statistics(report: StepMetrics, means: dict[str, Tensor], extremes: dict[str, Tensor]) -> None:
    for name, (total, count) in means.items():
        report.add(name, total, count)
    for name, value in extremes.items():
        report.add(name, value, kind=kind_of(name))


def summarise(
    report: StepMetrics, batch: RolloutBatch, settings: GRPOSettings, collectives: Collectives, group_size: int = 1
) -> dict[str, float]:
    """The metrics of an update from the sums of all ranks; {} on ranks other than 0. Collective.

    group_size: ranks that share micro-batches, and so have the same sums.
    """
    report.collect()
    report["loss"].total /= collectives.world_size
    reports = collectives.gather(report)
    if reports is None:
        return {}
    for name, seconds in held_up([one.own_s for one in reports]).items():
        report.combine(name, "sum", seconds)
    for other in reports[group_size::group_size]:
        report.merge(other)
    values = {"loss": report.pop("loss").total, **report.results()}
    if values.pop("mismatch/ratio_squared", None) is not None:
        mean, squared = (report[f"mismatch/ratio_{name}"] for name in ("mean", "squared"))
        values["mismatch/ess"] = effective_sample_size(mean.total, mean.weight, squared.total)
    if not settings.comparable_sampling:
        values["mismatch/biased"] = 1.0
    chosen = batch.global_batch()
    values["tokens/trained"] = float(sum(batch.samples[i].num_trained for i in chosen))
    return values
