"""GRPO on transformers.Trainer: the loop, optimizers, schedules and checkpoints are its; the step is ours.

What the subclass overrides, and why:

    get_train_dataloader   iterates over the rollout pipeline: one item per optimizer step
    get_batch_samples      takes that item
    training_step          cuts a window into packed micro-batches, normalised over the whole window and all ranks,
                           so that no cut, packing or number of ranks changes the gradient
    create_optimizer       16-bit weights are updated through float32 masters
    _get_grad_norm         a non-finite gradient skips the update on all ranks alike
    _prepare_for_training  notes how the model was wrapped: DeepSpeed updates inside `training_step`, and a model spread
                           over ranks (ZeRO-3, FSDP2) needs the same number of forward passes on each
    evaluate               samples and scores held-out prompts
    log                    adds the window's own metrics to what Trainer logs
    state_beside_weights   what a checkpoint of `SealedTrainer` holds beyond Trainer's files

Trainer's gradient accumulation is 1 throughout: a window is one of its batches, and accumulation happens inside
`training_step`. That is why none of its implicit factors has to be cancelled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from swift.errors import NumericError, RewardError
from swift.models.forward import (
    TokenSequence,
    choose_attention,
    is_packed,
    pack,
)
from swift.models.scoring import prepare_scoring, score_tokens
from swift.models.sharded import is_spread
from swift.rl.correction import (
    effective_sample_size,
    mismatch_statistics,
    off_policy_sequence_mask,
    sampler_correction,
    sampler_mismatch,
)
from swift.rl.entropy import entropy_bonus
from swift.rl.linear_logprobs import Entropy
from swift.rl.losses import get_loss, sequence_weights
from swift.rl.objective import SamplerCorrection, policy_loss
from swift.rl.segments import spread
from swift.rl.window import WindowCounts, count_window, nominal_batch_tokens, nominal_batches
from swift.rollout.pipeline import PipelineState, RolloutPipeline
from swift.rollout.samples import Arrival, RolloutBatch, TrainSample
from swift.trainers.atomic_trainer import SealedTrainer
from swift.trainers.checkpoint import read_state, write_state
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.entropy import (
    TopEntropy,
    controller_state,
    restored_controller,
    top_entropy,
)
from swift.trainers.grpo.metrics import StepMetrics
from swift.trainers.grpo.micro_batch import MicroBatch, collate, split_by_sample
from swift.trainers.grpo.settings import GRPOSettings
from swift.trainers.micro_batches import Limits, MicroBatchPlan
from swift.trainers.optimizers.master_weights import keep_master_weights
from swift.trainers.parallel.deepspeed import DeepSpeedSteps
from swift.trainers.token_budget import PassPlanner
from swift.types import Prompt, TrainerProgress

if TYPE_CHECKING:
    from swift.models.reference import ReferenceModel
    from swift.observability.metrics import MetricStore
    from swift.trainers.reporting import RunReport

REFERENCE_STATE = "reference.pt"
"""A reference that has moved. No safetensors: whoever reads a checkpoint as a model takes all of those."""

NON_FINITE_LIMIT = 10
"""Updates in a row that may be skipped for a non-finite gradient before the run ends (exit 6)."""


@dataclass(slots=True)
class _Step:
    """What the passes of one optimizer step share.

    weights: loss weight of each trained token, by sample. filler: a sample for ranks that have none left.
    coefficient: weight of the entropy bonus. top: the mask of a window that was looked at before; None leaves it to the
    one pass that holds the whole window. num_tokens: trained tokens of the window. entropies: sum and count so far.
    """

    unit: RolloutBatch
    weights: dict[int, float]
    filler: int
    report: StepMetrics
    coefficient: float
    top: TopEntropy | None
    num_tokens: int
    entropies: list[float] = field(default_factory=lambda: [0.0, 0.0])


class TrainerState(msgspec.Struct):
    """What a checkpoint holds beside weights, optimizer, schedule and random states."""

    pipeline: PipelineState
    metrics: dict[str, Any]
    entropy: dict[str, Any] | None
    fitting_tokens: int | None
    report: dict[str, Any] | None


class GRPOTrainer(SealedTrainer):
    """Trains a policy on the windows of a rollout pipeline.

    Args:
        model: the policy, unwrapped.
        args: transformers' arguments with gradient_accumulation_steps 1 and max_steps > 0.
        settings: loss and batch settings.
        pipeline: where windows come from.
        collectives: the data-parallel ranks.
        metrics: collects what each step reports (rank 0 logs it).
        reference: the KL reference; needed when `settings.loss.beta` > 0.
        eval_prompts: held-out prompts, or none.
        checkpoint_extras: called with the staging folder on rank 0 before a checkpoint is committed.
        save_total_limit: most checkpoints that stay.
        report: what is shown and written (rank 0 only); brought to the disk before a checkpoint counts.
        on_progress: called after each micro-batch.
    """

    def __init__(
        self,
        *,
        settings: GRPOSettings,
        pipeline: RolloutPipeline,
        collectives: Collectives,
        metrics: MetricStore,
        reference: ReferenceModel | None = None,
        eval_prompts: Sequence[Prompt] = (),
        checkpoint_extras: Callable[[Path], None] = lambda folder: None,
        report: RunReport | None = None,
        save_total_limit: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        **trainer_arguments: Any,
    ) -> None:
        self.settings = settings
        self.pipeline = pipeline
        self.reference = reference
        self.eval_prompts = list(eval_prompts)
        self.checkpoint_extras = checkpoint_extras
        self.report = report
        self.on_progress = on_progress
        self.interrupted = False
        self._entropy_controller = settings.entropy.adaptive
        self._reference_moved = False
        self._memory_fitted = False
        self._non_finite_in_a_row = 0
        self._engine: DeepSpeedSteps | None = None
        self._in_step = False
        super().__init__(
            collectives=collectives,
            metrics=metrics,
            save_total_limit=save_total_limit,
            eval_dataset=self.eval_prompts or None,
            **trainer_arguments,
        )
        assert self.args.gradient_accumulation_steps == 1, "accumulation happens inside training_step"
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.packing_obstacle = choose_attention(self.model)
        self._whole_logits = prepare_scoring(self.model)
        self.planner = PassPlanner(self.model, collectives, device=self.args.device, say=self._say)
        if reference is not None:
            with reference.active() as module:
                choose_attention(module)
                self._whole_logits = prepare_scoring(module) or self._whole_logits
        if self._whole_logits is not None:
            self._say(f"log-probs: from whole logits ({self._whole_logits}), which takes more memory")

    def _unwrapped(self) -> nn.Module:
        """The policy without what wraps it for training."""
        if self.model_wrapped is self.model:  # accelerate looks for DeepSpeed at every call, which takes milliseconds
            return self.model
        model: nn.Module = self.accelerator.unwrap_model(self.model_wrapped)
        return model

    def collate(self, samples: Sequence[TrainSample], weights_S: Sequence[float]) -> MicroBatch:
        """The samples of one pass, packed; see `swift.trainers.grpo.micro_batch.collate`."""
        return collate(samples, weights_S, device=self.args.device)

    # --- data -----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """One item per optimizer step, without end; max_steps ends the run."""
        return _Windows(lambda: self.pipeline.steps(self.progress))

    def progress(self) -> TrainerProgress:
        """What reward functions see as `trainer_state`."""
        return TrainerProgress(self.state.global_step, self.state.max_steps, float(self.state.epoch or 0.0))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, None]:
        """One window; its tokens are counted by the normaliser, not by Trainer.

        Reward functions that stay broken end the run here, on all ranks alike; what was trained so far is saved first.
        """
        try:
            return [next(epoch_iterator)], None
        except RewardError:
            if self.state.global_step > 0:
                self._save_checkpoint(self.model, None)
            raise

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Windows are packed and moved slice by slice."""
        return inputs

    def floating_point_ops(self, inputs: Any) -> float:
        """Not counted by Trainer: a window is not a dict of tensors."""
        return 0.0

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model; from here on it may be spread over ranks."""
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._engine = DeepSpeedSteps(self.model_wrapped) if self.is_deepspeed_enabled else None
        self._in_step = is_spread(self.model)
        return prepared

    # --- one optimizer step -----------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: RolloutBatch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one window; gradients are complete when it returns.

        Returns:
            this rank's share of the window loss times the number of ranks (their mean is the loss).
        """
        report = StepMetrics()
        self._fit_memory()
        if inputs.arriving is not None:
            loss = self._backward_arriving(model, inputs, inputs.arriving, report)
        else:
            with self.metrics.timer("train"):
                loss = self._backward_window(model, inputs, report)
        self._report(report, float(loss), inputs)
        return loss

    def _backward_window(self, model: nn.Module, unit: RolloutBatch, report: StepMetrics) -> Tensor:
        model.train()
        if self._engine is not None:
            self._engine.begin()
        self._prepare_old_logprobs(unit)
        window = unit.global_batch(unit.global_batch_index)
        weights = dict(zip(window, self._weights([unit.samples[i] for i in window]), strict=True))
        useful = self._useful(unit, window)
        loss = torch.zeros((), device=self.args.device)
        if not any(useful):  # no gradient at all: the optimizer leaves every weight alone
            report.add("health/steps_without_signal", 1.0, 1.0)
            return loss
        top = self._look_at_entropy(unit, window)
        plan = self.plan(unit.samples, window, useful)
        step = _Step(
            unit,
            weights,
            filler=_first(plan),
            report=report,
            coefficient=self._entropy_coefficient(),
            top=top,
            num_tokens=sum(unit.samples[i].num_trained for i in window),
        )
        slices = plan.micro_batches[self.collectives.rank]
        for number, part in enumerate(slices):
            last = number == len(slices) - 1
            with self._sync_only_last(model, last):
                loss += self._slice(model, step, part, last=last)
        if self._engine is not None:
            self._engine.step()
        self._steer_entropy(step)
        return loss

    def _backward_arriving(
        self, model: nn.Module, unit: RolloutBatch, parts: Iterator[Arrival], report: StepMetrics
    ) -> Tensor:
        """The same for a window whose samples are still being sampled: its counts are known at the end only.

        Each part is weighed as if the window were full of the longest completions; at the end the gradients are
        multiplied by that normaliser over the true one. That is the gradient of the whole window, up to rounding.
        """
        model.train()
        loss, ran = torch.zeros((), device=self.args.device), False
        try:
            for part in parts:
                with self.metrics.timer("train"):
                    share, has_run = self._backward_part(model, unit, part, report, ran=ran)
                loss, ran = loss + share, ran or has_run
        except RewardError:
            model.zero_grad(set_to_none=True)
            if self.state.global_step > 0:
                self._save_checkpoint(self.model, None)
            raise
        if not ran:
            report.add("health/steps_without_signal", 1.0, 1.0)
            return loss
        total, limit = get_loss(self.settings.loss.loss_type).normaliser.total, self.settings.max_completion_length
        exact = total(count_window([sample.num_trained for sample in unit.samples]), limit)
        factor = total(self._fullest(), limit) / exact
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        if unit.updates_per_rollout > 1:
            self._share_old_logprobs(unit)
        return loss * factor

    def _share_old_logprobs(self, unit: RolloutBatch) -> None:
        """Later visits cut the whole window over the ranks, not its parts, so samples change hands; collective."""
        mine = {i: one.old_logprobs for i, one in enumerate(unit.samples) if one.old_logprobs is not None}
        for part in self.collectives.all_gather(mine):
            for i, logprobs in part.items():
                if unit.samples[i].old_logprobs is None:
                    unit.samples[i].old_logprobs = logprobs

    def _fullest(self) -> WindowCounts:
        """The counts of a window full of the longest completions."""
        num_sequences = self.pipeline.scheduler.groups_per_batch * self.pipeline.config.num_generations
        return count_window([self.settings.max_completion_length] * num_sequences)

    def _backward_part(
        self, model: nn.Module, unit: RolloutBatch, part: Arrival, report: StepMetrics, *, ran: bool
    ) -> tuple[Tensor, bool]:
        """One part of such a window: its loss, and whether any pass was made; `ran`: one was before."""
        if self.settings.old_logprobs == "sampler":
            _take_sampler_logprobs([unit.samples[i] for i in part.samples])
        tokens = [unit.samples[i].num_trained for i in part.samples]
        weights = sequence_weights(
            get_loss(self.settings.loss.loss_type),
            self._fullest(),
            tokens,
            max_completion_length=self.settings.max_completion_length,
        )
        step = _Step(
            unit,
            dict(zip(part.samples, weights, strict=True)),
            filler=next((i for i, one in enumerate(unit.samples) if one.num_trained), 0),
            report=report,
            coefficient=0.0,
            top=None,
            num_tokens=sum(tokens),
        )
        useful = [weights[n] > 0 and self._contributes(unit.samples[i]) for n, i in enumerate(part.samples)]
        slices = self.plan(unit.samples, part.samples, useful).micro_batches[self.collectives.rank]
        if part.last and ran and not slices and self.collectives.active:
            slices = [[]]  # the pass that brings the ranks' gradients together
        loss = torch.zeros((), device=self.args.device)
        for number, piece in enumerate(slices):
            last = part.last and number == len(slices) - 1
            with self._sync_only_last(model, last):
                loss += self._slice(model, step, piece, last=last)
        return loss, bool(slices)

    def _slice(self, model: nn.Module, step: _Step, part: Sequence[int], *, last: bool) -> Tensor:
        """One forward/backward pass; a rank with nothing left passes over the filler with weight 0."""
        unit = step.unit
        samples = [unit.samples[i] for i in part or [step.filler]]
        batch = self.collate(samples, [step.weights[i] for i in part] or [0.0])
        self._check_old_logprobs(unit, part)
        if not part:
            batch.mask_N = torch.zeros_like(batch.mask_N)
        self._ensure_ref_logprobs(batch, keep=bool(part))
        policy_logprobs_N, entropy_N = self._policy(model, batch)
        top_N, top_tokens = self._top_mask(step, part, batch, entropy_N)
        output = policy_loss(
            policy_logprobs_N,
            config=self.settings.loss,
            advantages_T=spread(batch.advantages_S, batch.tokens.sequence_index),
            mask_T=batch.mask_N,
            token_weights_T=batch.weights_N,
            sequence_index_T=batch.tokens.sequence_index,
            num_sequences=batch.tokens.num_sequences,
            old_logprobs_T=batch.old_or(policy_logprobs_N),
            ref_logprobs_T=batch.ref_logprobs_N,
            correction=self._correction(batch, policy_logprobs_N),
            keep_T=_product(top_N, self._off_policy_mask(step.report, batch, policy_logprobs_N)),
            entropy_T=entropy_N,
        )
        loss = output.loss
        if entropy_N is not None and self.settings.entropy.has_bonus:
            loss = loss + entropy_bonus(
                entropy_N,
                batch.mask_N,
                coefficient=step.coefficient,
                num_window_tokens=top_tokens,
                keep_T=top_N,
            )
            _count_entropy(step, entropy_N, batch.mask_N, top_N)
        loss = loss * self.collectives.world_size
        if self._engine is not None:
            self._engine.backward(loss, last=last)
        else:
            self.accelerator.backward(loss)
        self.on_progress()
        if part:
            if unit.updates_per_rollout > 1:
                _remember(batch, policy_logprobs_N)
            self._observe_slice(step.report, batch, policy_logprobs_N, output, fresh=unit.position == 0)
        return loss.detach()

    def _correction(self, batch: MicroBatch, policy_logprobs_N: Tensor) -> SamplerCorrection | None:
        """Importance weights of the tokens for the gap between sampler and trainer; None when it is not corrected."""
        settings = self.settings.correction
        if settings.mode == "none" or not self.settings.correctable_sampling:
            return None
        eta_N = sampler_mismatch(batch.old_or(policy_logprobs_N), batch.sampler_logprobs_N, batch.mask_N)
        return sampler_correction(
            eta_N,
            mask_T=batch.mask_N,
            sequence_index_T=batch.tokens.sequence_index,
            num_sequences=batch.tokens.num_sequences,
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
        recorded = self.settings.correctable_sampling  # else the nearest thing is the policy at the unit's start
        keep_N = off_policy_sequence_mask(
            spread(batch.advantages_S, batch.tokens.sequence_index),
            policy_logprobs_N,
            batch.sampler_logprobs_N if recorded else batch.old_or(policy_logprobs_N),
            mask_T=batch.mask_N,
            sequence_index_T=batch.tokens.sequence_index,
            num_sequences=batch.tokens.num_sequences,
            delta=delta,
        )
        muted = ((keep_N == 0) & batch.mask_N).sum()
        report.add("off_policy_mask/muted_frac", float(muted), float(batch.mask_N.sum()))
        return keep_N

    def _weights(self, samples: Sequence[TrainSample]) -> list[float]:
        """The loss weight of each trained token of each sample of the window (exact over the whole window)."""
        tokens = [sample.num_trained for sample in samples]
        nominal = nominal_batches(len(samples), self.settings.per_device)
        counts = count_window(tokens, nominal)
        if not counts.trains:
            return [0.0] * len(samples)
        return sequence_weights(
            get_loss(self.settings.loss.loss_type),
            counts,
            tokens,
            nominal_tokens=nominal_batch_tokens(tokens, nominal),
            max_completion_length=self.settings.max_completion_length,
        )

    def _contributes(self, sample: TrainSample) -> bool:
        """Whether a sample can move the gradient: one without advantage only by its KL or its entropy."""
        settings = self.settings
        others = settings.loss.beta > 0 or settings.entropy.has_bonus
        return sample.advantage != 0.0 or others or not settings.skip_zero_advantage

    def plan(self, samples: Sequence[TrainSample], window: Sequence[int], useful: Sequence[bool]) -> MicroBatchPlan:
        """Who computes what in which pass (`swift.trainers.micro_batches`); the same on every rank."""
        limits = Limits(self.settings.slice_size, self.settings.max_tokens)
        return self.planner.plan(samples, window, useful, limits, may_merge=self.settings.merges_passes)

    def _fit_memory(self) -> None:
        """Before the first update of an attempt, while the engine has made room: what fits into a pass."""
        if not self.settings.fits_memory or self._memory_fitted:
            return
        self._memory_fitted = True
        state = self.optimizer is not None and bool(self.optimizer.state)
        self.planner.settle(self.planner.measured(whole_logits=self._whole_logits is not None, has_state=state))

    def _say(self, line: str) -> None:
        if self.report is not None:
            self.report.progress.line(line)

    def _policy(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Log-prob and, where a setting asks for it, entropy of each completion token [N] from one forward pass."""
        if self.settings.entropy.observed:
            return self._logprobs_and_entropy(model, batch)
        return self._logprobs(model, batch), None

    def _logprobs(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Log-prob of each completion token [N] at the sampling temperature, fp32."""
        return self._scores(model, batch, "none")[0]

    def _logprobs_and_entropy(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The same with the entropy of the tempered distribution, which has a gradient where the bonus needs one."""
        logprobs_N, entropy_N = self._scores(model, batch, "gradient" if self.settings.entropy.has_bonus else "value")
        assert entropy_N is not None, "an entropy that was asked for"
        return logprobs_N, entropy_N

    def _scores(self, model: nn.Module, batch: MicroBatch, entropy: Entropy) -> tuple[Tensor, Tensor | None]:
        tokens = batch.tokens if is_packed(model) else batch.sequences()
        temperature = self.settings.temperature
        return score_tokens(model, tokens, temperature=temperature, entropy=entropy, device=self.args.device)

    def score(self, sequences: Sequence[TokenSequence], *, temperature: float | None = None) -> Tensor:
        """The trainer's log-probs [N] of all completion tokens, without gradient; for checks.

        Args:
            sequences: prompts with their completions.
            temperature: None means that of sampling.
        """
        model = self._unwrapped()
        device, temperature = self.args.device, temperature or self.settings.temperature
        tokens = pack(sequences, device=device) if is_packed(model) else sequences
        with torch.no_grad():
            return score_tokens(model, tokens, temperature=temperature, device=device)[0]

    # --- entropy ------------------------------------------------------------------------------------------------

    def _useful(self, unit: RolloutBatch, window: range) -> list[bool]:
        """Which samples of a window are passed over: those that move the gradient, or set the entropy threshold."""
        trained = [unit.samples[i].num_trained > 0 for i in window]
        useful = [has and self._contributes(unit.samples[i]) for has, i in zip(trained, window, strict=True)]
        if any(useful) and self.settings.entropy.selects and self._one_pass(self.plan(unit.samples, window, trained)):
            return trained
        return useful

    def _one_pass(self, plan: MicroBatchPlan) -> bool:
        return self.collectives.world_size == 1 and len(plan.micro_batches[0]) == 1

    def _look_at_entropy(self, unit: RolloutBatch, window: range) -> TopEntropy | None:
        """The mask of the top entropies, as far as it has to be known before the first pass.

        All trained tokens of the window have a say in the threshold, those without advantage too. Where one pass holds
        them all, the mask is made from its own entropies.
        """
        if not self.settings.entropy.selects:
            return None
        trained = [unit.samples[i].num_trained > 0 for i in window]
        plan = self.plan(unit.samples, window, trained)
        if self._one_pass(plan):
            return None
        model = self._unwrapped()
        model.eval()
        mine: dict[int, np.ndarray] = {}
        for batch, part in self._own_batches(unit, plan, lambda i: True):
            with torch.no_grad():
                _, entropy_N = self._logprobs_and_entropy(model, batch)
            if part:
                mine |= dict(zip(part, split_by_sample(entropy_N, batch.samples), strict=True))
            self.on_progress()
        model.train()
        entropies = {i: values for part in self.collectives.all_gather(mine) for i, values in part.items()}
        return self._choose(unit, entropies)

    def _choose(self, unit: RolloutBatch, entropies: dict[int, np.ndarray]) -> TopEntropy:
        trained = {i: unit.samples[i].trained for i in entropies}
        return top_entropy(entropies, trained, self.settings.entropy.quantile)

    def _top_mask(
        self, step: _Step, part: Sequence[int], batch: MicroBatch, entropy_N: Tensor | None
    ) -> tuple[Tensor | None, float]:
        """The forward mask h of a pass, or None when all tokens are trained on; and how many the window keeps."""
        if entropy_N is None or not self.settings.entropy.selects:
            return None, float(step.num_tokens)
        top = step.top
        if top is None:
            entropies = dict(zip(part, split_by_sample(entropy_N, batch.samples), strict=True))
            top = self._choose(step.unit, entropies)
        if not part:
            return torch.zeros_like(batch.mask_N), float(top.num_tokens)
        if part[0] == step.filler:  # one pass of the window
            step.report.add("entropy_threshold", top.threshold, 1.0)
        keep = np.concatenate([top.keep[i] for i in part])
        return torch.from_numpy(keep).to(batch.mask_N.device), float(top.num_tokens)

    def _entropy_coefficient(self) -> float:
        controller = self._entropy_controller
        return self.settings.entropy.coefficient if controller is None else controller.applied

    def _steer_entropy(self, step: _Step) -> None:
        """Book the coefficient, and let the controller see the mean over the window, the same on every rank."""
        if not self.settings.entropy.has_bonus:
            return
        if self.collectives.is_main:
            step.report.add("entropy_coef", step.coefficient, 1.0)
        if self._entropy_controller is None:
            return
        total, count = self.collectives.sum(step.entropies)
        if count and math.isfinite(total):  # else the update is skipped, and there is nothing to learn from
            self._entropy_controller = self._entropy_controller.updated(total / count)

    # --- log-probs of other policies ----------------------------------------------------------------------------

    def _prepare_old_logprobs(self, unit: RolloutBatch) -> None:
        """Before the first update on a unit: what later windows (or dropout) need from the weights as they are now."""
        if unit.position > 0:
            return
        if self.settings.old_logprobs == "sampler":
            _take_sampler_logprobs(unit.samples)
            return
        first = 0 if self.settings.keep_dropout else 1
        self._fill_old_logprobs(unit, range(first, unit.num_global_batches))

    def _check_old_logprobs(self, unit: RolloutBatch, part: Sequence[int]) -> None:
        """Only the first update after a rollout may take the policy itself for the old one.

        Raises:
            NumericError: a sample of a later update has no old log-probs on this rank, so its ratio would be 1.
        """
        if unit.position == 0 and (unit.arriving is not None or not self.settings.keep_dropout):
            return
        missing = [i for i in part if unit.samples[i].old_logprobs is None]
        if missing:
            raise NumericError(
                f"old log-probs: rank {self.collectives.rank} has none for {len(missing)} of {len(part)} samples of "
                f"step {self.state.global_step + 1} (update {unit.position + 1} of their rollout); this is a bug"
            )

    def _fill_old_logprobs(self, unit: RolloutBatch, windows: range) -> None:
        """Log-probs under the weights with which the unit is first consumed, for this rank's samples."""
        model = self._unwrapped()
        model.eval()
        for number in windows:
            window = unit.global_batch(number)
            # the plan is that of the window's training passes, so that a rank fills what it will need
            plan = self.plan(unit.samples, window, self._useful(unit, window))
            for batch, part in self._own_batches(unit, plan, lambda i: unit.samples[i].old_logprobs is None):
                with torch.no_grad():
                    logprobs_N = self._logprobs(model, batch)
                if part:
                    _remember(batch, logprobs_N)
                self.on_progress()
        model.train()

    def _own_batches(
        self, unit: RolloutBatch, plan: MicroBatchPlan, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[MicroBatch, list[int]]]:
        """This rank's passes of a plan with something wanted in them, and what each holds.

        With a spread model there is one in each turn in which any rank has one, if need be over a filler.
        """
        needs = {i for parts in plan.micro_batches for part in parts for i in part if wanted(i)}
        for turn, part in enumerate(plan.micro_batches[self.collectives.rank]):
            if not needs.isdisjoint(part):
                mine = part
            elif self._in_step and any(not needs.isdisjoint(parts[turn]) for parts in plan.micro_batches):
                mine = []
            else:
                continue
            samples = [unit.samples[i] for i in mine or [_first(plan)]]
            yield self.collate(samples, [0.0] * len(samples)), mine

    def refer(self, unit: RolloutBatch) -> None:
        """Fill in the reference's log-probs of a unit, on the rank and in the pass that will train on each; collective.

        The pipeline asks for it while rewards are computed. Nothing is done before a pass has its size.
        """
        if self.settings.fits_memory and not self._memory_fitted:
            return
        with self.metrics.timer("train"):
            for number in range(unit.num_global_batches):
                window = unit.global_batch(number)
                plan = self.plan(unit.samples, window, [unit.samples[i].num_trained > 0 for i in window])
                for batch, part in self._own_batches(unit, plan, lambda i: unit.samples[i].ref_logprobs is None):
                    self._ensure_ref_logprobs(batch, keep=bool(part))
                    self.on_progress()

    def _ensure_ref_logprobs(self, batch: MicroBatch, *, keep: bool) -> None:
        """Fill in the reference's log-probs; with `keep`, on the rank that owns the samples, for later visits too."""
        if self.settings.loss.beta == 0:
            return
        missing = batch.ref_logprobs_N is None
        if not (self.collectives.any(missing) if self._in_step else missing):
            return
        assert self.reference is not None, "beta > 0 without a reference"
        with self.reference.active() as module, torch.no_grad():
            batch.ref_logprobs_N = self._logprobs(module, batch)
        if not keep or not missing:
            return
        for sample, values in zip(batch.samples, split_by_sample(batch.ref_logprobs_N, batch.samples), strict=True):
            sample.ref_logprobs = values

    def _sync_only_last(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        # DeepSpeed's boundary says the same; FSDP without a reduction would keep the gradients of the whole model on
        # every rank, and sum them in the type of the computation
        if last or self._engine is not None or self.is_fsdp_enabled:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def _observe_slice(
        self, report: StepMetrics, batch: MicroBatch, policy_logprobs_N: Tensor, output: Any, *, fresh: bool
    ) -> None:
        report.add_pairs(output.means)
        for name, value in output.maxima.items():
            report.add_extreme(name, float(value))
        if self.settings.correctable_sampling:
            self._observe_sampler(report, batch, policy_logprobs_N)
        if self.settings.log_offpolicy:
            advantages_N = spread(batch.advantages_S, batch.tokens.sequence_index)
            for name, chosen_N in (("positive", advantages_N > 0), ("negative", advantages_N < 0)):
                values = policy_logprobs_N.detach()[batch.mask_N & chosen_N]
                report.add(f"logp/{name}_advantage_mean", float(values.double().sum()), values.numel())
        if fresh and self.settings.comparable_sampling:
            known_N = batch.mask_N & batch.sampler_logprobs_N.isfinite()
            gap = (policy_logprobs_N.detach() - batch.sampler_logprobs_N)[known_N]
            if gap.numel():
                report.add("mismatch/logp_diff_mean", float(gap.double().sum()), gap.numel())
                report.add("mismatch/logp_abs_diff", float(gap.abs().double().sum()), gap.numel())
                report.add_extreme("mismatch/logp_abs_diff_max", float(gap.abs().max()))

    def _observe_sampler(self, report: StepMetrics, batch: MicroBatch, policy_logprobs_N: Tensor) -> None:
        """Ratios of trainer and sampler as they are, whatever the correction makes of them."""
        from_sampler = self.settings.old_logprobs == "sampler"  # then only the policy of now says how far they are
        pairs, extremes = mismatch_statistics(
            policy_logprobs_N.detach() if from_sampler else batch.old_or(policy_logprobs_N),
            batch.sampler_logprobs_N,
            batch.mask_N,
            threshold=self.settings.correction.threshold,
            lower=self.settings.correction.lower,
        )
        report.add_pairs(pairs)
        for name, value in extremes.items():
            report.add_extreme(name, float(value))

    def _report(self, report: StepMetrics, loss: float, unit: RolloutBatch) -> None:
        """Merge the ranks' sums on rank 0 and hand them to the metric store."""
        report.add("loss", loss / self.collectives.world_size, 0.0)
        parts = self.collectives.gather(report)
        if parts is None:
            return
        for other in parts[1:] if self.collectives.is_main else []:
            report.merge(other)
        loss_total, _ = report.sums.pop("loss")
        values = {"loss": loss_total, **report.values()}
        if values.pop("rollout_ratio/squared", None) is not None:
            sums = {name: torch.tensor(report.sums[f"rollout_ratio/{name}"]) for name in ("mean", "squared")}
            values["rollout_ratio/ess"] = effective_sample_size(sums["mean"].double(), sums["squared"].double())
        window = unit.global_batch(unit.global_batch_index)
        if not self.settings.comparable_sampling:
            values["mismatch/biased"] = 1.0
        values["tokens/trained"] = float(sum(unit.samples[i].num_trained for i in window))
        self.metrics.add_many(values)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's optimizer; small updates of 16-bit weights are not rounded away."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made and not self.is_deepspeed_enabled and not self.is_fsdp_enabled:  # these have masters of their own
            keep_master_weights(optimizer)
        return optimizer

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm before clipping; a non-finite one drops the gradients, so that no weight is touched."""
        if self._engine is not None:  # clipped, judged and applied already, where there was a gradient
            norm = self._engine.norm
            return self._judged(norm) if norm is not None else self._no_gradient()
        if not any(parameter.grad is not None for parameter in model.parameters()):
            return self._no_gradient()
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is not None and not math.isfinite(float(norm)):
            model.zero_grad(set_to_none=True)
        return self._judged(norm)

    def _no_gradient(self) -> Tensor:
        self.metrics.add_many({"grad_norm": 0.0})
        return torch.zeros(())

    def _judged(self, norm: Any) -> Any:
        """Book a norm; too many non-finite ones in a row end the run."""
        if norm is None or math.isfinite(float(norm)):
            self._non_finite_in_a_row = 0
            self.metrics.add_many({"grad_norm": float(norm)} if norm is not None else {})
            return norm
        self._non_finite_in_a_row += 1
        self.metrics.add_many({"health/non_finite_steps": 1.0})
        if self._non_finite_in_a_row >= NON_FINITE_LIMIT:
            raise NumericError(
                f"grad_norm: {float(norm)}: not finite for {NON_FINITE_LIMIT} updates in a row, the last at step "
                f"{self.state.global_step + 1}; lower --learning_rate, or use --torch_dtype float32"
            )
        return norm

    def move_reference(self, alpha: float) -> None:
        """Mix `alpha` of the policy into the reference; what the former one said about this unit is forgotten.

        Collective where the policy is spread over ranks.
        """
        assert self.reference is not None, "there is no reference to move"
        self.reference.blend(self._unwrapped(), alpha)
        self._reference_moved = True
        if self.pipeline.batch is not None:
            for sample in self.pipeline.batch.samples:
                sample.ref_logprobs = None

    # --- evaluation, logs, checkpoints ---------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict:
        """Sample and score the held-out prompts."""
        with self.metrics.timer("eval"):
            metrics = self.pipeline.evaluate(self.eval_prompts, self.progress())
        prefixed = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(prefixed))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, prefixed)
        return prefixed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Training logs get the means since the last log; `loss` is the window's own, exact over a resume."""
        if "loss" in logs and "learning_rate" in logs:
            logs = {**logs, **self.metrics.flush(), "max_steps": self.state.max_steps}
        super().log(logs, start_time)

    def add_to_checkpoint(self, folder: Path, state: TrainerState) -> None:
        """What a checkpoint holds beyond Trainer's files; rank 0 only."""
        self.state.save_to_json(str(folder / "trainer_state.json"))
        write_state(folder, state)
        if self._reference_moved and self.reference is not None and not self.args.save_only_model:
            torch.save(self.reference.state(), folder / REFERENCE_STATE)
        self.checkpoint_extras(folder)
        if self.report is not None:
            self.report.on_save()

    def state_beside_weights(self) -> TrainerState:
        """The pipeline's state with the old and reference log-probs that other ranks hold."""
        unit = self.pipeline.batch
        if unit is not None and not unit.exhausted and unit.updates_per_rollout > 1:
            mine = {
                i: (sample.old_logprobs, sample.ref_logprobs)
                for i, sample in enumerate(unit.samples)
                if sample.old_logprobs is not None or sample.ref_logprobs is not None
            }
            for part in self.collectives.gather(mine) or []:
                for i, (old, ref) in part.items():
                    sample = unit.samples[i]
                    sample.old_logprobs = sample.old_logprobs if old is None else old
                    sample.ref_logprobs = sample.ref_logprobs if ref is None else ref
        return TrainerState(
            pipeline=self.pipeline.state(),
            metrics=self.metrics.state_dict(),
            entropy=controller_state(self._entropy_controller),
            fitting_tokens=self.planner.fitting_tokens,
            report=self.report.state_dict() if self.report is not None else None,
        )

    def load_pipeline_state(self, checkpoint: Path) -> None:
        """Continue the pipeline, the reference and the open log window where the checkpoint left them."""
        state = read_state(checkpoint, TrainerState)
        self.pipeline.load(state.pipeline)
        self.metrics.load_state_dict(state.metrics)
        self._entropy_controller = restored_controller(self.settings.entropy.adaptive, state.entropy)
        self.planner.fitting_tokens = state.fitting_tokens
        if self.reference is not None and (checkpoint / REFERENCE_STATE).exists():
            moved = torch.load(checkpoint / REFERENCE_STATE, map_location="cpu", weights_only=True)
            self.reference.load_state(moved)
            self._reference_moved = True
        if self.report is not None and state.report is not None:
            self.report.load_state_dict(state.report)


def _remember(batch: MicroBatch, logprobs_N: Tensor) -> None:
    """Keep log-probs with the samples that have none yet, for later updates on the same unit."""
    if all(sample.old_logprobs is not None for sample in batch.samples):
        return
    for sample, values in zip(batch.samples, split_by_sample(logprobs_N, batch.samples), strict=True):
        if sample.old_logprobs is None:
            sample.old_logprobs = values


def _take_sampler_logprobs(samples: Sequence[TrainSample]) -> None:
    """Let what the sampler recorded stand in for old log-probs, except where samples bring theirs."""
    for sample in samples:
        if sample.old_logprobs is None:
            sample.old_logprobs = sample.sampler_logprobs


def _first(plan: MicroBatchPlan) -> int:
    """The first sample that any rank passes over."""
    return next(i for parts in plan.micro_batches for part in parts for i in part)


def _product(*masks: Tensor | None) -> Tensor | None:
    """The product of the forward masks that are on."""
    product = None
    for mask in masks:
        if mask is not None:
            product = mask if product is None else product * mask
    return product


def _count_entropy(step: _Step, entropy_N: Tensor, mask_N: Tensor, top_N: Tensor | None) -> None:
    """Add to the sums of the window's mean: the tokens that the bonus acts on."""
    chosen_N = mask_N if top_N is None else mask_N & top_N
    values = entropy_N.detach()[chosen_N]
    step.entropies[0] += float(values.double().sum())
    step.entropies[1] += values.numel()


class _Windows:
    """What Trainer takes for a data loader; it has no length, so max_steps alone ends the run."""

    def __init__(self, make: Callable[[], Iterator[RolloutBatch]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[RolloutBatch]:
        return self._make()
