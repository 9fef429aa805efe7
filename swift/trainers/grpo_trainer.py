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
    _load_best_model       its seconds count as saving
    log                    adds the window's own metrics to what Trainer logs
    _save_checkpoint       writes to a staging folder and renames it, with the pipeline's state in it

Trainer's gradient accumulation is 1 throughout: a window is one of its batches, and accumulation happens inside
`training_step`. That is why none of its implicit factors has to be cancelled.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from swift.errors import NumericError, RewardError
from swift.models.checkpoint_tensors import as_saved_unspread, computing_dtype, is_peft
from swift.models.forward import (
    TokenSequence,
    choose_attention,
    is_packed,
    pack,
    packed_logits,
    padded_logits,
)
from swift.models.sharded import is_spread
from swift.observability.files import disk_full_is_an_error
from swift.rl.correction import CorrectionMode, SequenceRatio, sampler_correction, sampler_mismatch
from swift.rl.logprobs import selected_logprobs
from swift.rl.losses import LossConfig, get_loss, sequence_weights
from swift.rl.objective import SamplerCorrection, policy_loss
from swift.rl.segments import spread
from swift.rl.window import count_window, nominal_batch_tokens, nominal_batches
from swift.rollout.batch import TrainSample, TrainUnit, plan_window
from swift.rollout.pipeline import RolloutPipeline
from swift.trainers.checkpoint import commit_checkpoint, rotate, staging_folder, write_json
from swift.trainers.distributed import Collectives
from swift.trainers.master_weights import keep_master_weights
from swift.trainers.microbatch import MicroBatch, collate, split_by_sample
from swift.trainers.sharding import DeepSpeedSteps
from swift.types import Prompt, TrainerProgress

if TYPE_CHECKING:
    from swift.models.reference import ReferenceModel
    from swift.observability.metrics import MetricStore
    from swift.trainers.reporting import RunReport

PIPELINE_STATE = "pipeline_state.json"
NON_FINITE_LIMIT = 10
"""Updates in a row that may be skipped for a non-finite gradient before the run ends (exit 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Weights for tokens that another policy sampled than the one that trains (`swift.rl.correction`)."""

    mode: CorrectionMode = "none"
    threshold: float = 2.0
    lower: float = 0.0
    sequence_ratio: SequenceRatio = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings:
    """What the step needs to know beyond transformers' TrainingArguments.

    per_device: completions of a nominal micro-batch. slice_size: most completions of one forward/backward pass.
    keep_dropout: dropout is on during policy forwards, so old log-probs need an evaluation forward of their own.
    skip_zero_advantage: leave samples out that cannot move the gradient; they count in the normaliser all the same.
    comparable_sampling: the sampler draws from the trainer's own distribution (no truncation, no penalty), so that
        their log-probs can be compared.
    correctable_sampling: its log-probs are at the training temperature, so that their ratio to the trainer's can weigh
        tokens; biased where they are not comparable too.
    """

    loss: LossConfig
    temperature: float
    max_completion_length: int
    per_device: int
    slice_size: int
    keep_dropout: bool = False
    skip_zero_advantage: bool = True
    comparable_sampling: bool = True
    correctable_sampling: bool = True
    correction: CorrectionSettings = CorrectionSettings()


@dataclass(slots=True)
class StepMetrics:
    """Sums of one optimizer step on one rank; merged over ranks once, by rank 0."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a mean."""
        old_total, old_count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + total, old_count + count)

    def add_max(self, name: str, value: float) -> None:
        """Raise a maximum."""
        self.maxima[name] = max(value, self.maxima.get(name, -math.inf))

    def merge(self, other: StepMetrics) -> None:
        """Add another rank's sums."""
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, value in other.maxima.items():
            self.add_max(name, value)

    def values(self) -> dict[str, float]:
        """Means and maxima."""
        means = {name: total / count for name, (total, count) in self.sums.items() if count}
        return {**means, **self.maxima}


