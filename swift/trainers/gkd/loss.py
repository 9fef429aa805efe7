"""The loss of distillation: divergence of each token's distribution from the teacher's, and cross-entropy of answers.

    loss = sum_t m_t / N (D_t + alpha a_t nll_t)

N trained tokens of the global batch; `a_t` is 1 in answers that the policy has not sampled (`TrainSample.is_given`);
Both are at temperature 1, as in TRL; `--temperature` is that of sampling alone. No ratio, advantage or clip: a sample
is trained on as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swift.models.sharded import is_sharded
from swift.models.transfer import to_device
from swift.rl.linear_distillation import Compared, Head, TopTokens, compare
from swift.rollout.samples import FrozenName, TrainSample
from swift.trainers.grpo.logprobs import LogProbs
from swift.trainers.grpo.metrics import StepMetrics, observe_mismatch
from swift.trainers.grpo.micro_batch import MicroBatch, seen_by_teacher
from swift.trainers.grpo.settings import DistillationSettings

TEACHER: FrozenName = "teacher_logprobs"
"""Name of the teacher among the models beside the policy."""


@dataclass(eq=False, slots=True)
class DistillationLoss:
    """Computes the loss of micro-batches with the models of a trainer."""

    logprobs: LogProbs
    settings: DistillationSettings

    def of(self, model: nn.Module, batch: MicroBatch, report: StepMetrics) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, and log-probs [N] at the temperature of sampling; adds its metrics."""
        compared = self._compared(model, batch)
        loss_N, given_N = compared.divergence_N, self._given(batch)
        if self.settings.sft_alpha:
            loss_N = loss_N - self.settings.sft_alpha * given_N * compared.logprobs_N
        if not batch.filler:
            self._observe(report, batch, compared, given_N)
        return (batch.weights_N * loss_N).sum(), compared.sampling_logprobs_N

    @torch.no_grad()
    def evaluate(self, samples: Sequence[TrainSample]) -> float:
        """The mean divergence of the tokens of some samples, in nats; collective."""
        logprobs, ranks = self.logprobs, self.logprobs.collectives
        model = logprobs.unwrapped()
        model.eval()
        mine: list[Tensor] = []
        plan = logprobs.planner.plan(samples, range(len(samples)))
        with logprobs.agreed():
            for part, held in logprobs.own_micro_batches(samples, plan, lambda sample: True):
                divergence_N = self._compared(model, part).divergence_N
                if held:
                    mine.append(torch.where(part.mask_N, divergence_N, 0).double().sum())
        model.train()
        total = sum(ranks.all_gather(float(torch.stack(mine).sum()) if mine else 0.0)[:: logprobs.planner.group_size])
        return total / max(1, sum(sample.num_trained for sample in samples))

    def _compared(self, model: nn.Module, batch: MicroBatch) -> Compared:
        top_k = None if batch.teacher_top is not None else self.settings.top_k
        teacher = self._local(batch) if batch.teacher_top is None else TopTokens(*batch.teacher_top)
        work = functools.partial(
            compare,
            teacher=teacher,
            beta=self.settings.beta,
            top_k=top_k,
            temperature=self.logprobs.settings.temperature,
        )
        values = self.logprobs.at_head(model, batch, work)
        return Compared(*values)

    def _local(self, batch: MicroBatch) -> Head:
        """Hidden states and output layer of a teacher in this process."""
        kept: list[Head] = []
        with self.logprobs.models[TEACHER].active() as module, torch.no_grad():
            gathered = is_sharded(module)

            def keep(head: Head, ids_N: Tensor) -> tuple[Tensor, ...]:
                kept.append(head.detached(copy=gathered))
                return (torch.zeros_like(ids_N),)  # wrappers of models pass tensors on, and nothing else

            self.logprobs.at_head(module, seen_by_teacher(batch), keep)
        (head,) = kept
        return head

    def _given(self, batch: MicroBatch) -> Tensor:
        flags = [sample.is_given for sample in batch.samples for _ in sample.token_ids]
        return to_device(flags, batch.mask_N.device)

    def _observe(self, report: StepMetrics, batch: MicroBatch, compared: Compared, given_N: Tensor) -> None:
        report.add_mean("teacher_divergence", compared.divergence_N.detach(), batch.mask_N)
        report.add_mean("entropy", compared.entropy_N, batch.mask_N)
        report.add("distillation/given_frac", (given_N & batch.mask_N).sum(), batch.mask_N.sum())
        if self.settings.sft_alpha:
            report.add_mean("distillation/sft_loss", -compared.logprobs_N.detach(), batch.mask_N & given_N)
        if compared.bound_N is not None:
            report.add_mean("distillation/error_bound_mean", compared.bound_N, batch.mask_N)
            worst = torch.where(batch.mask_N, compared.bound_N, 0).amax()
            report.add("distillation/error_bound_max", worst, kind="max")
        observe_mismatch(report, batch, compared.sampling_logprobs_N, self.logprobs.settings)
