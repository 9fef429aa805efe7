"""The parts around the trainer of a run, from its settings: models, rollouts, weight sync, colocation, watchdog."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from transformers import set_seed
from transformers.utils import logging

from swift.devices import own_device
from swift.errors import ConfigError
from swift.models import load_policy, load_reference, load_teacher
from swift.models.attention.interface import transformers_model
from swift.models.policy import load_config
from swift.models.reference import FrozenReference, ReferenceModel
from swift.models.router_loss import router_coefficient
from swift.models.sharded_sampling import sampling_from
from swift.models.source import locate
from swift.models.vision import vision_of
from swift.rl.declared import parameters_of
from swift.rl.estimators import get_estimator
from swift.rollout.arguments import COMPLETION_SETTINGS, in_use
from swift.rollout.batches import PipelineConfig
from swift.rollout.collector import RolloutCollector
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.mailbox import Mailbox
from swift.rollout.parity import ParityCheck
from swift.rollout.pipeline import RolloutPipeline
from swift.rollout.replay import ReplayBuffer
from swift.rollout.samples import FrozenName, TrainSample
from swift.rollout.scheduler import RerollConfig, RolloutScheduler
from swift.rollout.scores import arrays_of
from swift.rollout.sources.atropos.api import MessageAPI, Registration
from swift.rollout.sources.atropos.groups import GroupReader
from swift.rollout.sources.atropos.source import AtroposSource
from swift.rollout.sources.base import EngineSource, Source
from swift.rollout.sources.function import FunctionSource
from swift.rollout.sources.multi_turn.source import DEFAULT_MAX_TURNS, TrajectorySource
from swift.rollout.sources.multi_turn.trajectory import Limits
from swift.rollout.sources.nemo_gym.gym import NemoGym
from swift.rollout.weights.policy import PolicyWeights, adapter_weights
from swift.rollout.weights.sync import WeightSync
from swift.trainers.engines import cache_room, exact_samples
from swift.trainers.gkd.answers import Answers
from swift.trainers.gkd.source import MixedSource, TaughtSource, TeacherPrompts
from swift.trainers.grpo.alignment import AlignmentCheck, sampled_all
from swift.trainers.grpo.arguments import reference_weight
from swift.trainers.grpo.routes import require_experts
from swift.trainers.images import show_images
from swift.trainers.memory.colocate import ColocateCycle
from swift.trainers.parallel.sequence import require_shareable
from swift.trainers.parallel.sharding import loading_device
from swift.trainers.supervision.watchdog import REBUILD_S, REWARD_MARGIN_S, Watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from swift.models.forward import TokenSequence
    from swift.models.template import Template
    from swift.rollout.sources.atropos.launch import AtroposProcesses
    from swift.trainers.grpo.attempt import Attempt
    from swift.trainers.grpo.prepare import Parts
    from swift.trainers.grpo.trainer import GRPOTrainer
    from swift.types import Prompt


Beside: TypeAlias = Mapping[FrozenName, ReferenceModel]
"""Frozen models beside the policy, by the field of a sample for their log-probs."""


def load_models(args: Any, template: Template) -> tuple[Any, Beside]:
    """The policy, and the frozen models of its run."""
    policy = load_trained(args, template)
    return policy, load_beside(args, policy, len(template.tokenizer))


def load_trained(args: Any, template: Template) -> Any:
    """The policy as its run begins, on `loading_device`."""
    logging.disable_progress_bar()  # swift has its own
    set_seed(args.seed)  # new adapter weights depend on the seed only
    policy = load_policy(args, device=loading_device(args))
    if template.vision is not None:
        template.vision.attach(policy)
        show_images(template.vision, policy, args)
    require_shareable(policy, args)
    router_coefficient(args.router_aux_loss_coef, policy)
    require_experts(policy, args.moe_router_replay)
    return policy


def load_beside(args: Any, policy: Any, num_tokens: int, *, weights: bool = True) -> Beside:
    """The reference, with beta > 0, and the teacher, if any, of a policy, which may be without weights.

    weights: whether there are files of weights, see `load_other`.

    Raises ConfigError: one of them knows fewer tokens than the policy's tokenizer has, `num_tokens`.
    """
    models: dict[FrozenName, ReferenceModel] = {}
    if reference_weight(args) > 0:
        models["ref_logprobs"] = load_reference(args, policy, moves=args.sync_ref_model, weights=weights)
    if args.teaches_here:
        models["teacher_logprobs"] = load_teacher(args, policy, weights=weights)
    samples = getattr(args, "seq_kd", False) and args.teaches_here
    if samples and not isinstance(models["teacher_logprobs"], FrozenReference):
        raise ConfigError(
            "--seq_kd: true: the teacher is the policy without its adapter, which is in use while the policy samples; "
            "give another --teacher_model, or --seq_kd false"
        )
    for name, model in models.items():
        if not isinstance(model, FrozenReference):
            continue
        if (vision := vision_of(policy)) is not None:
            show_images(vision, model.module, args)
        flag = "ref_model" if name == "ref_logprobs" else "teacher_model"
        require_shareable(model.module, args, flag)
        known = transformers_model(model.module).config.get_text_config().vocab_size
        if (given := getattr(args, flag)) and known < num_tokens:
            raise ConfigError(
                f"--{flag}: {given}: knows {known} tokens, and the tokenizer of --model has {num_tokens}; "
                "give a model with the same tokenizer"
            )
    return models


def build_watchdog(run: Attempt) -> Watchdog:
    """The watchdog that ends the run if this process makes no progress."""
    parts, args, engine, own = run.parts, run.parts.args, run.setup.engine, run.setup.own_limit_s
    heartbeat, rewards = parts.heartbeat, args.reward_timeout + REWARD_MARGIN_S
    waits_for_rewards = args.dynamic_sample or args.streaming_partial_batch
    watchdog = Watchdog(
        args.stall_timeout,
        limits={
            "generate": max(own, rewards) if waits_for_rewards else own,
            "sync": own,
            "rebuild": max(own, REBUILD_S),
            "reward": rewards,
            "save": args.ddp_timeout,
        },
        meters=[lambda: astuple(engine.counters)] if engine is not None else [],
        log_file=run.log.path,
        rank=parts.collectives.rank,
        remarks=[getattr(engine, "stacks", str), heartbeat.standing_still],
        farewell=heartbeat.tell_failure,
    )
    heartbeat.state, heartbeat.before_end = watchdog.state, watchdog.dump
    run.metrics.around = watchdog.phase
    parts.collectives.waiting = watchdog.waiting
    parts.rewards.watch(watchdog.touch)
    return watchdog


def build_weight_sync(run: Attempt, model: Any) -> WeightSync:
    """The weight sync that sends the weights of `model`, or only its adapter, to the engines."""
    args = run.parts.args
    # the engine may read the trainer's parameters only if the two take turns and nothing else moves the parameters
    one_memory = run.setup.placement.mode == "colocate" and not (args.offload_model or args.deepspeed or args.fsdp)
    return WeightSync(
        run.setup.engine,
        source=lambda: PolicyWeights(model, move_model_batches=args.move_model_batches),
        parameters=(lambda: PolicyWeights(model).parameters()) if one_memory else None,
        adapter=(lambda: adapter_weights(model)) if args.vllm_enable_lora else None,
        interval=args.vllm_sync_interval,
        ranks=run.parts.collectives,
        timer=run.metrics.timer,
        progress=run.watchdog.touch,
    )


def build_cycle(run: Attempt, engine: InferenceEngine) -> ColocateCycle:
    """Offloading, sleep and wake around generation, where engine and trainer share a device."""
    args = run.parts.args
    return ColocateCycle(
        engine,
        run.weight_sync,
        sleep_level=run.setup.placement.sleep_level,
        offload_model=args.offload_model,
        offload_optimizer=args.offload_optimizer,
        gc_collect_after_offload=args.gc_collect_after_offload,
        limit_s=run.setup.limit_s,
        log=run.log.line,
        metrics=run.metrics,
        ranks=run.parts.collectives,
        device=own_device(),
        warn=run.report.progress.warn if run.report is not None else None,
    )


def build_pipeline(run: Attempt) -> RolloutPipeline:
    """The pipeline that makes rollout batches."""
    parts, setup, args, plan, ranks = run.parts, run.setup, run.parts.args, run.parts.plan, run.parts.collectives

    def sampling() -> AbstractContextManager[None]:
        """Around sampling with the trainer's own weights, which ZeRO-3 or FSDP2 may have sharded."""
        return sampling_from(run.trainer.model, gather=args.ds3_gather_for_generation, any_rank=ranks.any)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        """Around sampling of every rank."""
        with contextlib.ExitStack() as stack:
            if setup.placement.mode == "in_process":
                stack.enter_context(sampling())
            if (teacher := _sampling_teacher(run)) is not None:
                stack.enter_context(sampling_from(teacher, gather=True, any_rank=ranks.any))
            yield

    limit_s, engine = float(args.rollout_timeout), setup.engine
    apart = setup.placement.mode in ("dedicated", "server")
    if engine is not None and not apart and engine.capabilities.tensor_parallel_size > 1:
        limit_s = math.inf  # the ranks that hold parts of the engine would have to abort a request at the same token
    collector = RolloutCollector(
        source=_source(run),
        sampling=replace(args.sampling_params(), exact=exact_samples(args.deterministic_rollout, setup)),
        seed=args.seed,
        decode=parts.template.decode,
        scorer=parts.rewards,
        collectives=ranks,
        share=setup.share,
        around=around,
        progress=run.watchdog.touch,
        mailbox=Mailbox() if args.dynamic_sample and ranks.active else None,
        max_new_tokens=parts.references.max_new_tokens if parts.references is not None else None,
        limit_s=limit_s,
    )
    config = PipelineConfig(
        num_generations=args.num_generations,
        num_generations_eval=args.num_generations_eval,
        generation_batches=plan.generation_batches_per_step,
        num_global_batches=plan.global_batches_per_rollout,
        num_iterations=plan.num_iterations,
        advantage_estimator=args.advantage_estimator,
        estimator_parameters=parameters_of(get_estimator(args.advantage_estimator), args),
        scale_rewards=args.scale_rewards,
        reward_weights=parts.reward_weights,
        overlong_filter=args.overlong_filter,
        reward_kl=args.beta if args.kl_in_reward else 0.0,
        prefetch_depth=parts.prefetch_depth,
        in_flight_updates=args.in_flight_updates,
        streaming_groups=args.streaming_min_groups if args.streaming_partial_batch else 0,
        dynamic_sample=args.dynamic_sample,
        max_resample_times=args.max_resample_times,
        reroll_fail_reward=args.reroll_fail_reward,
        max_excluded_frac=args.max_excluded_frac,
    )
    reroll = replay = None
    if args.reroll_start_fraction < 1:
        first = max(1, math.floor(plan.max_steps * args.reroll_start_fraction))
        reroll = RerollConfig(start_step=first, max_groups=args.reroll_max_groups)
    if args.replay_buffer_size:
        replay = ReplayBuffer(
            args.replay_buffer_size,
            max_age=args.replay_max_age,
            seed=args.seed,
            recompute=args.replay_recompute_logps,
        )
    scheduler = RolloutScheduler(
        parts.source,
        groups_per_batch=plan.rollout_prompts,
        # with dynamic sampling and re-rolls, batches do not end with an epoch
        batches_per_epoch=None if args.dynamic_sample or reroll else plan.batches_per_epoch,
        reroll=reroll,
        saves_prompts=bool(parts.prefetch_depth or args.dynamic_sample or reroll),
    )
    return RolloutPipeline(
        scheduler,
        collector,
        config,
        timer=run.metrics.timer,
        observer=run.report.on_round if run.report is not None else (lambda scored: None),
        weight_sync=run.weight_sync,
        phase=run.cycle,
        replay=replay,
    )


