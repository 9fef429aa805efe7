"""Everything of a run that needs no weights: template, data, rewards, batch arithmetic, and the lines of its plan."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift.devices import own_device
from swift.errors import ConfigError, counted, join_problems
from swift.trainers.grpo.arguments import distillation_settings, loss_settings, max_prompt_length
from swift.types import Prompt

if TYPE_CHECKING:
    from swift.data.prompts import PromptDataset, Tokenizer
    from swift.data.source import PromptSource
    from swift.models.template import Template
    from swift.observability.health_rules import Rule
    from swift.rewards.models import RewardModels
    from swift.rewards.pipeline import RewardPipeline
    from swift.rollout.arithmetic import BatchPlan
    from swift.rollout.placement import Placement
    from swift.rollout.sources.function import RolloutFunc
    from swift.rollout.sources.multi_turn.source import Play
    from swift.rollout.sources.multi_turn.tools import Toolbox
    from swift.trainers.distributed import Collectives
    from swift.trainers.ebft.references import References
    from swift.trainers.gkd.answers import Answers
    from swift.trainers.gkd.teacher_actors import TeacherActors
    from swift.trainers.gkd.teacher_server import TeacherServer
    from swift.trainers.session import Start
    from swift.trainers.supervision.heartbeat import Heartbeat


CHECKED_ROWS = 64
"""Number of first prompts that checks use."""

EVALUATED = ("reward", "reward_std", "frac_reward_zero_std")
FAMILIES = ("completions/", "health/", "time/reward/", "ebft/")
"""Metrics of evaluations, by name and by prefix."""


@dataclass(slots=True)
class Parts:
    """What is ready before any weight is loaded.

    reward_names, reward_weights: of the columns of the scores. With the reward from features of EBFT, the others are
    only logged. stalest: maximum age of a token, in optimizer steps. references: of EBFT, else None. answers: of
    distillation, else None. teacher: one behind a server or in actors.
    """

    args: Any
    collectives: Collectives
    template: Template
    source: PromptSource
    first_prompts: list[Prompt]
    eval_prompts: PromptDataset | None
    rewards: RewardPipeline
    reward_names: list[str]
    reward_weights: list[float]
    plan: BatchPlan
    start: Start
    placement: Placement
    prefetch_depth: int
    stalest: float
    health_rules: dict[str, Rule]
    lines: list[str]
    rollout_func: RolloutFunc | None
    play: Play | None
    heartbeat: Heartbeat
    references: References | None = None
    answers: Answers | None = None
    teacher: TeacherServer | TeacherActors | None = None


def prepare(
    args: Any,
    collectives: Collectives,
    start: Start,
    placement: Placement,
    *,
    world_size: int | None = None,
) -> Parts:
    """Template, data, rewards and batch arithmetic of a run, with all checks that need no weights.

    A dry run plans for `world_size` processes without starting them.
    """
    from swift.data.prompts import Tokenizer
    from swift.models import load_chat
    from swift.models.tokenizer import require_same_tokens
    from swift.observability.health_rules import load_rules
    from swift.rewards import models
    from swift.rewards.pipeline import RewardPipeline
    from swift.rollout.arguments import COMPLETION_SETTINGS, in_use
    from swift.rollout.arithmetic import plan_batches
    from swift.rollout.sources.function import load_rollout_func
    from swift.rollout.sources.multi_turn.tools import open_toolbox
    from swift.trainers.engines import require_backend
    from swift.trainers.supervision.heartbeat import Heartbeat

    template = load_chat(args)
    if args.teacher_model not in (None, args.model):
        require_same_tokens(args.teacher_model, template.tokenizer, args, flag="--teacher_model")
    reward_models = models.open_reward_models(args) if collectives.is_main else None
    if template.vision is not None:
        _check_vision(args, template.vision.model_type, placement, reward_models)
    rewards = RewardPipeline(
        args,
        seed=args.seed,
        max_completion_length=args.max_completion_length,
        decode=lambda ids: template.decode(ids, skip_special_tokens=False),
        tokenizer_path=template.tokenizer.name_or_path,
        reward_models=reward_models,
    )
    toolbox = None
    if args.rollout_tools:
        toolbox = open_toolbox(args.rollout_tools, args.tool_parser, template, args.reward_timeout)
    encode = template.encode_prompt if toolbox is None else toolbox.encode
    sees = template.vision is not None
    samples = not hasattr(args, "lmbda") or bool(args.lmbda or args.seq_kd)
    tokenizer = Tokenizer(encode, max_prompt_length(args) if samples else None, args.truncation_strategy, sees)
    references, reward_names, reward_weights = None, rewards.names, rewards.weights
    if hasattr(args, "ebft_mode"):
        from swift.trainers.ebft.references import References, ReferenceTokenizer

        multiplier = args.ebft_gt_length_multiplier if args.ebft_adaptive_max_tokens else None
        references = References(template, args.max_completion_length, multiplier)
        tokenizer = ReferenceTokenizer(encode, tokenizer.limit, references=references)
        reward_names, reward_weights = [*rewards.names, "energy"], [*(0.0 for _ in rewards.names), 1.0]
    answers, val_tokenizer = None, tokenizer
    if hasattr(args, "lmbda"):
        tokenizer, val_tokenizer, answers = _with_answers(args, tokenizer, template)
    source, first, eval_prompts = _open_data(args, template, tokenizer, val_tokenizer)
    if args.has_teacher:
        _check_teacher_prompts(template, first)
    lines = [*source.report.lines(), *(eval_prompts.report.lines() if eval_prompts is not None else [])]
    lines = list(dict.fromkeys(lines))  # one mapping line if both data sets have the same columns
    processes = world_size or collectives.world_size
    lines += _sharing_lines(processes, start.batch_processes)
    names = inspect.signature(plan_batches).parameters.keys() - {"world_size", "num_rows"}
    plan = plan_batches(
        **{name: getattr(args, name) for name in names},
        world_size=start.batch_processes,
        num_rows=source.size,
    )
    if args.dynamic_sample or args.streaming_partial_batch:
        _check_scoring_by_group(args, rewards, placement.mode, plan)
    if references is not None and plan.updates_per_rollout > 1:
        raise ConfigError(
            f"--steps_per_generation: {plan.updates_per_rollout} optimizer steps per generation batch: EBFT has one "
            "update of each; leave --steps_per_generation and --generation_batch_size out"
        )
    depth, stalest = _prefetch_depth(args, plan)
    if args.vllm_enable_lora and args.use_vllm:
        _check_sent_adapter(args)
    require_backend(args)
    lines += _route_lines(args, placement, plan)
    recorded = bool(args.replay_from)  # rollouts are whole: nobody plays or calls a function
    play = None if recorded else _play_of(args, references, toolbox, rewards.names, template.tokenizer)
    makers = in_use(args, COMPLETION_SETTINGS) or (["--dataset: remaining_turns"] if play is not None else [])
    if makers:
        _check_lockstep(args, placement, makers[0])
    if eval_prompts is not None and args.eval_strategy != "no" and play is None and args.rollout_func is None:
        _check_best_metric(args.metric_for_best_model, rewards, answers)
    return Parts(
        args, collectives, template, source, first, eval_prompts, rewards, reward_names, reward_weights, plan, start,
        placement, depth, stalest, load_rules(args.health_rules), lines,
        rollout_func=load_rollout_func(args.rollout_func) if args.rollout_func and not recorded else None,
        play=play,
        heartbeat=Heartbeat(collectives),
        references=references,
        answers=answers,
        teacher=_teacher_of(args, placement, processes),
    )  # fmt: skip


def _sharing_lines(processes: int, of_batch: int) -> list[str]:
    """A line where an elastic run has other processes than its batch sizes count."""
    return [f"elastic: {counted(processes, 'process')} share the batches of {of_batch}"] * (processes != of_batch)


def _check_teacher_prompts(template: Template, prompts: list[Prompt]) -> None:
    """Raises ConfigError: the column `teacher_prompt` of the first rows cannot be used."""
    from swift.trainers.gkd.source import TeacherPrompts

    taught = TeacherPrompts(template)
    for prompt in prompts:
        taught.of(prompt)


def _teacher_of(args: Any, placement: Placement, world_size: int) -> TeacherServer | TeacherActors | None:
    """A teacher behind a server or in actors; for sampled tokens alone its likeliest one is enough."""
    from swift.trainers.gkd.teacher_actors import TeacherActors
    from swift.trainers.gkd.teacher_server import TeacherServer

    top_k = getattr(args, "gkd_logits_topk", None) or 1
    if args.teacher_model and args.teacher_device:
        if world_size > 1 and placement.mode in ("in_process", "colocate"):
            raise ConfigError(
                f"--teacher_device: {' '.join(args.teacher_device)}: each of {counted(world_size, 'process')} samples, "
                "and one drives the actors; --vllm_mode dedicated or server, or --teacher_model_server"
            )
        return TeacherActors(args, top_k=top_k)
    if not args.teacher_model_server:
        return None
    key = args.vllm_server_api_key
    return TeacherServer(args.teacher_model_server, top_k=top_k, timeout_s=args.vllm_server_timeout, api_key=key)


def _with_answers(args: Any, prompts: Tokenizer, template: Template) -> tuple[Tokenizer, Tokenizer, Answers]:
    """The tokenizers of training and evaluation rows of a distillation, and their answers."""
    from swift.models.policy import context_length
    from swift.trainers.gkd.answers import Answers, AnswerTokenizer

    answers = Answers(template)
    whole = args.max_length or context_length(args)
    taught = AnswerTokenizer(prompts.tokenize, prompts.limit, "delete", prompts.sees, answers=answers, whole=whole)
    return (taught if args.needs_answers else prompts), taught, answers


def _check_vision(args: Any, model_type: str, placement: Placement, reward_models: RewardModels | None) -> None:
    """Raises ConfigError: what does not work yet with a model that is loaded with its vision tower, one line each."""
    from swift.rollout.arguments import in_use
    from swift.rollout.engines.images import require_images
    from swift.trainers.images import vision_problems

    makers = in_use(args, ("rollout_source", "rollout_func"))
    problems = [f"{name}: makes completions of texts only; leave it out" for name in makers]
    join_problems([*problems, *vision_problems(args)])
    if placement.mode not in ("in_process", "server"):
        require_images(args.infer_backend, model_type)
    if reward_models is not None:
        join_problems(reward_models.blind())


def _open_data(
    args: Any, template: Template, tokenizer: Tokenizer, val_tokenizer: Tokenizer
) -> tuple[PromptSource, list[Prompt], PromptDataset | None]:
    """The training prompts, the first of them for checks, and the evaluation prompts, if any."""
    from swift.data.prompts import load_prompts
    from swift.data.source import PlaceholderPrompts, open_prompts

    source: PromptSource
    checked: PromptSource
    if args.rollout_source == "atropos":
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        prompt = Prompt("atropos", messages, tokenizer.cut(template.encode_prompt(messages)))
        source = checked = PlaceholderPrompts(prompt)
    else:
        source = open_prompts(args, tokenizer)
        checked = open_prompts(args, tokenizer) if args.streaming else source  # drawing from a stream consumes it
    dataset = getattr(checked, "dataset", None)
    if dataset is None:
        first = [checked.next() for _ in range(CHECKED_ROWS)]
    else:
        first = [dataset[i] for i in range(min(CHECKED_ROWS, len(dataset)))]
    has_eval = bool(args.val_dataset) or args.split_dataset_ratio > 0
    return source, first, load_prompts(args, val_tokenizer, "val") if has_eval else None


def _play_of(
    args: Any, references: References | None, toolbox: Toolbox | None, reward_names: list[str], tokenizer: Any
) -> Play | None:
    """The code that makes completions of several turns, or None: further turns of EBFT's rows, tools, environments."""
    if references is not None:
        from swift.rollout.arguments import COMPLETION_SETTINGS, in_use
        from swift.trainers.ebft import turns

        references.settle()
        if references.conversations:
            if makers := in_use(args, COMPLETION_SETTINGS):
                raise ConfigError(
                    f"{makers[0]}: makes the completions, and rows have {turns.COLUMN}, which samples answer; leave it "
                    "out, or the column"
                )
            return turns.play
    if toolbox is not None:
        return toolbox.play
    if args.rollout_source == "nemo_gym":
        from swift.rollout.sources.nemo_gym.start import nemo_gym_of

        return nemo_gym_of(args, reward_names)
    from swift.rollout.sources.multi_turn.environments import find

    return find(args.multi_turn_scheduler, args.gym_env, args.max_turns, tokenizer, args.num_generations)


