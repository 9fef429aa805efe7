"""One attempt of a GRPO run: the trainer with the parts around it, its training, and the summary."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.integrations.liger import apply_liger_kernel

from swift.errors import NumericError, counted
from swift.models.attention.sequence_parallel import SequenceGroup
from swift.models.rates import Rates
from swift.models.reference import FrozenReference
from swift.models.router_loss import router_coefficient
from swift.models.sharded import is_sharding
from swift.observability.health import HealthMonitor
from swift.observability.metrics import MetricStore
from swift.observability.progress import Progress
from swift.observability.pulse import Pulse
from swift.observability.trackers import CompletionTrackers
from swift.rollout.arguments import most_tokens
from swift.rollout.parity import ParityReport
from swift.trainers.checkpoint import last_checkpoint
from swift.trainers.ebft.rewards import attach
from swift.trainers.engines import EngineSetup
from swift.trainers.grpo.arguments import trainer_settings, training_arguments, uncorrected_lines
from swift.trainers.grpo.build import (
    Beside,
    build_alignment,
    build_cycle,
    build_parity,
    build_pipeline,
    build_watchdog,
    build_weight_sync,
    held_out,
)
from swift.trainers.grpo.callbacks import AtTheStart, EveryFewSteps, PipelineCallback
from swift.trainers.grpo.prepare import Parts, plan_lines
from swift.trainers.grpo.record import StepRecord
from swift.trainers.grpo.trainer import GRPOTrainer
from swift.trainers.memory.traced import TracedActivations
from swift.trainers.reporting import RunReport
from swift.trainers.session import SignalTrap, equip
from swift.trainers.supervision.watchdog import WatchdogCallback
from swift.trainers.trl.callbacks import EarlyStop, StopOnSignal

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.trainers.memory.colocate import ColocateCycle
    from swift.trainers.session import OpenRun


PHASES = {"ref_logp": "reference log-probs", "sync": "weight sync", "save": "checkpoint", "eval": "evaluation"}
"""Phases in words."""


class Attempt:
    """Builds the trainer and the parts around it, trains, and ends with a summary or an interruption."""

    def __init__(
        self,
        resolved: Resolved,
        parts: Parts,
        opened: OpenRun,
        model: Any,
        beside: Beside,
        setup: EngineSetup,
        trap: SignalTrap,
    ) -> None:
        self.resolved, self.parts, self.setup, self.trap = resolved, parts, setup, trap
        if parts.args.use_liger_kernel:  # before anything is compared: sampler and trainer, packed and padded rows
            own = [frozen.module for frozen in beside.values() if isinstance(frozen, FrozenReference)]
            for module in (model, *own):
                apply_liger_kernel(module, parts.args.liger_kernels)
        self.folder, self.log = opened.folder, opened.log
        self.metrics = MetricStore()
        self.stop = StopOnSignal(trap, parts.collectives)
        self.report = self._build_report(opened.attempt) if parts.collectives.is_main else None
        self.watchdog = build_watchdog(self)
        self.weight_sync = build_weight_sync(self, model)
        self.cycle: ColocateCycle | None = None
        if setup.placement.mode == "colocate" and setup.engine is not None:
            self.cycle = build_cycle(self, setup.engine)
        self.trainer = self._build_trainer(model, beside)
        if self.cycle is not None:
            modules = [frozen.module for frozen in self.trainer.frozen if isinstance(frozen, FrozenReference)]
            self.cycle.attach(model, lambda: self.trainer.optimizer, beside=modules)
        self.parity = build_parity(self)

    def _build_report(self, number: int) -> RunReport:
        parts, args, folder = self.parts, self.parts.args, self.folder
        progress = Progress(parts.plan.max_steps, start_step=parts.start.step, record=self.log.line)
        trackers = None
        if args.log_completions:
            trackers = CompletionTrackers(args.report_to, folder / "runs", unique_prompts=args.log_unique_prompts)
        return RunReport(
            folder,
            number,
            metrics=self.metrics,
            progress=progress,
            reward_names=parts.reward_names,
            health=HealthMonitor(parts.health_rules, most_tokens=most_tokens(args), stalest=parts.stalest),
            metric_names=args.metric_names,
            trackers=trackers,
            diagnosis=parts.rewards.diagnosis,
            record=args.record_rollouts,
        )

    def _build_trainer(self, model: Any, beside: Beside) -> GRPOTrainer:
        parts, args = self.parts, self.parts.args
        pipeline = build_pipeline(self)
        engine = self.setup.engine
        own = engine.capabilities.logprob_support if engine is not None else None  # None: another rank has the engine
        support = next(known for known in parts.collectives.all_gather(own) if known is not None)
        trainer = GRPOTrainer(
            model=model,
            args=training_arguments(args, self.folder, parts),
            processing_class=parts.template.tokenizer,
            settings=trainer_settings(
                args,
                logprob_support=support,
                given=self.resolved.given,
                router_aux_loss_coef=router_coefficient(args.router_aux_loss_coef, model),
            ),
            pipeline=pipeline,
            collectives=parts.collectives,
            metrics=self.metrics,
            beside=beside,
            eval_prompts=parts.eval_prompts or (),
            run_settings=parts.start.settings,
            report=self.report,
            save_total_limit=args.save_total_limit,
            async_save=args.async_save,
            stochastic_rounding=args.master_weights == "bf16_stochastic",
            rates=Rates.of(args),
            on_progress=self.watchdog.touch,
            sequence_group=SequenceGroup.of_this_rank(args.sequence_parallel_size, args.ddp_timeout),
            offloads_activations=args.activation_offloading,
            stops_at_alert=args.health_action == "stop",
        )
        trainer.step.rollout_only = args.rollout_only
        if args.record_rollouts != "off":
            file = self.report.record if self.report is not None else None
            trainer.step.record = StepRecord(args.record_rollouts, parts.collectives, file)
            if file is not None:
                file.logprob_support = support
                decode = parts.template.decode  # ids below 0 name images
                file.as_text = lambda ids: decode([i for i in ids if i >= 0], skip_special_tokens=False)
        if parts.collectives.is_main and trainer.planner.wants_count:
            trainer.planner.traced = TracedActivations(sys.argv[1:])
        if parts.references is not None:
            attach(self, trainer, model)
        trainer.answers_of = functools.partial(held_out, parts)
        equip(trainer, args, self.folder)
        trainer.add_callback(WatchdogCallback(self.watchdog))
        if is_sharding(trainer.accelerator):
            trainer.add_callback(AtTheStart(self._check_and_begin))
        trainer.add_callback(PipelineCallback(trainer, epoch=self._epoch))
        trainer.add_callback(self.stop)
        if getattr(args, "early_stopping_patience", None):
            trainer.add_callback(EarlyStop(args.early_stopping_patience, args.early_stopping_threshold))
        kind, _, interval = args.parity_check.partition(":")
        if kind == "every":
            trainer.add_callback(EveryFewSteps(int(interval), self._check_parity_again))
        if args.sync_ref_model and args.beta > 0:
            alpha = args.ref_model_mixup_alpha
            trainer.add_callback(EveryFewSteps(args.ref_model_sync_steps, lambda step: trainer.move_reference(alpha)))
        if args.rollout_source == "atropos":
            trainer.alignment = build_alignment(self, trainer)
        if args.kl_in_reward and args.beta > 0:
            pipeline.batches.kl_of = trainer.logprobs.reward_kl
        if trainer.logprobs.frozen:
            pipeline.batches.frozen_pass = trainer.logprobs.score_frozen
        return trainer

    def _epoch(self) -> float:
        """Passes over the data so far, 0 for a stream: counted in steps, with dynamic sampling in groups."""
        plan, step = self.parts.plan, self.trainer.state.global_step
        if plan.num_rows and self.parts.args.dynamic_sample:
            scheduler = self.trainer.pipeline.scheduler
            ended = scheduler.trained + scheduler.excluded + scheduler.dropped + len(scheduler.carried)
            return ended / plan.num_rows
        if plan.steps_per_epoch:
            return step / plan.steps_per_epoch
        if not plan.num_rows:
            return 0.0
        # a rollout batch is longer than an epoch
        return step * plan.rollout_prompts / (plan.updates_per_rollout * plan.num_rows)

    # --- the run ------------------------------------------------------------------------------------------------

    def print_line(self, line: str, *, cut: bool = False) -> None:
        """Print a line that stays on the console, from rank 0; `cut`: to the width of a terminal."""
        if self.report is not None:
            self.report.progress.line(line, cut=cut)

    def _pulse(self) -> contextlib.AbstractContextManager[Any]:
        return Pulse(self.report.progress, self._doing) if self.report is not None else contextlib.nullcontext()

    def _doing(self) -> str:
        """What the step under way does, in words; "" between its phases."""
        phase, (done, passes) = self.watchdog.current, self.trainer.step.passes
        if phase in ("generate", "reward"):
            return self.trainer.pipeline.doing()
        return f"training {done}/{passes} micro-batches" if phase == "train" else PHASES.get(phase, phase)

    def run(self) -> None:
        """Check, train, and end with a summary or an interruption."""
        trainer, report = self.trainer, self.report
        try:
            with report if report is not None else contextlib.nullcontext():
                try:
                    with self.parts.heartbeat.own_errors(), self._pulse():
                        self._check_and_train()
                finally:
                    self.watchdog.stop()
            if report is not None:
                best = trainer.state.best_model_checkpoint
                self.print_line(report.summary(best=Path(best) if best else None, last=last_checkpoint(self.folder)))
        finally:
            trainer.pipeline.close()

    def _check_and_train(self) -> None:
        parts, checkpoint, trainer = self.parts, self.parts.start.checkpoint, self.trainer
        notes = self.cycle.notes if self.cycle is not None else []
        plan = [*self.resolved.preset_lines, *plan_lines(parts)]
        plan += trainer.attention_lines()
        plan += uncorrected_lines(trainer.logprobs.settings)
        for line in [f"run folder: {self.folder}", *parts.lines, *parts.start.notes, *plan, *notes]:
            self.print_line(line)
        if parts.start.step >= parts.plan.max_steps:
            steps = counted(parts.plan.max_steps, "step")
            self.print_line(f"{checkpoint} is the last of {steps}; raise --max_steps to go on")
            return
        sharded = is_sharding(trainer.accelerator)
        if sharded and self.cycle is not None:
            self.cycle.doze()  # while the model comes to the device and is cut
        if not sharded:
            self.watchdog.start()
            self._check_parity()
            self.watchdog.stop()
        self.trap.check("rlhf", parts.collectives, parts.start)
        if checkpoint is not None:
            trainer.load_pipeline_state(checkpoint)
            if "world_size" in (parts.start.changed or ()):
                trainer.planner.fitting_tokens = None  # other shards leave other room
        if not sharded and parts.args.rollout_source == "atropos":
            self._begin_sources()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if (alert := trainer.alert) is not None:
            raise NumericError(
                f"--health_action: stop: rule {alert.rule} at step {alert.step}: {alert.sentence} "
                f"checkpoint-{trainer.state.global_step} is saved; --health_action warn goes on"
            )
        if self.stop.interrupted:
            raise self.trap.interruption("rlhf", self.folder, trainer.state.global_step)

    def _check_and_begin(self) -> None:
        """The steps before training that a sharded model takes later: until then, its weights are on the host."""
        self._check_parity()
        if self.parts.args.rollout_source == "atropos":
            self._begin_sources()

    def _begin_sources(self) -> None:
        with self.parts.collectives.together():
            self.setup.begin()

    def _check_parity(self) -> None:
        """Compare rollout engine and trainer in all stages, on the first prompts; print the result."""
        args = self.parts.args
        if self.cycle is not None:
            self.cycle.rouse()
        resumed = self.parts.start.checkpoint is not None and is_sharding(self.trainer.accelerator)
        if args.adapters or args.quant_method or resumed:  # the engine has read the base model's files
            self.weight_sync.refresh()
        if self.parity is not None:
            self._judge(self.parity.run())
        if self.cycle is not None:
            self.cycle.sleep()

    def _check_parity_again(self, step: int) -> None:
        """The short form of the check, with the current weights; `--parity_check every:N`."""
        parity = self.parity
        assert parity is not None
        self.trainer.pipeline.inspect(step, lambda: self._judge(parity.now()))

    def _judge(self, report: ParityReport) -> None:
        self.print_line(report.line(), cut=True)
        self.metrics.add("mismatch/parity_abs_diff_max", max(stage.gaps.maximum for stage in report.stages))
        self.metrics.add("mismatch/parity_k3", report.stages[0].gaps.whole_k3)  # of the true weights
        if self.parts.args.parity_check != "warn":
            report.require()
        if (error := report.error()) and self.report is not None:
            self.report.progress.warn(error)
