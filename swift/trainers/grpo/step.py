"""Forward and backward of one global batch, whole or while its completions arrive.

A global batch is cut into packed micro-batches and normalised over all of them and all ranks, so that no cut, packing
or number of ranks changes the gradient.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from swift.models.scoring import scores_itself
from swift.models.transfer import to_device
from swift.rl.correction import off_policy_sequence_mask, sampler_correction, sampler_mismatch
from swift.rl.entropy import entropy_bonus
from swift.rl.global_batch import BatchCounts, count_batch, nominal_batch_tokens
from swift.rl.kl import k3, teacher_advantages
from swift.rl.losses import get_loss, sequence_weights
from swift.rl.objective import policy_loss
from swift.rollout.samples import Arrival, FrozenName, RolloutBatch, TrainSample
from swift.trainers.gkd.loss import DistillationLoss
from swift.trainers.grpo.entropy import STEERING, EntropyControl, TopEntropy
from swift.trainers.grpo.logprobs import LogProbs, Scored, keep, take_sampler_logprobs
from swift.trainers.grpo.metrics import StepMetrics, observe
from swift.trainers.grpo.micro_batch import MicroBatch, collate, split_by_sample
from swift.trainers.grpo.record import StepRecord
from swift.trainers.micro_batches import Limits, MicroBatchPlan
from swift.trainers.token_budget import MicroBatchPlanner

if TYPE_CHECKING:
    from swift.models.attention.sequence_parallel import SequenceGroup
    from swift.models.reference import ReferenceModel
    from swift.trainers.distributed import Collectives
    from swift.trainers.grpo.settings import GRPOSettings
    from swift.trainers.parallel.deepspeed import DeepSpeedSteps

T = TypeVar("T")


@dataclass(slots=True)
class _Shared:
    """Values that the micro-batches of one optimizer step share.

    weights: loss weight of each trained token, by sample. filler: a sample for ranks that have none left. num_tokens:
    trained tokens of the global batch. coefficient: weight of the entropy bonus. top: the mask of the top entropies;
    None if one micro-batch holds the global batch and so gives the mask. entropy_sum, entropy_count: over the tokens of
    the entropy bonus, so far.
    """

    batch: RolloutBatch
    weights: dict[int, float]
    filler: int
    report: StepMetrics
    num_tokens: int
    coefficient: float = 0.0
    top: TopEntropy | None = None
    entropy_sum: Tensor | float = 0.0
    entropy_count: Tensor | float = 0.0


@dataclass(eq=False)
class GlobalBatchStep:
    """Makes the gradients of one optimizer step.

    sequences: completions of a full global batch, for one whose samples are still arriving. timer: times phases.
    deepspeed: drives its engine; None without. fsdp: FSDP2 shards the model. around_pass: gives what stands around a
    forward pass with its backward pass. loss_scale: of the loss in backward passes. record: takes the log-probs for the
    record of rollouts. rollout_only: nothing is computed. num_updates: before the current one. passes: done
    micro-batches and all of them, on this rank.
    """

    logprobs: LogProbs
    entropy: EntropyControl
    accelerator: Accelerator
    sequences: int
    timer: Callable[[str], contextlib.AbstractContextManager[None]]
    deepspeed: DeepSpeedSteps | None = None
    fsdp: bool = False
    around_pass: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    loss_scale: float = 1.0
    num_updates: int = 0
    record: StepRecord | None = None
    rollout_only: bool = False
    passes: tuple[int, int] = (0, 0)
    _has_stepped: bool = False

    def __post_init__(self) -> None:
        settings = self.logprobs.settings.distillation
        self.distillation = None if settings is None else DistillationLoss(self.logprobs, settings)
        """Computes the loss in place of the policy gradient."""

    def run(
        self, model: nn.Module, policy: nn.Module, batch: RolloutBatch, report: StepMetrics, num_updates: int
    ) -> Tensor:
        """Forward and backward of the next global batch; gradients are complete, and scaled, when it returns.

        Args:
            model: the policy as it is wrapped for training.
            policy: the same, unwrapped.
            batch: the rollout batch.
            report: receives the metrics.
            num_updates: before this one.

        Returns:
            this rank's share of the loss times the number of ranks (their mean is the loss).
        """
        self._has_stepped, self.num_updates = self.num_updates > 0, num_updates
        self.logprobs.begin(batch)
        model.train()
        if batch.arriving is not None:
            return self._arriving(model, batch, batch.arriving, report)
        with self.timer("train"):
            loss = self._surviving(model, report, lambda: self._whole(model, policy, batch, report))
            if self.deepspeed is not None:
                self.deepspeed.step()  # memory that it lacks is not that of a micro-batch
            return loss

    @property
    def in_backward(self) -> bool:
        """Whether every backward pass reduces its gradients over the ranks."""
        return self.deepspeed is not None or self.fsdp

    @property
    def can_agree(self) -> bool:
        """Whether passes have no collectives, but for the last one of a step: then a rank may fail in one."""
        return not self.in_backward and self.logprobs.can_agree

    def _surviving(
        self, model: nn.Module, report: StepMetrics, attempt: Callable[[], T], undo: Callable[[], object] = lambda: None
    ) -> T:
        """`attempt`, which makes gradients; from the beginning with smaller micro-batches where memory runs out."""

        def undo_all() -> None:
            model.zero_grad(set_to_none=True)
            report.clear()
            if self.record is not None:
                self.record.clear()
            undo()

        return self.logprobs.planner.surviving(attempt, undo_all, alone=self.can_agree)

    def _whole(self, model: nn.Module, policy: nn.Module, batch: RolloutBatch, report: StepMetrics) -> Tensor:
        """The next global batch of a rollout batch that is complete."""
        logprobs, settings = self.logprobs, self.logprobs.settings
        if self.rollout_only:
            return torch.zeros((), device=logprobs.device)
        if self.deepspeed is not None:
            self.deepspeed.begin()
        if batch.position == 0 and self.distillation is None:
            logprobs.prepare_old(batch)
        chosen = batch.global_batch()
        useful = logprobs.useful(batch, chosen)
        loss = torch.zeros((), device=logprobs.device)
        references = batch.references if settings.ce_coef else []
        if not any(useful) and not references:  # no gradient at all: the optimizer leaves every weight alone
            report.add("health/steps_without_signal", 1.0)
            return loss
        if references:
            loss = loss + self._references(model, references, report, last=not any(useful))
        if any(useful):
            top = None
            if settings.entropy.quantile < 1:
                top = self.entropy.mask_ahead(batch, chosen, policy)
            plan = logprobs.planner.plan(batch.samples, chosen, useful)
            if self.distillation is None and (batch.position > 0 or settings.keep_dropout):
                own = plan.micro_batches[logprobs.collectives.rank]
                logprobs.check_old(batch, [i for held in own for i in held])
            samples = [batch.samples[i] for i in chosen]
            shared = _Shared(
                batch,
                dict(zip(chosen, self._weights(samples), strict=True)),
                filler=plan.first,
                report=report,
                num_tokens=sum(sample.num_trained for sample in samples),
                coefficient=self.entropy.coefficient if settings.entropy.has_bonus else 0.0,
                top=top,
            )
            loss = loss + self._micro_batches(model, shared, plan, last=True)
            if settings.entropy.has_bonus:
                if logprobs.collectives.is_main:
                    report.add("entropy_coef", shared.coefficient)
                if self.entropy.controller is not None:
                    report.add(STEERING, shared.entropy_sum, shared.entropy_count)
        return loss

    def _references(
        self, model: nn.Module, references: Sequence[TrainSample], report: StepMetrics, *, last: bool
    ) -> Tensor:
        """The cross-entropy of references at temperature 1: `ce_coef * sum -lp / N` over their N tokens."""
        logprobs, ranks, coefficient = self.logprobs, self.logprobs.collectives, self.logprobs.settings.ce_coef or 0.0
        plan = logprobs.planner.plan(references, range(len(references)))
        num_tokens = sum(reference.num_trained for reference in references)

        def share_of(held: Sequence[int]) -> Tensor:
            chosen = [references[i] for i in held or [plan.first]]
            batch = collate(chosen, [1 / num_tokens if held else 0.0] * len(chosen), device=logprobs.device)
            logprobs_N, _ = logprobs.scores(model, batch, temperature=1.0)
            if held:
                report.add_mean("ebft/ce_loss", -logprobs_N.detach(), batch.mask_N)
            return -coefficient * ranks.world_size * (batch.weights_N * logprobs_N).sum()

        return self._passes(model, plan, share_of, last=last)

    def _weights(self, samples: Sequence[TrainSample], counts: BatchCounts | None = None) -> list[float]:
        """The loss weight of each trained token of each sample; of all in the global batch, or by its `counts`."""
        settings = self.logprobs.settings
        tokens, nominal = [sample.num_trained for sample in samples], settings.per_device
        return sequence_weights(
            get_loss(settings.loss.loss_type),
            counts or count_batch(tokens, nominal),
            tokens,
            nominal_tokens=nominal_batch_tokens(tokens, nominal),
            max_completion_length=settings.max_completion_length,
        )

    # --- a global batch that is still being sampled -------------------------------------------------------------

    def _arriving(
        self, model: nn.Module, batch: RolloutBatch, arrivals: Iterator[Arrival], report: StepMetrics
    ) -> Tensor:
        """A global batch whose completions are still being sampled: its normaliser is known only at the end.

        Each arrival is normalised as if the global batch were full of the longest completions. At the end, the
        gradients are multiplied by that normaliser over the true one, which gives the exact gradient up to rounding.
        """
        loss, ran = torch.zeros((), device=self.logprobs.device), False
        for arrival in arrivals:
            with self.timer("train"):
                loss, ran = self._with(arrival, model, batch, report, loss, ran=ran)
        if not ran:
            report.add("health/steps_without_signal", 1.0)
            return loss
        settings = self.logprobs.settings
        total, limit = get_loss(settings.loss.loss_type).normaliser.total, settings.max_completion_length
        exact = total(count_batch([sample.num_trained for sample in batch.samples]), limit)
        factor = total(self._fullest(), limit) / exact
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        if batch.updates_per_rollout > 1:
            self.logprobs.share(batch)
        report.collect()
        if "policy_loss" in report:
            report["policy_loss"].total *= factor
        return loss * factor

    def _fullest(self) -> BatchCounts:
        """The counts of a global batch full of the longest completions."""
        return count_batch([self.logprobs.settings.max_completion_length] * self.sequences)

    def _with(
        self, arrival: Arrival, model: nn.Module, batch: RolloutBatch, report: StepMetrics, loss: Tensor, *, ran: bool
    ) -> tuple[Tensor, bool]:
        """The loss with one more arrival, and whether this rank has computed anything; `ran`: whether it had before.

        If memory runs out, the earlier arrivals are computed again with it.
        """

        def attempt() -> tuple[Tensor, bool]:
            share, has_run = self._arrival(model, batch, arrival, report, ran=ran)
            return loss + share, ran or has_run

        def undo() -> None:
            nonlocal arrival, loss, ran
            arrival, loss, ran = Arrival(range(arrival.samples.stop), arrival.last), torch.zeros_like(loss), False
            self.logprobs.forget_old(batch)  # those of another cut, of ranks that may change

        return self._surviving(model, report, attempt, undo)

    def _arrival(
        self, model: nn.Module, batch: RolloutBatch, arrival: Arrival, report: StepMetrics, *, ran: bool
    ) -> tuple[Tensor, bool]:
        """The loss of one arrival, and whether this rank computed anything; `ran`: whether it did before."""
        samples = [batch.samples[i] for i in arrival.samples]
        if self.logprobs.settings.old_logprobs == "sampler":
            take_sampler_logprobs(samples)
        weights = self._weights(samples, self._fullest())
        plan = self.logprobs.planner.plan(batch.samples, arrival.samples, self.logprobs.useful(batch, arrival.samples))
        ranks = self.logprobs.collectives
        if arrival.last and ran and not plan.tokens and ranks.active:
            plan = MicroBatchPlan([[[]]] * ranks.world_size)  # fillers, whose backward pass reduces the gradients
        shared = _Shared(
            batch,
            dict(zip(arrival.samples, weights, strict=True)),
            filler=next((i for i, sample in enumerate(batch.samples) if sample.num_trained), 0),
            report=report,
            num_tokens=sum(sample.num_trained for sample in samples),
        )
        return self._micro_batches(model, shared, plan, last=arrival.last), bool(plan.micro_batches[ranks.rank])

    # --- micro-batches ------------------------------------------------------------------------------------------

    def _micro_batches(self, model: nn.Module, shared: _Shared, plan: MicroBatchPlan, *, last: bool) -> Tensor:
        """Forward and backward of this rank's micro-batches; their loss. `last`: see `_passes`.

        A rank with none left computes the filler with weight 0. The load-balancing loss is that of each micro-batch;
        the global batch has their mean over all ranks, weighted by trained tokens, so it depends on the cut.
        """
        logprobs, settings = self.logprobs, self.logprobs.settings
        entropy = settings.entropy.kind(self.num_updates, free=not scores_itself(model))
        planned = [i for rank in plan.micro_batches for held in rank for i in held]
        num_trained = sum(shared.batch.samples[i].num_trained for i in planned)
        frozen = logprobs.frozen
        scored: dict[Literal["old_logprobs"] | FrozenName, list[Scored]] = {"old_logprobs": []}
        scored |= {name: [] for name in frozen}

        def share_of(held: Sequence[int]) -> Tensor:
            samples = [shared.batch.samples[i] for i in held or [shared.filler]]
            weights = [shared.weights[i] for i in held] or [0.0]
            batch = collate(samples, weights, device=logprobs.device, filler=not held, vision=logprobs.vision)
            if self.distillation is not None:
                loss, sampling_logprobs_N = self.distillation.of(model, batch, shared.report)
                if held and self.record is not None:
                    self.record.add(held, sampling_logprobs_N, {}, None)
                return loss * logprobs.collectives.world_size
            batch.frozen_N |= {name: logprobs.of_frozen(name, batch) for name in frozen}
            policy_logprobs_N, entropy_N, balance = logprobs.training_scores(model, batch, entropy)
            if held and self.record is not None:
                self.record.add(held, policy_logprobs_N, batch.frozen_N, entropy_N)
            if held and shared.batch.updates_per_rollout > 1:
                scored["old_logprobs"].append((samples, policy_logprobs_N.detach()))
                for name in frozen:
                    scored[name].append((samples, batch.frozen_N[name]))
            if held and logprobs.routes is not None:
                logprobs.routes.observe(shared.report)
            loss = self._loss(shared, held, batch, policy_logprobs_N, entropy_N)
            if balance is not None:
                share = sum(shared.batch.samples[i].num_trained for i in held) / num_trained
                shared.report.add("aux_loss", share * balance.detach(), kind="sum")
                loss = loss + settings.router_aux_loss_coef * share * balance
            return loss * logprobs.collectives.world_size

        loss = self._passes(model, plan, share_of, last=last)
        for field, parts in scored.items():
            keep(field, parts)
        return loss

    def _passes(
        self, model: nn.Module, plan: MicroBatchPlan, share_of: Callable[[Sequence[int]], Tensor], *, last: bool
    ) -> Tensor:
        """Forward and backward of this rank's micro-batches; the sum of their losses, which `share_of` computes.

        With `last`, the last backward pass reduces the gradients over the ranks. Whether memory suffices is agreed on
        before, so it is a pass of a size that has been survived beside the optimizer's state, or a filler.
        """
        ranks, planner = self.logprobs.collectives, self.logprobs.planner
        own = plan.micro_batches[ranks.rank]
        if last and len(own) == 1 and ranks.active and plan.tokens > planner.survived and self.can_agree:
            own = [*own, []]
        loss = torch.zeros((), device=self.logprobs.device)
        self.passes = 0, len(own)

        def run(held: Sequence[int], *, final: bool) -> Tensor:
            reduction = contextlib.nullcontext() if final else self._without_reduction(model)
            with reduction, self.around_pass(), self.logprobs.routes_kept():
                share = share_of(held)
                self._backward(share, last=final)
            self.logprobs.on_progress()
            self.passes = self.passes[0] + 1, len(own)
            return share.detach()

        with planner.agreed() if self.can_agree else contextlib.nullcontext():
            for held in own[:-1] if last else own:
                loss += run(held, final=False)
        if self._has_stepped:
            planner.survived = max(planner.survived, plan.tokens)
        if last and own:
            loss += run(own[-1], final=True)
        return loss

    def _without_reduction(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Around all micro-batches but the last: their gradients are not reduced over the ranks yet."""
        # DeepSpeed's boundary does the same; FSDP without a reduction would keep the gradients of the whole model on
        # every rank, and sum them in the type of the computation
        if self.in_backward:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        if self.deepspeed is not None:
            self.deepspeed.backward(loss, last=last)
            return
        ranks = self.logprobs.collectives
        reduces = last and ranks.active and not self.fsdp
        with _timed_reduction(loss, ranks) if reduces else contextlib.nullcontext():
            self.accelerator.backward(loss * self.loss_scale)

    def _loss(
        self,
        shared: _Shared,
        held: Sequence[int],
        batch: MicroBatch,
        policy_logprobs_N: Tensor,
        entropy_N: Tensor | None,
    ) -> Tensor:
        """The loss of a micro-batch with its entropy bonus; adds its metrics, except those of a filler."""
        settings = self.logprobs.settings
        # where a sample has no old log-probs, this is its first update, and the policy itself is the old one
        old_N = batch.old_logprobs_N.to(policy_logprobs_N.dtype)
        old_N = torch.where(old_N.isnan(), policy_logprobs_N.detach(), old_N)
        teacher_N = batch.frozen_N.get("teacher_logprobs")
        assert teacher_N is not None or not settings.teacher_kl_coef, "a trained sample without its teacher's log-probs"
        if teacher_N is not None and settings.teacher_kl_coef:
            batch.advantages_N = teacher_advantages(
                batch.advantages_N, teacher_N, old_N, batch.mask_N, coefficient=settings.teacher_kl_coef
            )
            if held:
                shared.report.add_mean("teacher_kl", k3(old_N, teacher_N), batch.mask_N)
        keep_N, num_bonus_tokens = None, float(shared.num_tokens)
        if entropy_N is not None and settings.entropy.quantile < 1:
            keep_N, num_bonus_tokens = self._top_mask(shared, held, batch, entropy_N)
        top_N = keep_N
        if settings.off_policy_delta is not None:
            drift_N = self._off_policy_mask(shared.report, batch, policy_logprobs_N, old_N, settings.off_policy_delta)
            keep_N = drift_N if keep_N is None else keep_N * drift_N
        correction = None
        if settings.correction.mode != "none" and settings.correctable_sampling:
            correction = sampler_correction(
                sampler_mismatch(old_N, batch.sampler_logprobs_N, batch.mask_N),
                batch.segments,
                mode=settings.correction.mode,
                threshold=settings.correction.threshold,
                lower=settings.correction.lower,
                sequence_ratio=settings.correction.sequence_ratio,
            )
        output = policy_loss(
            policy_logprobs_N,
            config=settings.loss,
            advantages_T=batch.advantages_N,
            segments=batch.segments,
            token_weights_T=batch.weights_N,
            old_logprobs_T=old_N,
            ref_logprobs_T=batch.frozen_N.get("ref_logprobs"),
            sampler_logprobs_T=batch.sampler_logprobs_N,
            correction=correction,
            keep_T=keep_N,
            entropy_T=entropy_N,
        )
        if held:
            observe(shared.report, batch, policy_logprobs_N.detach(), old_N, output, settings, correction)
        if entropy_N is None or not settings.entropy.has_bonus:
            return output.loss
        if self.entropy.controller is not None:
            counted_N = batch.mask_N if top_N is None else batch.mask_N & top_N
            shared.entropy_sum = shared.entropy_sum + torch.where(counted_N, entropy_N.detach(), 0).double().sum()
            shared.entropy_count = shared.entropy_count + counted_N.sum()
        coefficient = shared.coefficient
        return output.loss + entropy_bonus(
            entropy_N, batch.mask_N, coefficient=coefficient, num_tokens=num_bonus_tokens, keep_T=top_N
        )

    def _top_mask(
        self, shared: _Shared, held: Sequence[int], batch: MicroBatch, entropy_N: Tensor
    ) -> tuple[Tensor, float]:
        """The forward mask h, and the number of tokens that it keeps of the global batch."""
        top = shared.top
        if top is None:
            entropies = dict(zip(held, split_by_sample(entropy_N, batch.samples), strict=True))
            top = self.entropy.mask_of(shared.batch, entropies)
        if not held:
            return torch.zeros_like(batch.mask_N), float(top.num_tokens)
        if held[0] == shared.filler:  # once per global batch
            shared.report.add("entropy_threshold", top.threshold)
        keep = np.concatenate([top.keep[i] for i in held])
        return to_device(keep, batch.mask_N.device), float(top.num_tokens)

    def _off_policy_mask(
        self, report: StepMetrics, batch: MicroBatch, policy_logprobs_N: Tensor, old_N: Tensor, delta: float
    ) -> Tensor:
        """The forward mask o: 0 in sequences of negative advantage that have drifted."""
        recorded = self.logprobs.settings.correctable_sampling  # else the old policy is the nearest to the sampler
        keep_N = off_policy_sequence_mask(
            batch.advantages_N,
            policy_logprobs_N,
            batch.sampler_logprobs_N if recorded else old_N,
            batch.segments,
            delta=delta,
        )
        report.add("off_policy/masked_frac", ((keep_N == 0) & batch.mask_N).sum(), batch.mask_N.sum())
        return keep_N


