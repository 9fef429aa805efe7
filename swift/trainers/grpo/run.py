"""`swift rlhf --rlhf_type grpo`: puts the parts together, trains, and says how it ended.

The order is that of cost: what can be wrong in the settings, the data and the rewards is found before weights are
loaded, and weights are loaded before the run's folder is made, so a start that fails leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, Interrupted
from swift.rl.declared import parameters_of
from swift.rl.estimators import get_estimator
from swift.startup import collector_resting, defer
from swift.trainers.grpo.arguments import loss_settings, trainer_settings, training_arguments, uncorrected_lines
from swift.types import Prompt

if TYPE_CHECKING:
    import torch

    from swift.arguments import Resolved
    from swift.data import PromptDataset, PromptSource
    from swift.models.template import Template
    from swift.rewards import RewardPipeline
    from swift.rollout.arithmetic import BatchPlan
    from swift.rollout.engines.base import InferenceEngine
    from swift.rollout.parity import ParityCheck, ParityReport
    from swift.rollout.placement import Placement
    from swift.rollout.replay import ReplayBuffer
    from swift.rollout.rollout_function import RolloutFunc
    from swift.rollout.scheduler import RerollConfig
    from swift.rollout.weight_sync.publisher import WeightPublisher
    from swift.trainers.distributed import Collectives
    from swift.trainers.engines import EngineSetup
    from swift.trainers.grpo.trainer import GRPOTrainer
    from swift.trainers.mailbox import StoreMailbox
    from swift.trainers.memory.colocate import ColocateCycle
    from swift.trainers.session import SignalTrap, Start
    from swift.trainers.supervision.heartbeat import RankWatch
    from swift.trainers.supervision.stall import StallWatch


@dataclass(slots=True)
class Parts:
    """What is ready before any weight is loaded."""

    args: Any
    collectives: Collectives
    template: Template
    source: PromptSource
    first_prompts: list[Prompt]
    eval_prompts: PromptDataset | None
    rewards: RewardPipeline
    plan: BatchPlan
    start: Start
    placement: Placement
    prefetch_depth: int
    lines: list[str]
    rollout_func: RolloutFunc | None = None
    rank_watch: RankWatch | None = None


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
            defer("datasets")  # Trainer imports it wherever it is installed, and with it pandas
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


def prepare(args: Any, collectives: Collectives, start: Start, placement: Placement) -> Parts:
    """Everything that needs no weights: template, data, rewards, batch arithmetic."""
    from swift.data import load_prompts, open_prompts
    from swift.models import load_chat
    from swift.rewards import RewardPipeline
    from swift.rewards.models import load_reward_models
    from swift.trainers.engines import require_backend
    from swift.trainers.run_checks import check_run

    template = load_chat(args)
    rewards = RewardPipeline(
        args,
        seed=args.seed,
        max_completion_length=args.max_completion_length,
        decode=lambda ids: template.decode(ids, skip_special_tokens=False),
        tokenizer_path=template.tokenizer.name_or_path,
        reward_models=load_reward_models(args, device=own_device()) if collectives.is_main else None,
    )
    limits = {
        "tokenize": template.encode_prompt,
        "max_prompt_length": max_prompt_length(args),
        "truncation_strategy": args.truncation_strategy,
    }

    def open_source() -> PromptSource:
        return open_prompts(args, split="train", max_steps=args.max_steps, **limits)

    source = open_source()
    looked_at = open_source() if args.streaming else source
    first = first_prompts(looked_at, 64)
    has_eval = bool(args.val_dataset) or args.split_dataset_ratio > 0
    eval_prompts = load_prompts(args, split="val", **limits) if has_eval else None
    plan = plan_run(args, collectives.world_size, source.size)
    lines = [*source.report.lines(), *(eval_prompts.report.lines() if eval_prompts is not None else [])]
    lines = list(dict.fromkeys(lines))  # one mapping line when both data sets have the same columns
    check_run(args, placement.mode, rewards, plan)
    depth = prefetch_depth(args, plan)
    require_backend(args)
    function = find_rollout_func(args, placement)
    return Parts(
        args, collectives, template, source, first, eval_prompts, rewards, plan, start, placement, depth, lines,
        rollout_func=function,
    )  # fmt: skip


def find_rollout_func(args: Any, placement: Placement) -> RolloutFunc | None:
    """The function of `--rollout_func`, if one is given.

    Raises:
        ConfigError: it cannot be found, or ranks that hold parts of one engine would have to call it in step.
    """
    from swift.rollout.rollout_function import load_rollout_func

    if args.rollout_func is None:
        return None
    require_whole_weights(args)
    if placement.mode == "colocate" and placement.tensor_parallel_size > 1:
        raise ConfigError(
            f"--vllm_tensor_parallel_size: {placement.tensor_parallel_size}: in colocate the ranks of an engine sample "
            "in step, and a rollout function does as it likes; use 1, or --vllm_mode dedicated"
        )
    return load_rollout_func(args.rollout_func)


def require_whole_weights(args: Any) -> None:
    """Refuses a rollout function on weights that a DeepSpeed file spreads; presets are told by their names before.

    Raises:
        ConfigError: the trainer's own model samples, and the file's stage is 3.
    """
    from swift.rollout.placement import has_own_engine
    from swift.trainers.parallel.deepspeed import stage_of

    if args.rollout_func is not None and not has_own_engine(args) and stage_of(args) == 3:
        raise ConfigError(
            f"--rollout_func: {args.rollout_func}: each rank calls it with its own prompts, and stage 3 of --deepspeed "
            f"{args.deepspeed} samples on all ranks in step; --use_vllm true, --vllm_mode dedicated, or stage 2"
        )


def prefetch_depth(args: Any, plan: BatchPlan) -> int:
    """How many generation batches may be sampled ahead: `--prefetch_depth` as far as `--max_staleness` allows.

    Raises:
        ConfigError: even without sampling ahead tokens would be older than `--max_staleness`.
    """
    from swift.rollout.arithmetic import MOST_BATCHES_CARRIED, deepest_prefetch, most_stale
    from swift.rollout.placement import has_own_engine

    updates = plan.updates_per_rollout
    interval = args.vllm_sync_interval if has_own_engine(args) else 1
    wanted = args.prefetch_depth if args.async_generate else 0
    if args.dynamic_sample:  # where a round begins in the stream of prompts is known when the one before it has ended
        wanted = min(wanted, 1)
    waits = MOST_BATCHES_CARRIED * updates if args.dynamic_sample else 0
    limit = None if args.max_staleness is None else args.max_staleness - waits
    depth = deepest_prefetch(wanted, updates=updates, interval=interval, max_staleness=limit)
    if depth is None:
        carried = " with the wait of groups that --dynamic_sample carries over" if waits else ""
        raise ConfigError(
            f"--max_staleness: {args.max_staleness}: {updates} optimizer steps per generation batch and "
            f"--vllm_sync_interval {interval} make tokens up to "
            f"{most_stale(0, updates=updates, interval=interval) + waits} steps old without sampling ahead{carried}; "
            "raise it, or lower these"
        )
    if args.max_staleness is not None and args.replay_buffer_size and args.replay_max_age > args.max_staleness:
        raise ConfigError(
            f"--max_staleness: {args.max_staleness}: the replay buffer keeps groups for --replay_max_age "
            f"{args.replay_max_age} optimizer steps; raise it, or lower --replay_max_age"
        )
    return depth


def first_prompts(source: PromptSource, count: int) -> list[Prompt]:
    """The first prompts, for checks: a data set is only looked at, a stream is drawn from."""
    dataset = getattr(source, "dataset", None)
    if dataset is None:
        return [source.next().prompt for _ in range(count)]
    return [dataset[i] for i in range(min(count, len(dataset)))]


def max_prompt_length(args: Any) -> int | None:
    """`--max_length`: the longest prompt in tokens; by default what the context leaves beside the completion.

    Raises:
        ConfigError: the completion alone fills the context.
    """
    from swift.models.policy import context_length
    from swift.trainers.run_checks import prompt_limit

    return prompt_limit(args, context_length(args))


def plan_run(args: Any, world_size: int, num_rows: int | None) -> BatchPlan:
    """The batch arithmetic of the run.

    Raises:
        ConfigError: sizes that do not fit together, or too few rows for one generation batch.
    """
    from swift.rollout.arithmetic import plan_batches

    return plan_batches(
        per_device_train_batch_size=args.per_device_train_batch_size,
        world_size=world_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_generations=args.num_generations,
        steps_per_generation=args.steps_per_generation,
        generation_batch_size=args.generation_batch_size,
        num_iterations=args.num_iterations,
        mini_batch_size=args.mini_batch_size,
        max_tokens_per_micro_batch=args.max_tokens_per_micro_batch,
        num_rows=num_rows,
        num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps,
    )


def batch_line(args: Any, plan: BatchPlan) -> str:
    """The batches of the run in words."""
    from swift.rollout.arithmetic import describe

    return describe(
        plan,
        most_launches=1 + args.max_resample_times if args.dynamic_sample else 1,
        every_row=goes_on_over_epochs(args),
    )


def goes_on_over_epochs(args: Any) -> bool:
    """Whether batches do not end with an epoch: they draw as many rows as it takes, or put displaced ones off."""
    return bool(args.dynamic_sample or args.reroll_start_fraction < 1)


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


def load_models(args: Any) -> tuple[Any, Any]:
    """The policy and, with beta > 0, its reference, on this process's device."""
    from transformers import set_seed
    from transformers.utils import logging

    from swift.models import load_policy, load_reference

    logging.disable_progress_bar()  # ours is the only one
    device = own_device()
    set_seed(args.seed)  # fresh adapter weights depend on the seed only
    policy = load_policy(args, device=device)
    reference = load_reference(args, policy, device=device, moves=args.sync_ref_model) if args.beta > 0 else None
    return policy, reference


