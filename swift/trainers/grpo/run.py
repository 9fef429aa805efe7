"""`swift rlhf --rlhf_type grpo`: puts the parts together, trains, and says how it ended.

The order is that of cost: what can be wrong in the settings, the data and the rewards is found before weights are
loaded, and weights are loaded before the run's folder is made, so a start that fails leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import Interrupted
from swift.startup import collector_resting
from swift.trainers.grpo.arguments import trainer_settings, training_arguments, uncorrected_lines
from swift.trainers.grpo.build import Surroundings, build_engines, load_models
from swift.trainers.grpo.prepare import Parts, plan_lines, prepare, slow_path_lines

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.rollout.parity import ParityReport
    from swift.trainers.engines import EngineSetup
    from swift.trainers.grpo.trainer import GRPOTrainer
    from swift.trainers.session import SignalTrap


def run(resolved: Resolved) -> int:
    """The mode; returns the exit code.

    Raises:
        ConfigError, ResourceError: settings, data, rewards, model or checkpoint cannot be used.
        RewardError: reward functions broke their contract.
        NumericError: sampler and trainer disagree, or gradients stay non-finite.
        Interrupted: a signal came; the checkpoint is saved.
    """
    from swift.trainers.session import (
        SignalTrap,
        checkpoint_settings,
        find_start,
        join_processes,
        require_packages,
    )

    args: Any = resolved.args
    require_packages(args)
    with SignalTrap() as trap:
        with collector_resting():
            from swift.trainers.engines import bind_trainer, find_placement
            from swift.trainers.supervision.heartbeat import RankWatch

            placement = find_placement(args, prefetch_given="prefetch_depth" in resolved.given)
            collectives = join_processes(args.ddp_timeout, always=bool(args.deepspeed or args.fsdp))
            start = find_start(args, checkpoint_settings(resolved.to_json(), collectives))
            parts = prepare(args, collectives, start, placement)
        try:
            if collectives.is_main:
                parts.rewards.start()
                parts.rewards.self_check(parts.first_prompts, max_steps=parts.plan.max_steps)
            trap.check("rlhf", collectives, start)
            bind_trainer(placement, int(os.environ.get("LOCAL_RANK", "0")))
            parts.rank_watch = RankWatch(collectives)
            with parts.rank_watch:
                return train(resolved, parts, trap)
        finally:
            parts.rewards.close()


def train(resolved: Resolved, parts: Parts, trap: SignalTrap) -> int:
    """Load the model, start the engines, train, and end the engines whatever happens."""
    args, collectives, start = parts.args, parts.collectives, parts.start
    with collector_resting():
        model, reference = load_models(args)
        setup = build_engines(args, parts, model)
    try:
        trap.check("rlhf", collectives, start)
        return _train_with(resolved, parts, trap, model, reference, setup)
    finally:
        setup.close()


def _train_with(
    resolved: Resolved, parts: Parts, trap: SignalTrap, model: Any, reference: Any, setup: EngineSetup
) -> int:
    """Open the run's folder, train, and record how it ended."""
    from swift.observability.run_dir import RunDirectory, rank_log_file
    from swift.trainers.checkpoint import clean_staging
    from swift.trainers.session import Outcome

    args, collectives, start = parts.args, parts.collectives, parts.start
    home = RunDirectory(args.output_dir, add_version=args.add_version, resume_run=start.run_dir)
    opened: tuple[str, int] | None = None
    if collectives.is_main:
        home.open(
            argv=sys.argv,
            settings=resolved.to_json(),
            config_file=Path(resolved.config) if resolved.config else None,
            changed=start.changed,
            start_step=start.step,
        )
        clean_staging(home.path)
        parts.rewards.log_to(rank_log_file(home.path, home.attempt, 0).with_name("rewards.log"))
        if parts.eval_prompts is not None and args.split_dataset_ratio > 0:
            parts.eval_prompts.write_jsonl(home.path / "val_dataset.jsonl")
        opened = str(home.path), home.attempt
    folder, attempt = collectives.broadcast(opened)
    logs = rank_log_file(Path(folder), attempt, 0).parent
    setup.keep_logs(logs)
    outcome, session = Outcome(), None
    try:
        with collector_resting():
            session = _Session(resolved, parts, Path(folder), attempt, model, reference, setup, trap)
        session.run()
    except BaseException as error:
        outcome = Outcome.of(error)
        raise
    finally:
        setup.close()
        setup.store_logs(logs)
        if collectives.is_main:
            end_step = max(start.step, session.trainer.state.global_step if session is not None else 0)
            home.finish(end_step=end_step, exit_code=outcome.exit_code, reason=outcome.reason)
    return 0