def _check_scoring_by_group(args: Any, rewards: RewardPipeline, mode: str, plan: BatchPlan) -> None:
    """Checks what `--dynamic_sample` and `--streaming_partial_batch` require, which score groups one by one."""
    problems = []
    if rewards.needs_whole_batch:
        flag = "dynamic_sample" if args.dynamic_sample else "streaming_partial_batch"
        names = [signature.name for signature in rewards.signatures if signature.scope == "batch"]
        problems.append(
            f"--{flag}: true: groups are scored one by one, but {', '.join(names)} must see the whole batch; "
            f"--{flag} false, or a function of scope group"
        )
    if args.streaming_partial_batch and mode in ("in_process", "colocate"):
        problems.append(
            "--streaming_partial_batch: true: the rollout engine samples in the trainer's own process, which cannot "
            "train meanwhile; --vllm_mode dedicated or server, or --streaming_partial_batch false"
        )
    if args.streaming_partial_batch and plan.global_batches_per_rollout > 1:
        problems.append(
            f"--streaming_partial_batch: true: a generation batch of {plan.generation_batch} completions feeds "
            f"{plan.global_batches_per_rollout} optimizer steps, which wait for its end anyway; "
            f"--generation_batch_size {plan.global_batch}, or --streaming_partial_batch false"
        )
    join_problems(problems)