def _sampling_teacher(run: Attempt) -> Any:
    """The teacher that samples answers in this process, or None."""
    if not getattr(run.parts.args, "seq_kd", False) or not run.parts.args.teaches_here:
        return None
    teacher = run.trainer.logprobs.models["teacher_logprobs"]
    assert isinstance(teacher, FrozenReference), "refused when it was loaded"
    return teacher.module


def _source(run: Attempt) -> Source | None:
    """The source of completions of this rank; with distillation, some are given."""
    source, parts = _samples(run), run.parts
    if source is None or not parts.args.has_teacher:
        return source
    if parts.answers is not None and parts.args.lmbda < 1 and not parts.args.replay_from:
        source = _mixed(run, source, parts.answers)
    return TaughtSource(source, TeacherPrompts(parts.template), parts.teacher)


def _mixed(run: Attempt, source: Source, answers: Answers) -> Source:
    """A source whose answers are partly given, by the data or the teacher."""
    args, server = run.parts.args, run.parts.teacher
    if not args.seq_kd:
        return MixedSource(source, args.lmbda, answers)
    if server is not None:
        return MixedSource(source, args.lmbda, answers, server.generate)

    @functools.cache
    def teacher() -> InferenceEngine:
        return TransformersEngine(
            _sampling_teacher(run),
            eos_token_ids=run.parts.template.stop_token_ids,
            tokenizer=run.parts.template.tokenizer,
            cache_bytes=cache_room(own_device()),
        )

    return MixedSource(
        source, args.lmbda, answers, lambda request: teacher().generate(request), lambda: teacher().free()
    )