def own_device() -> torch.device:
    """The device of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


class _Session:
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
        self.publisher = self._build_publisher(model)
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
            self.publisher.refresh()
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

    def _build_parity(self) -> ParityCheck | None:
        from swift.rollout.parity import ParityCheck

        parts, args, trainer = self.parts, self.parts.args, self.trainer
        if args.parity_check == "off":
            return None
        return ParityCheck(
            self.setup.engine,
            score=trainer.score,
            model=trainer.model,
            publisher=self.publisher,
            prompts=parts.first_prompts,
            sampling=args.sampling_params(),
            ranks=parts.collectives,
            end_token_ids=parts.template.stop_token_ids,
            unscaled=lambda sequences: trainer.score(sequences, temperature=1.0),
            adapter_only=args.vllm_enable_lora,
            around=trainer.pipeline.collector.around,
            seed=args.seed,
        )

    def _build_trainer(self, model: Any, reference: Any) -> GRPOTrainer:
        from transformers import PrinterCallback

        from swift.trainers.grpo.callbacks import EveryFewSteps, PipelineCallback
        from swift.trainers.grpo.reward_kl import RewardKL
        from swift.trainers.grpo.trainer import GRPOTrainer
        from swift.trainers.reporting import ReportCallback
        from swift.trainers.session import finish_own_optimizer, own_optimizer, tensorboard_callback
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
        finish_own_optimizer(args, trainer)
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

    def _build_pipeline(self) -> Any:
        from swift.rollout.collector import RolloutCollector
        from swift.rollout.pipeline import PipelineConfig, RolloutPipeline
        from swift.rollout.scheduler import RolloutScheduler

        parts, args, plan = self.parts, self.parts.args, self.parts.plan
        collector = RolloutCollector(
            engine=self._sampling_engine(),
            sampling=args.sampling_params(),
            seed=args.seed,
            decode=parts.template.decode,
            scorer=parts.rewards,
            collectives=parts.collectives,
            share=self.setup.share,
            around=self._sampling if self.setup.placement.mode == "in_process" else contextlib.nullcontext,
            request_s=self._request_limit(),
            progress=self.stall.touch,
            mailbox=self._mailbox(),
            pulse=self.stall.pulse,
            heard=self.stall.heard,
        )
        self.stall.awaits = collector.awaited
        config = PipelineConfig(
            num_generations=args.num_generations,
            num_generations_eval=args.num_generations_eval,
            generation_batches=plan.generation_batches_per_step,
            num_global_batches=plan.global_batches_per_rollout,
            num_iterations=plan.num_iterations,
            advantage_estimator=args.advantage_estimator,
            estimator_parameters=parameters_of(get_estimator(args.advantage_estimator), args),
            scale_rewards=args.scale_rewards,
            reward_weights=parts.rewards.weights,
            overlong_filter=args.overlong_filter,
            reward_kl=args.beta if args.kl_in_reward else 0.0,
            prefetch_depth=parts.prefetch_depth,
            in_flight_updates=args.in_flight_updates,
            streaming_groups=args.streaming_min_groups if args.streaming_partial_batch else 0,
            dynamic_sample=args.dynamic_sample,
            max_resample_times=args.max_resample_times,
            reroll_fail_reward=args.reroll_fail_reward,
        )
        reroll = self._reroll()
        scheduler = RolloutScheduler(
            parts.source,
            groups_per_batch=plan.rollout_prompts,
            batches_per_epoch=None if goes_on_over_epochs(args) else plan.batches_per_epoch,
            reroll=reroll,
            saves_prompts=bool(parts.prefetch_depth or args.dynamic_sample or reroll),
        )
        report = self.report
        return RolloutPipeline(
            scheduler,
            collector,
            config,
            timer=self.metrics.timer,
            observer=report.on_round if report is not None else (lambda scored: None),
            publisher=self.publisher,
            phase=self.cycle,
            replay=self._replay(),
        )

    def _reroll(self) -> RerollConfig | None:
        """From when on failed prompts are tried again, and how many at a time."""
        from swift.rollout.scheduler import RerollConfig

        args = self.parts.args
        if args.reroll_start_fraction >= 1.0:
            return None
        start = max(1, math.floor(self.parts.plan.max_steps * args.reroll_start_fraction))
        return RerollConfig(start_step=start, max_groups=args.reroll_max_groups)

    def _replay(self) -> ReplayBuffer | None:
        from swift.rollout.replay import ReplayBuffer

        args = self.parts.args
        if not args.replay_buffer_size:
            return None
        return ReplayBuffer(
            args.replay_buffer_size,
            max_age=args.replay_max_age,
            seed=args.seed,
            recompute=args.replay_recompute_logps,
        )

    def _mailbox(self) -> StoreMailbox | None:
        """Where ranks leave messages while they sample."""
        from swift.trainers.mailbox import StoreMailbox

        parts = self.parts
        return StoreMailbox(parts.collectives) if parts.args.dynamic_sample and parts.collectives.active else None

    def _sampling_engine(self) -> InferenceEngine | None:
        """What rounds are sampled with: the engine of this rank, or a function of the user around it."""
        from swift.models.policy import load_config
        from swift.models.source import locate
        from swift.rollout.rollout_function import RolloutFunctionEngine

        parts, args, engine = self.parts, self.parts.args, self.setup.engine
        if parts.rollout_func is None or engine is None:
            return engine
        return RolloutFunctionEngine(
            engine,
            parts.rollout_func,
            name=args.rollout_func,
            args=args,
            tokenizer=parts.template.tokenizer,
            end_token_ids=parts.template.stop_token_ids,
            vocab_size=load_config(locate(args).base, args).get_text_config().vocab_size,
            limit_s=args.rollout_timeout,
        )

    def _request_limit(self) -> float | None:
        """`--rollout_timeout` for an engine that leaves it to its caller.

        Ranks that hold parts of one engine would have to abort a request at the same token, so there it has no bound.
        """
        engine = self.setup.engine
        if engine is None or self.setup.own_limit_s or engine.capabilities.tensor_parallel_size > 1:
            return None
        return float(self.parts.args.rollout_timeout)

    def _build_stall_watch(self, log_file: Path) -> StallWatch:
        """Ends the run when nothing moves in this process."""
        from swift.trainers.supervision.stall import REBUILD_S, REWARD_MARGIN_S, StallWatch

        parts, args, engine, own = self.parts, self.parts.args, self.setup.engine, self.setup.own_limit_s
        ranks = parts.rank_watch
        rewards = args.reward_timeout + REWARD_MARGIN_S
        waits_for_rewards = args.dynamic_sample or args.streaming_partial_batch
        stall = StallWatch(
            args.stall_timeout,
            limits={
                "generate": max(own, rewards) if waits_for_rewards else own,
                "sync": own,
                "rebuild": max(own, REBUILD_S),
                "reward": rewards,
                "save": args.ddp_timeout,
            },
            meters=(lambda: astuple(engine.counters),) if engine is not None else (),
            log_file=log_file,
            rank=parts.collectives.rank,
            others=ranks.states if ranks is not None else dict,
            engines=getattr(engine, "stacks", str),
            farewell=ranks.tell_failure if ranks is not None else lambda line: None,
        )
        if ranks is not None:
            ranks.state, ranks.before_end = stall.state, stall.dump
        self.metrics.around = stall.phase
        parts.collectives.waiting = stall.waiting
        parts.rewards.watch(stall.touch)
        return stall

    def _sampling(self) -> AbstractContextManager[None]:
        """What sampling with the trainer's own weights needs where ZeRO-3 or FSDP2 spread them over ranks."""
        from swift.models.spread_sampling import sampling_from

        gather = self.parts.args.ds3_gather_for_generation
        return sampling_from(self.trainer.model, gather=gather, any_rank=self.parts.collectives.any)

    def _logprob_support(self) -> str:
        """What the engines' log-probs mean; ranks without an engine learn it from those with one."""
        engine = self.setup.engine
        mine = engine.capabilities.logprob_support if engine is not None else None
        return next(one for one in self.parts.collectives.all_gather(mine) if one is not None)

    def _build_publisher(self, model: Any) -> WeightPublisher:
        """Gives the engines the weights of `model`, or its adapter alone."""
        from swift.rollout.weight_sync.policy import LiveWeights, PolicyWeights, adapter_weights
        from swift.rollout.weight_sync.publisher import WeightPublisher

        args = self.parts.args
        # only where sampling and training take turns, and nothing else moves the parameters
        one_memory = self.setup.colocated and not (args.offload_model or args.deepspeed or args.fsdp)
        return WeightPublisher(
            self.setup.engine,
            source=lambda: PolicyWeights(model, move_model_batches=args.move_model_batches),
            live=LiveWeights(model) if one_memory else None,
            adapter=(lambda: adapter_weights(model)) if args.vllm_enable_lora else None,
            interval=args.vllm_sync_interval,
            ranks=self.parts.collectives,
            timer=self.metrics.timer,
            progress=self.stall.touch,
        )

    def _build_cycle(self) -> ColocateCycle | None:
        """What happens around generation where engine and trainer share a device."""
        from swift.trainers.memory.colocate import ColocateCycle

        args = self.parts.args
        if not self.setup.colocated:
            return None
        assert self.setup.engine is not None
        return ColocateCycle(
            self.setup.engine,
            self.publisher,
            sleep_level=self.setup.placement.sleep_level,
            offload_model=args.offload_model,
            offload_optimizer=args.offload_optimizer,
            gc_collect_after_offload=args.gc_collect_after_offload,
            log=self.rank_log.line,
            metrics=self.metrics,
            ranks=self.parts.collectives,
            device=own_device(),
            warn=self.report.progress.warn if self.report is not None else None,
        )

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