def _check_best_metric(metric: str, rewards: RewardPipeline, answers: Answers | None) -> None:
    """Refuses a metric that no evaluation measures; reward functions of the user may log any."""
    name = metric.removeprefix("eval_")
    if answers is not None and name != "loss":
        raise ConfigError(f"--metric_for_best_model: {name}: not measured; there is: loss")
    if answers is not None:
        return
    known = {*EVALUATED, *(f"rewards/{reward}/{value}" for reward in rewards.names for value in ("mean", "std"))}
    if name in known or name.startswith(FAMILIES) or not all(s.is_built_in for s in rewards.signatures):
        return
    raise ConfigError(f"--metric_for_best_model: {name}: not measured; there are: {', '.join(sorted(known))}")


def _check_sent_adapter(args: Any) -> None:
    """Refuses adapters on parameters, such as fused experts, where weight syncs send the adapter only."""
    from swift.models.experts import adapted_parameter

    if name := adapted_parameter(args):
        raise ConfigError(
            f"--vllm_enable_lora: true: {name}: vLLM takes adapters of linear layers, none of parameters; "
            "--vllm_enable_lora false sends merged weights"
        )


def _route_lines(args: Any, placement: Placement, plan: BatchPlan) -> list[str]:
    """What `--moe_router_replay` does not change. Raises ConfigError: vLLM does not return the experts of tokens."""
    from swift.rollout.engines.vllm.versions import no_routes, require_version

    if args.moe_router_replay == "rollout" and args.use_vllm:
        on_cpu = any(name.startswith("cpu") for devices in placement.engines for name in devices)
        if reason := no_routes(require_version(), on_cpu=on_cpu):
            raise ConfigError(f"--moe_router_replay: rollout: {reason}")
    if args.moe_router_replay == "trainer" and plan.updates_per_rollout == 1 and not args.tuner_dropout:
        return ["--moe_router_replay: trainer: no effect with one update of each rollout batch"]
    return []