def held_out(parts: Parts, prompts: Sequence[Prompt]) -> list[TrainSample]:
    """The answers of held-out rows as samples of a distillation, with the scores of a teacher behind a server."""
    assert parts.answers is not None
    taught, samples = TeacherPrompts(parts.template), [parts.answers.sample(prompt) for prompt in prompts]
    for sample, prompt in zip(samples, prompts, strict=True):
        if (ids := taught.of(prompt)) is not None:
            sample.teacher_prompt_ids = np.asarray(ids, dtype=np.int32)
    if parts.teacher is None:
        return samples
    pairs: list[Any] = [
        (s.prompt_ids if s.teacher_prompt_ids is None else s.teacher_prompt_ids, s.token_ids) for s in samples
    ]
    with parts.collectives.together():
        scores = parts.teacher.score_all(pairs) if parts.collectives.is_main else []
    for sample, scored in zip(samples, parts.collectives.broadcast(scores), strict=True):
        sample.teacher_ids, sample.teacher_top, _ = arrays_of(scored)
    return samples


def _samples(run: Attempt) -> Source | None:
    """The source of completions of this rank: its engine, or an environment or function of the user that uses it."""
    parts, args, engine = run.parts, run.parts.args, run.setup.engine
    if engine is None:
        return None
    if run.setup.sources is not None:
        return _atropos_source(run, engine, run.setup.sources)
    if parts.play is not None:
        limits = Limits(
            max_turns=args.max_turns or DEFAULT_MAX_TURNS,
            scope=args.completion_length_limit_scope,
            max_model_len=engine.capabilities.max_model_len,
            on_prefix_break=args.on_prefix_break,
            last_round=args.loss_scale == "last_round",
        )
        if isinstance(parts.play, NemoGym):
            parts.play.attach(engine, _vocab_size(args))
        name = next(iter(in_use(args, COMPLETION_SETTINGS)), "rows")
        return TrajectorySource(engine, parts.template, limits, parts.play, name, args.rollout_timeout)
    if parts.rollout_func is None:
        return EngineSource(engine)
    return FunctionSource(
        engine,
        parts.rollout_func,
        name=args.rollout_func,
        args=args,
        tokenizer=parts.template.tokenizer,
        end_token_ids=tuple(parts.template.stop_token_ids),
        vocab_size=_vocab_size(args),
        limit_s=args.rollout_timeout,
    )


