"""Forward and backward of one global batch, whole or while its completions arrive.

A global batch is cut into packed micro-batches and normalised over all of them and all ranks, so that no cut, packing
or number of ranks changes the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from swift.models.scoring import scores_itself
from swift.rl.correction import off_policy_sequence_mask, sampler_correction, sampler_mismatch
from swift.rl.entropy import entropy_bonus
from swift.rl.global_batch import BatchCounts, count_batch, nominal_batch_tokens
from swift.rl.losses import get_loss, sequence_weights
from swift.rl.objective import SamplerCorrection, policy_loss
from swift.rollout.samples import Arrival, RolloutBatch, TrainSample
from swift.trainers.grpo.entropy import EntropyControl, TopEntropy
from swift.trainers.grpo.logprobs import LogProbs, remember, take_sampler_logprobs
from swift.trainers.grpo.metrics import StepMetrics, observe
from swift.trainers.grpo.micro_batch import MicroBatch, collate, split_by_sample

if TYPE_CHECKING:
    from swift.trainers.distributed import Collectives
    from swift.trainers.grpo.settings import GRPOSettings
    from swift.trainers.parallel.deepspeed import DeepSpeedSteps


@dataclass(slots=True)
class _Shared:
    """What the micro-batches of one optimizer step share.

    weights: loss weight of each trained token, by sample. filler: a sample for ranks that have none left.
    coefficient: weight of the entropy bonus. top: the mask of the top entropies; None leaves it to the one micro-batch
    that holds the global batch. num_tokens: trained tokens. entropy_sum, entropy_count: over the tokens that the bonus
    acts on, so far.
    """

    batch: RolloutBatch
    weights: dict[int, float]
    filler: int
    report: StepMetrics
    num_tokens: int
    coefficient: float = 0.0
    top: TopEntropy | None = None
    entropy_sum: float = 0.0
    entropy_count: float = 0.0


@dataclass(eq=False)
class GlobalBatchStep:
    """Makes the gradients of one optimizer step.

    sequences: completions of a full global batch, for one whose samples are still arriving. timer: times phases.
    deepspeed: drives its engine; None without. fsdp: FSDP2 shards the model.
    """

    logprobs: LogProbs
    entropy: EntropyControl
    accelerator: Accelerator
    sequences: int
    timer: Callable[[str], contextlib.AbstractContextManager[None]]
    deepspeed: DeepSpeedSteps | None = None
    fsdp: bool = False
    num_updates: int = 0
    """Updates before this one."""

    @property
    def collectives(self) -> Collectives:
        """Those of the trainer."""
        return self.logprobs.collectives

    @property
    def settings(self) -> GRPOSettings:
        """Those of the step."""
        return self.logprobs.settings

    def run(
        self, model: nn.Module, policy: nn.Module, batch: RolloutBatch, report: StepMetrics, num_updates: int
    ) -> Tensor:
        """Forward and backward of the next global batch; gradients are complete when it returns.

        Args:
            model: the policy as it is wrapped for training.
            policy: the same, unwrapped.
            batch: the rollout batch.
            report: gets what there is to log.
            num_updates: before this one.

        Returns:
            this rank's share of the loss times the number of ranks (their mean is the loss).
        """
        self.num_updates = num_updates
        model.train()
        if batch.arriving is not None:
            return self._arriving(model, batch, batch.arriving, report)
        with self.timer("train"):
            return self._whole(model, policy, batch, report)

    def _whole(self, model: nn.Module, policy: nn.Module, batch: RolloutBatch, report: StepMetrics) -> Tensor:
        if self.deepspeed is not None:
            self.deepspeed.begin()
        self.logprobs.prepare_old(batch)
        chosen = batch.global_batch(batch.global_batch_index)
        useful = self.logprobs.useful(batch, chosen)
        learnt = bool(batch.references and self.settings.ce_coef)
        if not any(useful) and not learnt:  # no gradient at all: the optimizer leaves every weight alone
            report.add("health/steps_without_signal", 1.0, 1.0)
            return torch.zeros((), device=self.logprobs.device)
        loss = torch.zeros((), device=self.logprobs.device)
        if learnt:
            loss = loss + self._references(model, batch.references, report, last=not any(useful))
        if any(useful):
            loss = loss + self._completions(model, policy, batch, useful, report)
        if self.deepspeed is not None:
            self.deepspeed.step()
        return loss

    def _completions(
        self, model: nn.Module, policy: nn.Module, batch: RolloutBatch, useful: list[bool], report: StepMetrics
    ) -> Tensor:
        """The policy loss and its terms, for the samples of the next global batch that are `useful`."""
        chosen = batch.global_batch(batch.global_batch_index)
        samples = [batch.samples[i] for i in chosen]
        top = self.entropy.look_ahead(batch, chosen, policy)
        plan = self.logprobs.planner.plan(batch.samples, chosen, useful)
        shared = _Shared(
            batch,
            dict(zip(chosen, self._weights(samples), strict=True)),
            filler=plan.first,
            report=report,
            num_tokens=sum(sample.num_trained for sample in samples),
            coefficient=self.entropy.coefficient,
            top=top,
        )
        loss = self._micro_batches(model, shared, plan.micro_batches[self.collectives.rank], last=True)
        if self.settings.entropy.has_bonus:
            if self.collectives.is_main:
                report.add("entropy_coef", shared.coefficient, 1.0)
            self.entropy.steer(shared.entropy_sum, shared.entropy_count)
        return loss

    def _references(
        self, model: nn.Module, references: Sequence[TrainSample], report: StepMetrics, *, last: bool
    ) -> Tensor:
        """The cross-entropy of references at temperature 1: `ce_coef * sum -lp / N` over their N tokens."""
        plan = self.logprobs.planner.plan(references, range(len(references)))
        own, coefficient = plan.micro_batches[self.collectives.rank], self.settings.ce_coef or 0.0
        num_tokens = sum(one.num_trained for one in references)
        loss = torch.zeros((), device=self.logprobs.device)
        for turn, held in enumerate(own):
            chosen = [references[i] for i in held or [plan.first]]
            batch = collate(chosen, [1 / num_tokens if held else 0.0] * len(chosen), device=self.logprobs.device)
            final = last and turn == len(own) - 1
            with self._gradients_meet(model, final):
                logprobs_N, _ = self.logprobs.scores(model, batch, temperature=1.0)
                share = -coefficient * self.collectives.world_size * (batch.weights_N * logprobs_N).sum()
                self._backward(share, last=final)
            self.logprobs.on_progress()
            loss += share.detach()
            if held:
                learnt_N = logprobs_N.detach()[batch.mask_N]
                report.add("ebft/ce_loss", -float(learnt_N.double().sum()), learnt_N.numel())
        return loss

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        if self.deepspeed is not None:
            self.deepspeed.backward(loss, last=last)
        else:
            self.accelerator.backward(loss)

    def _weights(self, samples: Sequence[TrainSample], counts: BatchCounts | None = None) -> list[float]:
        """The loss weight of each trained token of each sample; of all in the global batch, or by its `counts`."""
        tokens, nominal = [sample.num_trained for sample in samples], self.settings.per_device
        return sequence_weights(
            get_loss(self.settings.loss.loss_type),
            counts or count_batch(tokens, nominal),
            tokens,
            nominal_tokens=nominal_batch_tokens(tokens, nominal),
            max_completion_length=self.settings.max_completion_length,
        )

    # --- a global batch that is still being sampled -------------------------------------------------------------

    def _arriving(
        self, model: nn.Module, batch: RolloutBatch, arrivals: Iterator[Arrival], report: StepMetrics
    ) -> Tensor:
        """The same for a global batch whose samples are still being sampled: its counts are known at the end only.

        Each arrival is weighed as if the global batch were full of the longest completions; at the end the gradients
        are multiplied by that normaliser over the true one. That is the whole gradient, up to rounding.
        """
        loss, ran = torch.zeros((), device=self.logprobs.device), False
        for arrival in arrivals:
            with self.timer("train"):
                share, has_run = self._arrival(model, batch, arrival, report, ran=ran)
            loss, ran = loss + share, ran or has_run
        if not ran:
            report.add("health/steps_without_signal", 1.0, 1.0)
            return loss
        total, limit = get_loss(self.settings.loss.loss_type).normaliser.total, self.settings.max_completion_length
        exact = total(count_batch([sample.num_trained for sample in batch.samples]), limit)
        factor = total(self._fullest(), limit) / exact
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        if batch.updates_per_rollout > 1:
            self.logprobs.share(batch)
        if "policy_loss" in report:
            report["policy_loss"].total *= factor
        return loss * factor

    def _fullest(self) -> BatchCounts:
        """The counts of a global batch full of the longest completions."""
        return count_batch([self.settings.max_completion_length] * self.sequences)

    def _arrival(
        self, model: nn.Module, batch: RolloutBatch, arrival: Arrival, report: StepMetrics, *, ran: bool
    ) -> tuple[Tensor, bool]:
        """Some of its samples: their loss, and whether this rank computed anything; `ran`: it did before."""
        samples = [batch.samples[i] for i in arrival.samples]
        if self.settings.old_logprobs == "sampler":
            take_sampler_logprobs(samples)
        weights = self._weights(samples, self._fullest())
        useful = [weight > 0 and self.logprobs.contributes(one) for weight, one in zip(weights, samples, strict=True)]
        own = self.logprobs.planner.plan(batch.samples, arrival.samples, useful).micro_batches[self.collectives.rank]
        if arrival.last and ran and not own and self.collectives.active:
            own = [[]]  # brings the ranks' gradients together
        shared = _Shared(
            batch,
            dict(zip(arrival.samples, weights, strict=True)),
            filler=next((i for i, one in enumerate(batch.samples) if one.num_trained), 0),
            report=report,
            num_tokens=sum(sample.num_trained for sample in samples),
        )
        return self._micro_batches(model, shared, own, last=arrival.last), bool(own)

    # --- micro-batches ------------------------------------------------------------------------------------------

    def _micro_batches(self, model: nn.Module, shared: _Shared, own: Sequence[list[int]], *, last: bool) -> Tensor:
        """All of this rank; their loss. `last`: the gradients of the ranks meet after the last of them."""
        loss = torch.zeros((), device=self.logprobs.device)
        for turn, held in enumerate(own):
            loss += self._micro_batch(model, shared, held, last=last and turn == len(own) - 1)
        return loss

    def _micro_batch(self, model: nn.Module, shared: _Shared, held: Sequence[int], *, last: bool) -> Tensor:
        """Forward and backward of one; a rank with nothing left computes the filler with weight 0."""
        samples = [shared.batch.samples[i] for i in held or [shared.filler]]
        self.logprobs.check_old(shared.batch, held)
        weights = [shared.weights[i] for i in held] or [0.0]
        batch = collate(samples, weights, device=self.logprobs.device)
        if not held:
            batch.mask_N = torch.zeros_like(batch.mask_N)
        self.logprobs.ensure_reference(batch, keep=bool(held))
        with self._gradients_meet(model, last):
            kind = self.settings.entropy.kind(self.num_updates, free=not scores_itself(model))
            policy_logprobs_N, entropy_N = self.logprobs.scores(model, batch, kind)
            correction = self.correction(batch, policy_logprobs_N)
            loss, output = self._loss(shared, held, batch, policy_logprobs_N, entropy_N, correction)
            loss = loss * self.collectives.world_size
            self._backward(loss, last=last)
        self.logprobs.on_progress()
        if held:
            if shared.batch.updates_per_rollout > 1:
                remember(batch, policy_logprobs_N)
            observe(shared.report, batch, policy_logprobs_N, output, self.settings, correction)
            if self.settings.ce_coef is not None:
                logprobs_N = policy_logprobs_N.detach().double()
                reinforce = -(batch.weights_N * batch.advantages_N * logprobs_N).sum()
                shared.report.combine("ebft/rl_loss", "sum", float(reinforce) / (self.settings.rl_coef or 1.0))
        return loss.detach()

    def _gradients_meet(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients of the ranks meet after the last micro-batch."""
        # DeepSpeed's boundary says the same; FSDP without a reduction would keep the gradients of the whole model on
        # every rank, and sum them in the type of the computation
        if last or self.deepspeed is not None or self.fsdp:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def _loss(
        self,
        shared: _Shared,
        held: Sequence[int],
        batch: MicroBatch,
        policy_logprobs_N: Tensor,
        entropy_N: Tensor | None,
        correction: SamplerCorrection | None,
    ) -> tuple[Tensor, Any]:
        """The loss with its entropy bonus, and what the policy loss returned."""
        top_N, num_top_tokens = self._top_mask(shared, held, batch, entropy_N)
        drift_N = self._off_policy_mask(shared.report, batch, policy_logprobs_N)
        output = policy_loss(
            policy_logprobs_N,
            config=self.settings.loss,
            advantages_T=batch.advantages_N,
            segments=batch.segments,
            token_weights_T=batch.weights_N,
            old_logprobs_T=batch.old_or(policy_logprobs_N),
            ref_logprobs_T=batch.ref_logprobs_N,
            sampler_logprobs_T=batch.sampler_logprobs_N,
            correction=correction,
            keep_T=drift_N if top_N is None else top_N if drift_N is None else top_N * drift_N,
            entropy_T=entropy_N,
        )
        if entropy_N is None or not self.settings.entropy.has_bonus:
            return output.loss, output
        coefficient, tokens = shared.coefficient, num_top_tokens
        bonus = entropy_bonus(entropy_N, batch.mask_N, coefficient=coefficient, num_tokens=tokens, keep_T=top_N)
        values = entropy_N.detach()[batch.mask_N if top_N is None else batch.mask_N & top_N]
        shared.entropy_sum += float(values.double().sum())
        shared.entropy_count += values.numel()
        return output.loss + bonus, output

    def _top_mask(
        self, shared: _Shared, held: Sequence[int], batch: MicroBatch, entropy_N: Tensor | None
    ) -> tuple[Tensor | None, float]:
        """The forward mask h, or None when all tokens are trained on; and how many tokens the global batch keeps."""
        if entropy_N is None or not self.settings.entropy.selects:
            return None, float(shared.num_tokens)
        top = shared.top
        if top is None:
            entropies = dict(zip(held, split_by_sample(entropy_N, batch.samples), strict=True))
            top = self.entropy.choose(shared.batch, entropies)
        if not held:
            return torch.zeros_like(batch.mask_N), float(top.num_tokens)
        if held[0] == shared.filler:  # one micro-batch of the global batch
            shared.report.add("entropy_threshold", top.threshold, 1.0)
        keep = np.concatenate([top.keep[i] for i in held])
        return torch.from_numpy(keep).to(batch.mask_N.device), float(top.num_tokens)

    def correction(self, batch: MicroBatch, policy_logprobs_N: Tensor) -> SamplerCorrection | None:
        """Importance weights of the tokens for the gap between sampler and trainer; None when it is not corrected."""
        settings = self.settings.correction
        if settings.mode == "none" or not self.settings.correctable_sampling:
            return None
        return sampler_correction(
            sampler_mismatch(batch.old_or(policy_logprobs_N), batch.sampler_logprobs_N, batch.mask_N),
            batch.segments,
            mode=settings.mode,
            threshold=settings.threshold,
            lower=settings.lower,
            sequence_ratio=settings.sequence_ratio,
        )

    def _off_policy_mask(self, report: StepMetrics, batch: MicroBatch, policy_logprobs_N: Tensor) -> Tensor | None:
        """The forward mask o: 0 in sequences of negative advantage that have drifted; None when it is off."""
        delta = self.settings.off_policy_delta
        if delta is None:
            return None
        recorded = self.settings.correctable_sampling  # else the nearest is the policy at the rollout batch's start
        keep_N = off_policy_sequence_mask(
            batch.advantages_N,
            policy_logprobs_N,
            batch.sampler_logprobs_N if recorded else batch.old_or(policy_logprobs_N),
            batch.segments,
            delta=delta,
        )
        masked = ((keep_N == 0) & batch.mask_N).sum()
        report.add("off_policy/masked_frac", float(masked), float(batch.mask_N.sum()))
        return keep_N