def _check_lockstep(args: Any, placement: Placement, maker: str) -> None:
    """Refuses `maker`, a setting whose code makes completions, where ranks have to sample in lockstep."""
    from swift.trainers.parallel.deepspeed import stage_of

    if placement.mode == "in_process" and stage_of(args) == 3:
        raise ConfigError(
            f"{maker}: each rank calls it with its own prompts, and stage 3 of --deepspeed {args.deepspeed} samples "
            "on all ranks in step; --use_vllm true, --vllm_mode dedicated, or stage 2"
        )
    if placement.mode == "colocate" and placement.tensor_parallel_size > 1:
        raise ConfigError(
            f"--vllm_tensor_parallel_size: {placement.tensor_parallel_size}: in colocate the ranks of an engine sample "
            f"in step, and {maker.partition(':')[0]} does as it likes; use 1, or --vllm_mode dedicated"
        )


def _prefetch_depth(args: Any, plan: BatchPlan) -> tuple[int, float]:
    """The number of generation batches to sample ahead, and the maximum age of a token in optimizer steps.

    The number is `--prefetch_depth` as far as `--max_staleness` allows.
    """
    from swift.rollout.arithmetic import MOST_BATCHES_CARRIED, deepest_prefetch, most_stale
    from swift.rollout.placement import has_own_engine

    updates = plan.updates_per_rollout
    interval = args.vllm_sync_interval if has_own_engine(args) else 1
    wanted = args.prefetch_depth if args.async_generate else 0
    if args.dynamic_sample:  # the first prompt of a round is known only after the round before it has ended
        wanted = min(wanted, 1)
    waits = MOST_BATCHES_CARRIED * updates if args.dynamic_sample else 0
    limit = None if args.max_staleness is None else args.max_staleness - waits
    depth = deepest_prefetch(wanted, updates=updates, interval=interval, max_staleness=limit)
    if depth is None:
        carried = " with the wait of groups that --dynamic_sample carries over" if waits else ""
        raise ConfigError(
            f"--max_staleness: {args.max_staleness}: {counted(updates, 'optimizer step')} per generation batch and "
            f"--vllm_sync_interval {interval} make tokens up to "
            f"{counted(most_stale(0, updates=updates, interval=interval) + waits, 'step')} old without sampling "
            f"ahead{carried}; raise it, or lower these"
        )
    if args.max_staleness is not None and args.replay_buffer_size and args.replay_max_age > args.max_staleness:
        raise ConfigError(
            f"--max_staleness: {args.max_staleness}: the replay buffer keeps groups for --replay_max_age "
            f"{args.replay_max_age} optimizer steps; raise it, or lower --replay_max_age"
        )
    if args.rollout_source == "atropos":  # groups wait at the API, which never discards them
        return depth, math.inf
    oldest = most_stale(depth, updates=updates, interval=interval) + waits
    return depth, oldest + (args.replay_max_age + updates - 1 if args.replay_buffer_size else 0)