def _save_steps(args: Any, max_steps: int) -> int:
    """Number of optimizer steps between two checkpoints."""
    return math.ceil(args.save_steps * max_steps) if args.save_steps < 1 else int(args.save_steps)


def _vocab_size(args: Any) -> int:
    return int(load_config(locate(args).base, args).get_text_config().vocab_size)


def _atropos_source(run: Attempt, engine: InferenceEngine, sources: AtroposProcesses) -> Source:
    """Atropos environments; sets `setup.begin`, which registers at their message API and starts those of the run."""
    assert isinstance(engine, EnginePool), "the policy server is behind a pool"
    parts, args, plan = run.parts, run.parts.args, run.parts.plan
    longest, updates = engine.capabilities.max_model_len + 1, plan.updates_per_rollout
    api = MessageAPI(
        sources.api_url,
        Registration(
            batch_size=plan.rollout_prompts * args.num_generations,
            max_token_len=longest,
            starting_step=parts.start.step // updates,
            num_steps=math.ceil(plan.max_steps / updates),
            checkpoint_dir=str(run.folder),
            save_checkpoint_interval=max(1, _save_steps(args, plan.max_steps) // updates),
        ),
        group_size=args.num_generations,
        timeout_s=args.atropos_timeout,
    )
    reader = GroupReader(
        group_size=args.num_generations,
        vocab_size=_vocab_size(args),
        max_token_len=longest,
        temperature=args.temperature,
        require_logprobs=args.atropos_require_logprobs,
        use_advantages=args.use_env_advantages,
        end_token_ids=frozenset(parts.template.stop_token_ids),
        decode=parts.template.decode,
    )

    def begin() -> None:
        api.open()
        sources.start_environments()

    run.setup.begin = begin
    behind = args.max_staleness
    return AtroposSource(
        engine,
        api,
        reader,
        sources.processes.check,
        versions=engine.versions_of,
        hold_back=engine.hold_back,
        max_batches=None if behind is None else behind // updates,
    )


def build_parity(run: Attempt) -> ParityCheck | None:
    """The parity check of rollout engine and trainer; None if it is off."""
    parts, args, trainer = run.parts, run.parts.args, run.trainer
    if args.parity_check == "off":
        return None
    return ParityCheck(
        run.setup.engine,
        score=lambda sequences, temperature: trainer.logprobs.score(sequences, temperature=temperature),
        model=trainer.model,
        weight_sync=run.weight_sync,
        prompts=parts.first_prompts,
        sampling=args.sampling_params(),
        ranks=parts.collectives,
        end_token_ids=parts.template.stop_token_ids,
        adapter_only=args.vllm_enable_lora,
        around=trainer.pipeline.collector.around,
        seed=args.seed,
    )


def build_alignment(run: Attempt, trainer: GRPOTrainer) -> AlignmentCheck:
    """The comparison of log-probs that environments report with the trainer's."""
    sync = run.weight_sync

    def is_fresh(sample: TrainSample) -> bool:
        """At the start all weights are the same; later the server must report the version that sampled it."""
        step = trainer.state.global_step
        at_start = step == run.parts.start.step == 0
        return at_start or sampled_all(sample, lambda version: sync.step_of(version) == step)

    def score(sequences: Sequence[TokenSequence], temperature: float) -> Tensor:
        """Without dropout, like the sampler."""
        trainer.model.eval()
        scored = trainer.logprobs.score(sequences, temperature=temperature)
        trainer.model.train()
        return scored

    return AlignmentCheck(
        score=score,
        temperature=run.parts.args.temperature,
        is_fresh=is_fresh,
        add=run.metrics.add,
    )
