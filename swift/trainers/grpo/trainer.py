"""GRPO on transformers.Trainer, with its loop, optimizers, schedules and checkpoints, and a training step of our own.

The hooks that the subclass overrides, and why:

    get_train_dataloader   iterates over the rollout pipeline: one item per optimizer step
    get_batch_samples      takes that item
    _prepare_inputs        leaves it as it is
    floating_point_ops     does not count it
    training_step          makes the gradients of a global batch (`swift.trainers.grpo.step`)
    _get_grad_norm         a non-finite gradient skips the update on all ranks alike
    _prepare_for_training  records how the model was wrapped: DeepSpeed updates inside `training_step`, a sharded model
                           (ZeRO-3, FSDP2) needs the same number of forward passes on each rank; shards frozen models
    evaluate               samples and scores held-out prompts
    log                    adds the metrics of the steps to Trainer's logs
    is_as_after_last_step  whether an error leaves a state that can be saved
    state_beside_weights, add_to_checkpoint  the state that a checkpoint of `AtomicTrainer` holds beyond Trainer's files

Trainer's gradient accumulation is always 1: accumulation happens inside `training_step`, so none of Trainer's implicit
factors has to be cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from swift.errors import EngineError, NumericError, RewardError
from swift.models.attention.choice import choose_streams
from swift.models.attention.forked import disable_forking, forks, takes_streams
from swift.models.attention.sequence_parallel import SequenceGroup
from swift.models.checkpoint_tensors import is_peft
from swift.models.reference import FrozenReference
from swift.models.scoring import prepare_scoring
from swift.models.sharded import is_sharded
from swift.observability.metric_names import with_aliases
from swift.plugin.kept import TorchKept
from swift.rollout.pipeline import PipelineState, RolloutPipeline
from swift.rollout.samples import FrozenName, RolloutBatch, TrainSample
from swift.trainers.atomic_trainer import AtomicTrainer
from swift.trainers.checkpoint import loading, read_state, write_state
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.alignment import AlignmentCheck
from swift.trainers.grpo.entropy import EntropyControl, controller_state, restored_controller
from swift.trainers.grpo.logprobs import LogProbs
from swift.trainers.grpo.metrics import StepMetrics, summarise
from swift.trainers.grpo.routes import replay_of
from swift.trainers.grpo.settings import GRPOSettings
from swift.trainers.grpo.step import GlobalBatchStep
from swift.trainers.memory.activations import offloading
from swift.trainers.micro_batches import Limits
from swift.trainers.optimizers.loss_scale import clip_scaled, loss_scale_of
from swift.trainers.parallel.deepspeed import DeepSpeedSteps
from swift.trainers.token_budget import MicroBatchPlanner
from swift.types import Prompt, TrainerProgress

if TYPE_CHECKING:
    from swift.models.reference import ReferenceModel
    from swift.observability.health import Alert
    from swift.observability.metrics import MetricStore
    from swift.trainers.reporting import RunReport

REFERENCE_STATE = "reference.pt"
"""A reference that has moved. Not safetensors: readers of a checkpoint load every such file as weights of the model."""

NON_FINITE_LIMIT = 10
"""Number of updates in a row with a non-finite gradient at which the run ends (exit 6)."""


class TrainerState(msgspec.Struct):
    """State of a checkpoint beside weights, optimizer, schedule and random states."""

    pipeline: PipelineState
    metrics: dict[str, Any]
    entropy: dict[str, Any] | None
    fitting_tokens: int | None
    report: dict[str, Any] | None
    non_finite_in_a_row: int = 0


class GRPOTrainer(AtomicTrainer):
    """Trains a policy on the batches of a rollout pipeline.

    Args:
        settings: of loss and batches.
        pipeline: makes the rollout batches.
        collectives: the data-parallel ranks.
        metrics: collects the metrics of each step (rank 0 logs them).
        beside: frozen models, see `LogProbs`; `settings.loss.beta` > 0 requires the KL reference.
        eval_prompts: held-out prompts, or none.
        report: console output and log files (rank 0 only); flushed to disk before a checkpoint becomes valid.
        on_progress: called after each micro-batch.
        sequence_group: the ranks that share micro-batches with this one.
        offloads_activations: whether these wait on the host for the backward pass.
        stops_at_alert: whether an alert of the report's health rules ends the run, with a checkpoint.
        trainer_arguments: of `AtomicTrainer` and Trainer; gradient_accumulation_steps is 1 and max_steps > 0.
    """

    def __init__(
        self,
        *,
        settings: GRPOSettings,
        pipeline: RolloutPipeline,
        collectives: Collectives,
        metrics: MetricStore,
        beside: Mapping[FrozenName, ReferenceModel] | None = None,
        eval_prompts: Sequence[Prompt] = (),
        report: RunReport | None = None,
        on_progress: Callable[[], None] = lambda: None,
        sequence_group: SequenceGroup | None = None,
        offloads_activations: bool = False,
        stops_at_alert: bool = False,
        **trainer_arguments: Any,
    ) -> None:
        self.pipeline = pipeline
        metrics.waited = lambda: collectives.waited_s
        self.torch_kept = TorchKept()
        self.stops_at_alert = stops_at_alert
        self.alert: Alert | None = None
        beside = beside or {}
        self.reference = beside.get("ref_logprobs")
        self.frozen = list(beside.values())
        """Models beside the policy that are not trained."""
        self.eval_prompts = list(eval_prompts)
        self.report = report
        self.alignment: AlignmentCheck | None = None
        self.answers_of: Callable[[Sequence[Prompt]], list[TrainSample]] | None = None
        """Of distillation: the answers of held-out rows as samples; collective."""
        self._reference_moved = False
        self._non_finite_in_a_row = 0
        self._measured: tuple[StepMetrics, RolloutBatch]  # of the step under way
        super().__init__(
            collectives=collectives,
            metrics=metrics,
            eval_dataset=self.eval_prompts or None,
            **trainer_arguments,
        )
        assert self.args.gradient_accumulation_steps == 1, "accumulation happens inside training_step"
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.rows_because = choose_streams(self.model, unless=self._why_not_forked(settings))
        if collectives.any(not takes_streams(self.model)) and forks(self.model):
            disable_forking(self.model)
            self.rows_because = "another process cannot fork states"
        routes = replay_of(self.model, settings.router_replay, self.args.device)
        self._whole_logits = prepare_scoring(self.model)
        self.planner = MicroBatchPlanner(
            self.model,
            collectives,
            Limits(settings.max_samples, settings.max_tokens),
            per_device=settings.per_device,
            device=self.args.device,
            say=self._print_line,
            group=sequence_group,
        )
        self.logprobs = LogProbs(
            settings=settings,
            collectives=collectives,
            planner=self.planner,
            models=beside,
            unwrapped=self._unwrapped,
            device=self.args.device,
            on_progress=on_progress,
            timer=metrics.timer,
            routes=routes,
            group=sequence_group,
        )
        self.entropy = EntropyControl(self.logprobs, settings.entropy.adaptive)
        self.step = GlobalBatchStep(
            logprobs=self.logprobs,
            entropy=self.entropy,
            accelerator=self.accelerator,
            sequences=pipeline.scheduler.groups_per_batch * pipeline.config.num_generations,
            timer=metrics.timer,
            around_pass=offloading(self.model) if offloads_activations else nullcontext,
            loss_scale=loss_scale_of(self.model),
        )

    def _why_not_forked(self, settings: GRPOSettings) -> str:
        """What in this run keeps completions from continuing from states; "" if nothing does."""
        if (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            return "use_reentrant forgets states"
        if settings.router_replay != "off":
            return "--moe_router_replay replays one pass over a stream"
        plugin = self.accelerator.state.deepspeed_plugin
        cuts = self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage >= 2)
        if cuts and not is_peft(self.model):  # a weight has its gradient when both passes have gone back
            return "forked, the gradients of all layers would be whole at a time"
        return ""

    def attention_lines(self) -> list[str]:
        """A line for the plan where the model keeps its own attention."""
        if self.rows_because is not None:
            return [f"attention: the model's own ({self.rows_because}); prompts are not shared, so this is slower"]
        if forks(self.model):
            return ["attention: the model's own; completions continue from the states that their prompts leave"]
        return []

    def _unwrapped(self) -> nn.Module:
        """The policy without its wrappers for training."""
        if self.model_wrapped is self.model:  # `unwrap_model` tests for DeepSpeed at every call, in milliseconds
            return self.model
        model: nn.Module = self.accelerator.unwrap_model(self.model_wrapped)
        return model

    # --- data -----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """One item per optimizer step, without end; max_steps ends the run."""
        return self.pipeline.steps(self.progress)

    def progress(self) -> TrainerProgress:
        """The `trainer_state` of reward functions."""
        return TrainerProgress(self.state.global_step, self.state.max_steps, float(self.state.epoch or 0.0))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, None]:
        """The rollout batch of one step; its tokens are counted by the normaliser, not by Trainer."""
        self.begin_step()
        with self.saved_if_it_fails():
            return [next(epoch_iterator)], None

    def is_as_after_last_step(self, error: Exception) -> bool:
        """Whether a checkpoint may follow; errors of rollouts and rewards are raised on all ranks alike."""
        alike = isinstance(error, RewardError | EngineError)
        return self.pipeline.can_be_saved and (alike or super().is_as_after_last_step(error))

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Rollout batches are packed and moved micro-batch by micro-batch."""
        return inputs

    def floating_point_ops(self, inputs: Any) -> float:
        """Not counted by Trainer: a rollout batch is not a dict of tensors."""
        return 0.0

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model; from here on, it and the frozen models may be sharded."""
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.step.deepspeed = DeepSpeedSteps(self.model_wrapped) if self.is_deepspeed_enabled else None
        self.step.fsdp = self.is_fsdp_enabled
        for frozen in self.frozen:
            self._whole_logits = frozen.prepare(self.accelerator) or self._whole_logits
        own = [frozen.module for frozen in self.frozen if isinstance(frozen, FrozenReference)]
        self.logprobs.in_step = any(map(is_sharded, [self.model, *own]))
        if self._whole_logits is not None:
            self._print_line(f"log-probs: from whole logits ({self._whole_logits}), which takes more memory")
        return prepared

    # --- one optimizer step -----------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: RolloutBatch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one global batch; see `GlobalBatchStep.run`."""
        self.torch_kept.put_back()
        report = StepMetrics()
        if not self.planner.ready:
            on_host = self.args.optim == "adamw_cpu"
            state = on_host or (self.optimizer is not None and bool(self.optimizer.state))
            self.planner.measure(whole_logits=self._whole_logits is not None, has_state=state)
        if self.alignment is not None and inputs.position == 0 and inputs.arriving is None:
            self.alignment.check(inputs)
        if (record := self.step.record) is not None:
            record.begin(self.state.global_step + 1)
        with self.saved_if_it_fails():
            loss = self.step.run(model, self._unwrapped(), inputs, report, self.state.global_step)
        if inputs.position == 0:
            self.state.num_input_tokens_seen += sum(len(s.prompt_ids) + len(s.token_ids) for s in inputs.samples)
        report.add("loss", loss, 0.0)
        if record is not None:
            record.copy()
        self._measured = report, inputs
        return loss / self.planner.group_size  # Trainer takes the mean over ranks for its summary

    def _print_line(self, line: str) -> None:
        if self.report is not None:
            self.report.progress.line(line)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Trainer's; scaled gradients are clipped where their norm is read."""
        return super()._clip_grad_norm(model) if self.step.loss_scale == 1 else None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """The norm before clipping; a non-finite one drops the gradients, so that no weight changes.

        It is read from the device together with the metrics of the step: the one time that a step waits.

        Raises NumericError after `NON_FINITE_LIMIT` of them in a row.
        """
        norm: Any
        if self.step.deepspeed is not None:  # clipped, checked and applied already, if there was a gradient
            norm = self.step.deepspeed.norm
        elif any(parameter.grad is not None for parameter in model.parameters()):
            norm = super()._get_grad_norm(model, grad_norm) if self.step.loss_scale == 1 else self._unscaled_norm(model)
        else:
            norm = None
        report, batch = self._measured
        if hasattr(norm, "full_tensor"):  # of a sharded model
            norm = norm.full_tensor().to(self.args.device)  # from the host, if its shards are there
        report.add("grad_norm", 0.0 if norm is None else norm, kind="sum")
        report.collect()
        value = report.pop("grad_norm").total
        self.step.entropy.steer(report)
        report.own_s = {phase: seconds for phase, seconds in self.metrics.own_s.items() if phase in self._shared_phases}
        values = summarise(report, batch, self.logprobs.settings, self.collectives, self.planner.group_size)
        self.metrics.add_many(values)
        if self.step.record is not None:
            self.step.record.write(self.state.global_step + 1, batch, {**values, "grad_norm": value})
        if math.isfinite(value):
            if norm is not None:
                self._non_finite_in_a_row = 0
            self.metrics.add("grad_norm", value)
            return value
        if self.step.deepspeed is None:
            model.zero_grad(set_to_none=True)
        self._non_finite_in_a_row += 1
        self.metrics.add("health/nan_skips", 1.0)
        if self._non_finite_in_a_row >= NON_FINITE_LIMIT:
            fix = "lower --learning_rate, or use --torch_dtype float32"
            if self.step.loss_scale != 1:
                fix = "float16 ends at 65504: make rewards smaller (--scale_rewards), or use --torch_dtype bfloat16"
            raise NumericError(
                f"grad_norm: {value}: not finite for {NON_FINITE_LIMIT} updates in a row, the last at step "
                f"{self.state.global_step + 1}; {fix}"
            )
        return value

    @property
    def _shared_phases(self) -> tuple[str, ...]:
        """Phases in which all ranks have the same amount of work, as far as they are known to."""
        share, config = self.pipeline.collector.share, self.pipeline.config
        samples = share is not None and share.count > 1 and not config.dynamic_sample
        return ("train", "ref_logp", "memory", *(["generate"] if samples else []))

    def _unscaled_norm(self, model: nn.Module) -> Tensor:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper
        scale, max_norm = self.step.loss_scale, self.args.max_grad_norm
        return clip_scaled(model.parameters(), optimizer, scale=scale, max_norm=max_norm)

    def move_reference(self, alpha: float) -> None:
        """Mix `alpha` of the policy into the reference, and discard the old reference's log-probs of the rollout batch.

        Collective if the policy is sharded.
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
        self.begin_step()  # the last step is counted and logged
        with self.metrics.timer("eval"), self.saved_if_it_fails():
            if self.step.distillation is not None and self.answers_of is not None:
                metrics = {"loss": self.step.distillation.evaluate(self.answers_of(self.eval_prompts))}
            else:
                metrics = self.pipeline.evaluate(self.eval_prompts, self.progress())
        prefixed = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(prefixed))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, prefixed)
        return prefixed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means since the last log to training logs, and apply health rules; `loss` is exact over a resume."""
        trained, report = "loss" in logs and "learning_rate" in logs, self.report
        if trained:
            logs = {**logs, **self.metrics.flush(), "max_steps": self.state.max_steps}
            logs["num_tokens"] = self.state.num_input_tokens_seen
            if report is not None:
                logs = report.examined(self.state.global_step, logs)
        if report is not None:
            logs = with_aliases(logs, report.metric_names)
        super().log(logs, start_time)
        if report is not None and "train_runtime" not in logs:  # Trainer's closing summary
            report.on_logs(self.state.global_step, self.state.max_steps, logs)
        if trained and self.stops_at_alert:
            self.alert = self.collectives.broadcast(report.last_alert if report is not None else None)
            if self.alert is not None:
                self.control.should_save = self.control.should_training_stop = True

    def add_to_checkpoint(self, folder: Path, state: TrainerState) -> None:
        """Write the state, and flush the report to disk; rank 0 only."""
        write_state(folder, state)
        if self._reference_moved and self.reference is not None and not self.args.save_only_model:
            torch.save(self.reference.state(), folder / REFERENCE_STATE)
        if self.report is not None:
            self.report.on_save()

    def state_beside_weights(self) -> TrainerState:
        """The state of trainer and pipeline, with the log-probs that all ranks keep; collective."""
        batch, controller = self.pipeline.batch, self.entropy.controller
        if batch is not None and not batch.exhausted and batch.updates_per_rollout > 1:
            self.logprobs.share(batch)
        return TrainerState(
            pipeline=self.pipeline.state(),
            metrics=self.metrics.state_dict(),
            entropy=controller_state(controller) if controller is not None else None,
            fitting_tokens=self.planner.fitting_tokens,
            report=self.report.health.state_dict() if self.report is not None else None,
            non_finite_in_a_row=self._non_finite_in_a_row,
        )

    def load_pipeline_state(self, checkpoint: Path) -> None:
        """Restore the pipeline, the reference and the open log interval from a checkpoint."""
        state = read_state(checkpoint, TrainerState)
        self.pipeline.load(state.pipeline)
        self.metrics.load_state_dict(state.metrics)
        self.entropy.controller = restored_controller(self.logprobs.settings.entropy.adaptive, state.entropy)
        self.planner.fitting_tokens = state.fitting_tokens
        self._non_finite_in_a_row = state.non_finite_in_a_row
        if self.reference is not None and (checkpoint / REFERENCE_STATE).exists():
            with loading(checkpoint):
                moved = torch.load(checkpoint / REFERENCE_STATE, map_location="cpu", weights_only=True)
                self.reference.load_state(moved)
            self._reference_moved = True
        if self.report is not None and state.report is not None:
            self.report.health.load_state_dict(state.report)