class _Session(Surroundings):
    """One attempt: the trainer with everything around it, made from prepared parts."""

    def __init__(
        self,
        resolved: Resolved,
        parts: Parts,
        folder: Path,
        attempt: int,
        model: Any,
        reference: Any,
        setup: EngineSetup,
        trap: SignalTrap,
    ) -> None:
        from swift.observability.metrics import MetricStore
        from swift.observability.progress import Progress
        from swift.observability.rank_log import RankLog
        from swift.observability.run_dir import rank_log_file
        from swift.observability.trackers import CompletionTrackers
        from swift.trainers.reporting import RunReport

        self.resolved, self.parts, self.folder, self.trap = resolved, parts, folder, trap
        args, main = parts.args, parts.collectives.is_main
        self.metrics = MetricStore()
        self.rank_log = RankLog(rank_log_file(folder, attempt, parts.collectives.rank))
        self.report: RunReport | None = None
        if main:
            progress = Progress(parts.plan.max_steps, start_step=parts.start.step, record=self.rank_log.line)
            self.report = RunReport(
                folder,
                attempt,
                metrics=self.metrics,
                progress=progress,
                rank_log=self.rank_log,
                reward_names=parts.rewards.names,
                trackers=CompletionTrackers(args.report_to, folder / "runs", unique_prompts=args.log_unique_prompts)
                if args.log_completions
                else None,
                beta=args.beta,
                diagnosis=parts.rewards.diagnosis,
            )
        self.setup = setup
        self.stall = self._build_stall_watch(rank_log_file(folder, attempt, parts.collectives.rank))
        self.weight_sync = self._build_weight_sync(model)
        self.cycle = self._build_cycle()
        self.trainer = self._build_trainer(model, reference)
        if self.cycle is not None:
            beside = [reference.module] if hasattr(reference, "module") else []
            self.cycle.attach(model, lambda: self.trainer.optimizer, beside=beside)
        self.parity = self._build_parity()

    def say(self, line: str) -> None:
        """A line that stays on the console, from rank 0."""
        if self.report is not None:
            self.report.progress.line(line)

    def run(self) -> None:
        """Check, train, and end with a summary or an interruption."""
        parts, checkpoint = self.parts, self.parts.start.checkpoint
        try:
            notes = self.cycle.notes if self.cycle is not None else []
            slow = [*slow_path_lines(self.trainer.packing_obstacle), *uncorrected_lines(self.trainer.settings)]
            about = [*self.resolved.preset_lines, *plan_lines(parts)]
            for line in [*parts.lines, *parts.start.notes, *about, *slow, *notes]:
                self.say(line)
            if parts.start.step >= parts.plan.max_steps:
                self.say(f"{checkpoint} is the last of {parts.plan.max_steps} steps; raise --max_steps to go on")
            else:
                self._train(checkpoint)
            if self.report is not None:
                self.say(self.report.finish(best=self._best(), last=self._last()))
        finally:
            self.stall.stop()
            if self.report is not None:
                self.report.close()
            self.rank_log.close()
            self.trainer.pipeline.close()

    def _train(self, checkpoint: Path | None) -> None:
        self.stall.start()
        self.check_parity()
        self.stall.stop()
        self.trap.check("rlhf", self.parts.collectives, self.parts.start)
        if checkpoint is not None:
            self.trainer.load_pipeline_state(checkpoint)
        self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if self.trainer.interrupted:
            raise self._interrupted()

    def check_parity(self) -> None:
        """Compare sampler and trainer in all stages, on the first prompts; print the figures.

        Raises:
            NumericError: they disagree by more than rounding explains.
            SyncFailed, EngineDead: weights did not reach an engine.
        """
        args = self.parts.args
        if args.adapters:  # the engine read the base alone
            self.weight_sync.refresh()
        if self.parity is not None:
            self._judge(self.parity.run())
        if self.cycle is not None:
            self.cycle.rest()

    def check_parity_again(self, step: int) -> None:
        """The short form of the check, with the weights of now; `--parity_check every:N`."""
        parity = self.parity
        assert parity is not None
        self.trainer.pipeline.inspect(step, lambda: self._judge(parity.now()))

    def _judge(self, report: ParityReport) -> None:
        self.say(report.line())
        self.metrics.add("mismatch/parity_abs_diff_max", max(stage.gaps.maximum for stage in report.stages))
        if report.error() and self.parts.args.parity_check != "warn":
            report.require()
        if (warning := report.error() or report.warning()) and self.report is not None:
            self.report.progress.warn(warning)

    def _build_trainer(self, model: Any, reference: Any) -> GRPOTrainer:
        from transformers import PrinterCallback

        from swift.trainers.grpo.callbacks import EveryFewSteps, PipelineCallback
        from swift.trainers.grpo.reward_kl import RewardKL
        from swift.trainers.grpo.trainer import GRPOTrainer
        from swift.trainers.optimizers.choice import attach_own_optimizer, own_optimizer
        from swift.trainers.reporting import ReportCallback
        from swift.trainers.session import tensorboard_callback
        from swift.trainers.supervision.stall import StallCallback

        parts, args = self.parts, self.parts.args
        arguments = training_arguments(args, self.folder, parts)
        trainer = GRPOTrainer(
            model=model,
            args=arguments,
            optimizer_cls_and_kwargs=own_optimizer(args, arguments),
            processing_class=parts.template.tokenizer,
            settings=trainer_settings(args, logprob_support=self._logprob_support(), given=self.resolved.given),
            pipeline=self._build_pipeline(),
            collectives=parts.collectives,
            metrics=self.metrics,
            reference=reference,
            eval_prompts=parts.eval_prompts or (),
            checkpoint_extras=self._write_extras,
            report=self.report,
            save_total_limit=args.save_total_limit,
            on_progress=self.stall.touch,
        )
        attach_own_optimizer(args, trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(StallCallback(self.stall))
        trainer.add_callback(
            PipelineCallback(trainer, stop_requested=lambda: self.trap.caught is not None, epoch=self._epoch)
        )
        kind, _, interval = args.parity_check.partition(":")
        if kind == "every":
            trainer.add_callback(EveryFewSteps(int(interval), self.check_parity_again))
        if args.sync_ref_model and args.beta > 0:
            alpha = args.ref_model_mixup_alpha
            trainer.add_callback(EveryFewSteps(args.ref_model_sync_steps, lambda step: trainer.move_reference(alpha)))
        if self.report is not None:
            trainer.add_callback(ReportCallback(self.report))
        if (board := tensorboard_callback(args, self.folder)) is not None:
            trainer.add_callback(board)
        if args.kl_in_reward and args.beta > 0:
            trainer.pipeline.batches.kl_of = RewardKL(trainer)
        elif args.beta > 0:
            trainer.pipeline.batches.refer = trainer.refer
        return trainer

    def _logprob_support(self) -> str:
        """What the engines' log-probs mean; ranks without an engine learn it from those with one."""
        engine = self.setup.engine
        mine = engine.capabilities.logprob_support if engine is not None else None
        return next(one for one in self.parts.collectives.all_gather(mine) if one is not None)

    def _epoch(self) -> float:
        """Passes over the data set so far, by optimizer steps, or by launches where a step draws what it needs.

        0 for a stream.
        """
        plan, step = self.parts.plan, self.trainer.state.global_step
        if plan.num_rows and self.parts.args.dynamic_sample:
            scheduler = self.trainer.pipeline.scheduler
            ended = scheduler.trained + scheduler.excluded + scheduler.dropped + len(scheduler.carried)
            return ended / plan.num_rows
        if plan.steps_per_epoch:
            return step / plan.steps_per_epoch
        if not plan.num_rows:
            return 0.0
        return step * plan.rollout_prompts / (plan.updates_per_rollout * plan.num_rows)  # a unit is several epochs

    def _write_extras(self, folder: Path) -> None:
        """What a checkpoint carries beside weights and states: its settings."""
        from swift.trainers.checkpoint import write_json
        from swift.trainers.session import checkpoint_settings

        settings = checkpoint_settings(self.resolved.to_json(), self.parts.collectives)
        write_json(folder / "args.json", settings, indent=1)

    def _last(self) -> Path | None:
        from swift.trainers.checkpoint import list_checkpoints

        checkpoints = list_checkpoints(self.folder)
        return checkpoints[-1] if checkpoints else None

    def _best(self) -> Path | None:
        best = self.trainer.state.best_model_checkpoint
        return Path(best) if best else None

    def _interrupted(self) -> Interrupted:
        from swift.trainers.session import resume_command

        last = self._last()
        return Interrupted(
            f"signal: {self.trap.caught or 'another process'}: stopped at step {self.trainer.state.global_step}, "
            f"{last} is saved; resume: {resume_command('rlhf', last)}"
        )