class GRPOTrainer(Trainer):
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
        self.collectives = collectives
        self.metrics = metrics
        self.reference = reference
        self.eval_prompts = list(eval_prompts)
        self.checkpoint_extras = checkpoint_extras
        self.report = report
        self.save_total_limit = save_total_limit
        self.on_progress = on_progress
        self.interrupted = False
        self._non_finite_in_a_row = 0
        self._staging: Path | None = None
        self._saved_step = -1
        self._engine: DeepSpeedSteps | None = None
        self._in_step = False
        super().__init__(eval_dataset=self.eval_prompts or None, **trainer_arguments)
        assert self.args.gradient_accumulation_steps == 1, "accumulation happens inside training_step"
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        choose_attention(self.model)
        if reference is not None:
            with reference.active() as module:
                choose_attention(module)

    # --- data -----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """One item per optimizer step, without end; max_steps ends the run."""
        return _Windows(lambda: self.pipeline.windows(self.progress))

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

    def training_step(self, model: nn.Module, inputs: TrainUnit, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one window; gradients are complete when it returns.

        Returns:
            this rank's share of the window loss times the number of ranks (their mean is the loss).
        """
        report = StepMetrics()
        with self.metrics.timer("train"):
            loss = self._backward_window(model, inputs, report)
        self._report(report, float(loss), inputs)
        return loss

    def _backward_window(self, model: nn.Module, unit: TrainUnit, report: StepMetrics) -> Tensor:
        model.train()
        if self._engine is not None:
            self._engine.begin()
        self._prepare_old_logprobs(unit)
        window = unit.window(unit.window_index)
        samples = [unit.samples[i] for i in window]
        weights = dict(zip(window, self._weights(samples), strict=True))
        plan = plan_window(
            window,
            world_size=self.collectives.world_size,
            slice_size=self.settings.slice_size,
            useful=[weights[i] > 0 and self._contributes(unit.samples[i]) for i in window],
        )
        loss = torch.zeros((), device=self.args.device)
        if not plan.num_samples:  # no gradient at all: the optimizer leaves every weight alone
            report.add("health/steps_without_signal", 1.0, 1.0)
            return loss
        slices = plan.slices[self.collectives.rank]
        filler = next(i for parts in plan.slices for part in parts for i in part)
        for number, part in enumerate(slices):
            last = number == len(slices) - 1
            with self._sync_only_last(model, last):
                loss += self._slice(model, unit, part, weights, filler, report, last=last)
        if self._engine is not None:
            self._engine.step()
        return loss

    def _slice(
        self,
        model: nn.Module,
        unit: TrainUnit,
        part: Sequence[int],
        weights: dict[int, float],
        filler: int,
        report: StepMetrics,
        *,
        last: bool,
    ) -> Tensor:
        """One forward/backward pass; a rank with nothing left passes over `filler` with weight 0."""
        samples = [unit.samples[i] for i in part or [filler]]
        batch = collate(samples, [weights[i] for i in part] or [0.0], device=self.args.device)
        self._ensure_ref_logprobs(batch, keep=bool(part))
        policy_logprobs_N = self._logprobs(model, batch)
        first_visit = batch.old_logprobs_N is None
        output = policy_loss(
            policy_logprobs_N,
            config=self.settings.loss,
            advantages_T=spread(batch.advantages_S, batch.tokens.sequence_index),
            mask_T=batch.mask_N & (batch.weights_N > 0) if part else torch.zeros_like(batch.mask_N),
            token_weights_T=batch.weights_N,
            sequence_index_T=batch.tokens.sequence_index,
            num_sequences=batch.tokens.num_sequences,
            old_logprobs_T=batch.old_logprobs_N,
            ref_logprobs_T=batch.ref_logprobs_N,
            correction=self._correction(batch, policy_logprobs_N),
        )
        loss = output.loss * self.collectives.world_size
        if self._engine is not None:
            self._engine.backward(loss, last=last)
        else:
            self.accelerator.backward(loss)
        self.on_progress()
        if part:
            _remember(batch, policy_logprobs_N if first_visit and unit.updates_per_rollout > 1 else None)
            self._observe_slice(report, batch, policy_logprobs_N, output, fresh=unit.position == 0)
        return loss.detach()

    def _correction(self, batch: MicroBatch, policy_logprobs_N: Tensor) -> SamplerCorrection | None:
        """Importance weights of the tokens for the gap between sampler and trainer; None when it is not corrected."""
        settings = self.settings.correction
        if settings.mode == "none" or not self.settings.correctable_sampling:
            return None
        old_logprobs_N = batch.old_logprobs_N if batch.old_logprobs_N is not None else policy_logprobs_N.detach()
        mismatch = sampler_mismatch(old_logprobs_N, batch.sampler_logprobs_N, batch.mask_N)
        return sampler_correction(
            mismatch.eta_T,
            mask_T=batch.mask_N,
            sequence_index_T=batch.tokens.sequence_index,
            num_sequences=batch.tokens.num_sequences,
            mode=settings.mode,
            threshold=settings.threshold,
            lower=settings.lower,
            sequence_ratio=settings.sequence_ratio,
        )

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
        """Whether a sample can move the gradient: with beta 0 an advantage of 0 cannot."""
        return sample.advantage != 0.0 or self.settings.loss.beta > 0 or not self.settings.skip_zero_advantage

    def _logprobs(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Log-prob of each completion token [N] at the sampling temperature, fp32."""
        if is_packed(model):
            logits = packed_logits(model, batch.tokens)
        else:
            logits = padded_logits(model, batch.sequences(), device=self.args.device)
        return selected_logprobs(logits, batch.tokens.target_ids, temperature=self.settings.temperature)

    def score(self, sequences: Sequence[TokenSequence], *, temperature: float | None = None) -> Tensor:
        """The trainer's log-probs [N] of all completion tokens, without gradient; for checks.

        Args:
            sequences: prompts with their completions.
            temperature: None means that of sampling.
        """
        model = self.accelerator.unwrap_model(self.model_wrapped)
        with torch.no_grad():
            if is_packed(model):
                tokens = pack(sequences, device=self.args.device)
                logits, targets = packed_logits(model, tokens), tokens.target_ids
            else:
                logits = padded_logits(model, sequences, device=self.args.device)
                targets = torch.tensor([t for s in sequences for t in s.completion_ids], device=self.args.device)
            return selected_logprobs(logits, targets, temperature=temperature or self.settings.temperature)

    def _prepare_old_logprobs(self, unit: TrainUnit) -> None:
        """Before the first update on a unit: what later windows (or dropout) need from the weights as they are now."""
        if unit.position == 0:
            first = 0 if self.settings.keep_dropout else 1
            self._fill_old_logprobs(unit, range(first, unit.num_windows))

    def _fill_old_logprobs(self, unit: TrainUnit, windows: range) -> None:
        """Log-probs under the weights with which the unit is first consumed, for this rank's samples."""
        model = self.accelerator.unwrap_model(self.model_wrapped)
        model.eval()
        for number in windows:
            for batch, own in self._own_batches(unit, unit.window(number)):
                with torch.no_grad():
                    logprobs_N = self._logprobs(model, batch)
                _remember(batch, logprobs_N if own else None)
                self.on_progress()
        model.train()

    def _own_batches(self, unit: TrainUnit, window: range) -> Iterator[tuple[MicroBatch, bool]]:
        """This rank's part, and with a spread model what keeps it in step with ranks that have more."""
        samples = [unit.samples[i] for i in window]
        useful = [s.num_trained > 0 and self._contributes(s) and s.old_logprobs is None for s in samples]
        plan = plan_window(
            window, world_size=self.collectives.world_size, slice_size=self.settings.slice_size, useful=useful
        )
        filler = [i for parts in plan.slices for part in parts for i in part][:1]
        for part in plan.slices[self.collectives.rank]:
            if part or self._in_step:
                mine = [unit.samples[i] for i in part or filler]
                yield collate(mine, [0.0] * len(mine), device=self.args.device), bool(part)

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
        for name, pair in output.means.items():
            report.add(name, *pair.tolist())
        for name, value in output.maxima.items():
            report.add_max(name, float(value))
        if fresh and self.settings.comparable_sampling:
            gap = (policy_logprobs_N.detach() - batch.sampler_logprobs_N).abs()[batch.mask_N]
            if gap.numel():
                report.add("mismatch/logp_abs_diff", float(gap.double().sum()), gap.numel())
                report.add_max("mismatch/logp_abs_diff_max", float(gap.max()))

    def _report(self, report: StepMetrics, loss: float, unit: TrainUnit) -> None:
        """Merge the ranks' sums on rank 0 and hand them to the metric store."""
        report.add("loss", loss / self.collectives.world_size, 0.0)
        parts = self.collectives.gather(report)
        if parts is None:
            return
        for other in parts[1:] if self.collectives.is_main else []:
            report.merge(other)
        loss_total, _ = report.sums.pop("loss")
        values = {"loss": loss_total, **report.values()}
        window = unit.window(unit.window_index)
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

    # --- evaluation, logs, checkpoints ---------------------------------------------------------------------------

    def _load_best_model(self) -> None:
        """Trainer's; reading a large model is progress of its own kind, as saving it is."""
        with self.metrics.timer("save"):
            super()._load_best_model()

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

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Tied weights are stored once, so their other names are not missing."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(
            SimpleNamespace(missing_keys=missing, unexpected_keys=load_result.unexpected_keys)
        )
        self.model.tie_weights()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Weights that were gathered to be saved are written as if they had never been spread."""
        if state_dict is None or is_peft(self.model):
            super()._save(output_dir, state_dict)
            return
        super()._save(output_dir, as_saved_unspread(self.model, state_dict))
        if (dtype := computing_dtype(self.model)) is not None:  # the config got that of the masters
            self.model.config.dtype = dtype
            self.model.config.save_pretrained(output_dir or self.args.output_dir)

    def _get_output_dir(self, trial: Any) -> str:
        """While a checkpoint is being written, the staging folder."""
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint so that it either exists whole or not at all."""
        step = self.state.global_step
        run_dir = Path(self.args.output_dir)
        final = run_dir / f"checkpoint-{step}"
        if step == self._saved_step:
            return
        self._saved_step = step
        with self.metrics.timer("save"):
            self._write_checkpoint(model, trial, step, run_dir, final)

    def _write_checkpoint(self, model: nn.Module, trial: Any, step: int, run_dir: Path, final: Path) -> None:
        state = self._gather_pipeline_state()
        staging = staging_folder(run_dir, step)
        with self.collectives.together(), disk_full_is_an_error(run_dir):
            if self.collectives.is_main:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
        self._staging = staging
        try:
            with self.collectives.together(), disk_full_is_an_error(run_dir):
                with self._without_best():
                    super()._save_checkpoint(model, trial)
                self.state.best_model_checkpoint = self._best_checkpoint(run_dir)
                if self.collectives.is_main:
                    self._add_to_checkpoint(staging / final.name, state)
            with self.collectives.together(), disk_full_is_an_error(run_dir):
                if self.collectives.is_main:
                    commit_checkpoint(staging / final.name, final, step=step)
                    rotate(run_dir, self.save_total_limit, keep=self.state.best_model_checkpoint)
        finally:
            self._staging = None
            if self.collectives.is_main:
                shutil.rmtree(staging, ignore_errors=True)

    def _add_to_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        """What a checkpoint holds beyond Trainer's files; rank 0 only."""
        self.state.save_to_json(str(folder / "trainer_state.json"))
        write_json(folder / PIPELINE_STATE, state)
        self.checkpoint_extras(folder)
        if self.report is not None:
            self.report.on_save()

    @contextlib.contextmanager
    def _without_best(self) -> Iterator[None]:
        """Keep Trainer from looking for the best checkpoint in the staging folder, behind a barrier of its own.

        A rank whose disk is full would never come to that barrier, and the others would wait there.
        """
        best, self.state.best_global_step = self.state.best_global_step, None
        try:
            yield
        finally:
            self.state.best_global_step = best

    def _best_checkpoint(self, run_dir: Path) -> str | None:
        """Where the best weights that were saved lie, or will lie in a moment."""
        best = self.state.best_global_step
        folder = run_dir / f"checkpoint-{best}"
        saved = best and (best == self.state.global_step or folder.exists())
        return str(folder) if saved else self.state.best_model_checkpoint

    def _gather_pipeline_state(self) -> dict[str, Any]:
        """The pipeline's state with the old and reference log-probs that other ranks hold."""
        unit = self.pipeline.unit
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
        return {
            "pipeline": self.pipeline.state_dict(),
            "metrics": self.metrics.state_dict(),
            "report": self.report.state_dict() if self.report is not None else None,
        }

    def load_pipeline_state(self, checkpoint: Path) -> None:
        """Continue the pipeline and the open log window where the checkpoint left them."""
        state = json.loads((checkpoint / PIPELINE_STATE).read_text(encoding="utf-8"))
        self.pipeline.load_state_dict(state["pipeline"])
        self.metrics.load_state_dict(state["metrics"])
        if self.report is not None and state["report"] is not None:
            self.report.load_state_dict(state["report"])


