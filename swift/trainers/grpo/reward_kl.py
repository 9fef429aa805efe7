"""The KL that is subtracted from rewards (`--kl_in_reward`): one pass of the reference over a round, before advantages.

As RLOO (arXiv:2402.14740) and REINFORCE++ (arXiv:2501.03262) have it: the reward of a completion is lowered by
beta * sum_t (lp_s - lp_r), the on-policy k1 estimate, and the loss has no KL. Ranks share the samples, and every rank
learns all sums, because advantages are computed everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swift.models.sharded import is_sharded
from swift.rl.kl import sequence_k1
from swift.rollout.samples import TrainSample
from swift.trainers.grpo.micro_batch import MicroBatch

if TYPE_CHECKING:
    from swift.trainers.grpo.trainer import GRPOTrainer


class RewardKL:
    """Computes `sum_t m (lp_s - lp_r)` of samples; collective.

    Args:
        trainer: whose reference, ranks and micro-batches are used.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def __call__(self, samples: Sequence[TrainSample]) -> list[float]:
        """The estimate of each sample in nats, 0 for one without a trained token, the same on every rank."""
        trainer = self.trainer
        with trainer.metrics.timer("reference"):
            mine = self._mine(samples)
        everything: dict[int, float] = {}
        for part in trainer.collectives.all_gather(mine):
            everything |= part
        return [everything.get(i, 0.0) for i in range(len(samples))]

    def _mine(self, samples: Sequence[TrainSample]) -> dict[int, float]:
        """Those of this rank's share."""
        trainer = self.trainer
        plan = trainer.logprobs.plan(samples, range(len(samples)), [sample.num_trained > 0 for sample in samples])
        sums: dict[int, float] = {}
        for part in plan.micro_batches[trainer.collectives.rank]:
            if not part and not is_sharded(trainer.model):
                continue
            chosen = part or [plan.first]
            batch = trainer.logprobs.collate([samples[i] for i in chosen], [0.0] * len(chosen))
            sums |= dict(zip(part, self._k1(batch), strict=False))
            trainer.logprobs.on_progress()
        return sums

    def _k1(self, batch: MicroBatch) -> list[float]:
        return sequence_k1(
            batch.sampler_logprobs_N,
            self.trainer.logprobs.of_reference(batch),
            mask_T=batch.mask_N,
            sequence_index_T=batch.tokens.sequence_index,
            num_sequences=batch.tokens.num_sequences,
        ).tolist()