def batch_line(args: Any, plan: BatchPlan) -> str:
    """The line of the plan that describes the batches."""
    from swift.rollout.arithmetic import describe

    return describe(
        plan,
        most_launches=1 + args.max_resample_times if args.dynamic_sample else 1,
        every_row=bool(args.dynamic_sample or args.reroll_start_fraction < 1),
    )


def plan_lines(parts: Parts) -> list[str]:
    """The lines of the plan: devices, placement, batches, steps, loss."""
    from swift.rl.distillation import describe as describe_divergence
    from swift.rl.energy import describe as describe_energy
    from swift.rl.losses import describe as describe_loss
    from swift.rollout.placement import describe as describe_placement
    from swift.trainers.parallel.sharding import describe as describe_sharding

    device, args = own_device(), parts.args
    if (distillation := distillation_settings(args)) is not None:
        loss = describe_divergence(distillation.beta, distillation.top_k, args.lmbda, distillation.sft_alpha)
    elif parts.references is None:
        loss = describe_loss(loss_settings(args))
    else:
        loss = describe_energy(
            estimator=args.ebft_advantage_estimator,
            rl_coef=args.ebft_rl_coef,
            ce_coef=args.ebft_ce_coef,
            beta=args.beta,
        )
    world = parts.collectives.world_size
    where = (f"{world} x {device.type}" if world > 1 else str(device)) + describe_sharding(args)
    lines = [
        f"plan: train on {where}; generate with {args.infer_backend}; {batch_line(args, parts.plan)}",
        f"loss: {loss}",
    ]
    if parts.placement.mode == "in_process":
        return lines
    ahead = f"; {counted(parts.prefetch_depth, 'generation batch')} ahead" if parts.prefetch_depth else ""
    return [*lines, describe_placement(parts.placement) + ahead, *parts.placement.notes]