def _remember(batch: MicroBatch, logprobs_N: Tensor | None) -> None:
    """Keep per-token log-probs with their samples, for later updates on the same unit."""
    if logprobs_N is None:
        return
    for sample, values in zip(batch.samples, split_by_sample(logprobs_N, batch.samples), strict=True):
        sample.old_logprobs = values


class _Windows:
    """What Trainer takes for a data loader; it has no length, so max_steps alone ends the run."""

    def __init__(self, make: Callable[[], Iterator[TrainUnit]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[TrainUnit]:
        return self._make()


class PipelineCallback(TrainerCallback):
    """Books each step with the pipeline and turns a caught signal into a checkpoint and a clean end.

    Args:
        trainer: whose pipeline is booked.
        stop_requested: whether this process was asked to stop.
        epoch: the position in the data set, in epochs.
    """

    def __init__(self, trainer: GRPOTrainer, *, stop_requested: Callable[[], bool], epoch: Callable[[], float]) -> None:
        self.trainer = trainer
        self.stop_requested = stop_requested
        self.epoch = epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After every optimizer step, before Trainer logs, evaluates and saves."""
        trainer = self.trainer
        pipeline = trainer.pipeline
        if trainer.collectives.is_main:
            trainer.metrics.add_many(pipeline.staleness(state.global_step - 1) | pipeline.engine_health())
        pipeline.step_done(state.global_step)
        state.epoch = self.epoch()
        values = trainer.metrics.commit(state.global_step)
        control.should_log |= state.global_step >= state.max_steps
        if trainer.report is not None:
            trainer.report.after_step(state.global_step, values)
        control.should_save |= state.global_step >= state.max_steps
        if trainer.collectives.any(self.stop_requested()) and state.global_step < state.max_steps:
            trainer.interrupted = True
            control.should_save = True
            control.should_training_stop = True
        return control


class EveryFewSteps(TrainerCallback):
    """Does something after every `interval` optimizer steps, on all ranks.

    Args:
        interval: in steps.
        work: called with the number of steps done.
    """

    def __init__(self, interval: int, work: Callable[[int], None]) -> None:
        self.interval = interval
        self.work = work

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the step was booked."""
        if state.global_step % self.interval == 0:
            self.work(state.global_step)