def build_engines(args: Any, parts: Parts, model: Any) -> EngineSetup:
    """The engine of this rank, where its placement wants it."""
    from swift.trainers.engines import setup_engines

    def in_trainer() -> InferenceEngine:
        from swift.rollout.engines.transformers import TransformersEngine

        return TransformersEngine(
            model,
            eos_token_ids=parts.template.stop_token_ids,
            tokenizer=parts.template.tokenizer,
            cache_bytes=cache_bytes(own_device()),
        )

    longest = max_prompt_length(args)
    setup = setup_engines(
        args,
        placement=parts.placement,
        collectives=parts.collectives,
        template=parts.template,
        max_model_len=longest + args.max_completion_length if longest is not None else None,
        in_trainer=in_trainer,
    )
    if parts.rollout_func is not None:  # a call may take so long beside what the engine takes
        setup.own_limit_s += args.rollout_timeout
    return setup


def cache_bytes(device: torch.device) -> int:
    """Room for keys and values: a fixed share of the device, so that batch shapes are the same in every run."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 4
    return psutil.virtual_memory().total // 8


def plan_lines(parts: Parts) -> list[str]:
    """The plan in words: devices, mode, batches, steps."""
    from swift.rl.losses import describe as describe_loss
    from swift.rollout.placement import describe as describe_placement
    from swift.trainers.parallel.deepspeed import describe as describe_spreading

    device = own_device()
    world = parts.collectives.world_size
    where = (f"{world} x {device.type}" if world > 1 else str(device)) + describe_spreading(parts.args)
    backend = parts.args.infer_backend
    lines = [
        f"plan: train on {where}; generate with {backend}; {batch_line(parts.args, parts.plan)}",
        f"loss: {describe_loss(loss_settings(parts.args))}",
    ]
    if parts.placement.mode == "in_process":
        return lines
    ahead = f"; {parts.prefetch_depth} generation batches ahead" if parts.prefetch_depth else ""
    return [*lines, describe_placement(parts.placement) + ahead, *parts.placement.notes]


def slow_path_lines(obstacle: str | None) -> list[str]:
    """A remark when the model cannot be packed, whichever engine samples."""
    if obstacle is None:
        return []
    return [f"attention: the model's own ({obstacle}); prompts are not shared, so this is slower"]


__all__ = ["Parts", "plan_run", "prepare", "run", "train"]
