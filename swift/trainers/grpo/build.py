"""What surrounds the trainer of a run, from its settings: models, engines, rollouts, weight sync, supervision."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.trainers.grpo.prepare import Parts, goes_on_over_epochs, max_prompt_length, own_device

if TYPE_CHECKING:
    import torch

    from swift.observability.metrics import MetricStore
    from swift.observability.rank_log import RankLog
    from swift.rollout.engines.base import InferenceEngine
    from swift.rollout.parity import ParityCheck
    from swift.rollout.replay import ReplayBuffer
    from swift.rollout.scheduler import RerollConfig
    from swift.rollout.weights.publisher import WeightPublisher
    from swift.trainers.engines import EngineSetup
    from swift.trainers.grpo.trainer import GRPOTrainer
    from swift.trainers.mailbox import StoreMailbox
    from swift.trainers.memory.colocate import ColocateCycle
    from swift.trainers.reporting import RunReport
    from swift.trainers.supervision.stall import StallWatch


class Surroundings:
    """Builds them; a session (`swift.trainers.grpo.run`) holds them in these attributes."""

    parts: Parts
    setup: EngineSetup
    metrics: MetricStore
    rank_log: RankLog
    report: RunReport | None
    stall: StallWatch
    publisher: WeightPublisher
    cycle: ColocateCycle | None
    trainer: GRPOTrainer

    def _build_pipeline(self) -> Any:
        from swift.rl.declared import parameters_of
        from swift.rl.estimators import get_estimator
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
        from swift.models.sharded_sampling import sampling_from

        gather = self.parts.args.ds3_gather_for_generation
        return sampling_from(self.trainer.model, gather=gather, any_rank=self.parts.collectives.any)

    def _build_publisher(self, model: Any) -> WeightPublisher:
        """Gives the engines the weights of `model`, or its adapter alone."""
        from swift.rollout.weights.policy import LiveWeights, PolicyWeights, adapter_weights
        from swift.rollout.weights.publisher import WeightPublisher

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

    def _build_parity(self) -> ParityCheck | None:
        from swift.rollout.parity import ParityCheck

        parts, args, trainer = self.parts, self.parts.args, self.trainer
        if args.parity_check == "off":
            return None
        return ParityCheck(
            self.setup.engine,
            score=trainer.logprobs.score,
            model=trainer.model,
            publisher=self.publisher,
            prompts=parts.first_prompts,
            sampling=args.sampling_params(),
            ranks=parts.collectives,
            end_token_ids=parts.template.stop_token_ids,
            unscaled=lambda sequences: trainer.logprobs.score(sequences, temperature=1.0),
            adapter_only=args.vllm_enable_lora,
            around=trainer.pipeline.collector.around,
            seed=args.seed,
        )


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