@contextlib.contextmanager
def _timed_reduction(loss: Tensor, ranks: Collectives) -> Iterator[None]:
    """Around a backward pass in which DDP reduces the gradients: its end, without own work, is waiting for other ranks.

    DDP waits in a callback at the end of the pass. One that is queued as the pass begins comes before.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    computed: list[float] = []
    loss.register_hook(lambda _: queue(lambda: computed.append(time.monotonic())))
    yield
    ranks.waited_s += time.monotonic() - computed[0]


def step_of(
    policy: nn.Module,
    settings: GRPOSettings,
    ranks: Collectives,
    device: torch.device,
    *,
    beside: Mapping[FrozenName, ReferenceModel] | None = None,
    group: SequenceGroup | None = None,
    fsdp: bool = False,
) -> GlobalBatchStep:
    """The step of a policy that no Trainer wraps; nothing is timed or printed. For the arguments see `LogProbs`."""
    limits = Limits(settings.max_samples, settings.max_tokens)
    planner = MicroBatchPlanner(
        policy, ranks, limits, per_device=settings.per_device, device=device, say=lambda line: None, group=group
    )
    logprobs = LogProbs(
        settings=settings,
        collectives=ranks,
        planner=planner,
        models=beside or {},
        unwrapped=lambda: policy,
        device=device,
        on_progress=lambda: None,
        timer=lambda name: contextlib.nullcontext(),
        group=group,
        in_step=fsdp,
    )
    accelerator: Any = SimpleNamespace(
        no_sync=lambda model: contextlib.nullcontext(), backward=lambda loss: loss.backward()
    )
    return GlobalBatchStep(
        logprobs=logprobs,
        entropy=EntropyControl(logprobs, None),
        accelerator=accelerator,
        sequences=1,
        timer=logprobs.timer,
        fsdp=fsdp,
    )
