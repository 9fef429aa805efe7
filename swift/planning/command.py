"""`swift plan`: the command line of a run, and flags of its own; nothing but configuration files is read.

swift plan [rlhf|sft|pt] <flags of the run> [--device NAME] [--num_devices N] [--prompt_tokens N] ...
"""

from __future__ import annotations

import inspect
import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, first_line, join_problems

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.models.attention.layout import Kernel
    from swift.planning.devices import Device
    from swift.planning.report import Phase, Plan, Rollout
    from swift.planning.step import Shape, StepCost
    from swift.rollout.arithmetic import BatchPlan
    from swift.rollout.placement import Placement

RUNS = ("rlhf", "sft", "pt")
SHARED = ("json", "debug")
"""Flags of the plan that runs have, too."""
HOST_OPTIMIZERS = ("adamw_cpu",)
TRACED = ("adamw_torch", "adamw_torch_fused", *HOST_OPTIMIZERS)


def run(words: Sequence[str]) -> int | None:
    """The command, from the words after `plan`."""
    from swift.arguments import parse
    from swift.arguments.derived import Machine
    from swift.planning.devices import find_device

    own, command, others = split(words)
    asked: Any = parse("plan", own, os.environ).args
    device = find_device(asked.device)
    processes = asked.num_devices or Machine.detect(os.environ).processes

    def planned(words: Sequence[str], processes: int) -> tuple[Plan, Any]:
        machine = Machine(has_accelerator=True, cores=os.cpu_count() or 1, processes=processes)
        resolved = parse(command, words, os.environ, machine=machine)
        return plan_of(resolved, device, processes, asked), resolved.args

    plan, args = planned(others, processes)
    lines = plan.lines()
    found: dict[str, Any] = plan.as_json()
    if asked.fit and not plan.fits:
        from swift.planning.choices import fitted

        changed, plan = fitted(plan, args, others, lambda words: planned(words, processes))
        fix = f"swift {command} {shlex.join(changed)}" if plan.fits else None
        lines += ["", f"fits with: {fix}" if fix else "nothing that is known here makes it fit", *plan.lines()]
        found |= {"fit": None if fix is None else {"command": fix, **plan.as_json()}}
    if asked.compare:
        from swift.planning.choices import compared, table

        rows = compared(args, others, processes, planned)
        lines += ["", *table(rows)]
        found |= {"compared": rows}
    print(json.dumps(found, indent=2) if asked.json else "\n".join(lines))
    return 0


def split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The plan's own words, the mode of the run, and the words of the run."""
    from swift.arguments.modes import PlanArguments
    from swift.flags import flags_of

    names = set(flags_of(PlanArguments))
    words = list(words)
    command = words.pop(0) if words and words[0] in RUNS else "rlhf"
    own: list[str] = []
    others: list[str] = []
    place = others
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            place = own if name in names else others
            if name in SHARED:
                others.append(word)
        elif place is own and own[-1:] and own[-1].lstrip("-").partition("=")[0] in SHARED:
            others.append(word)
        place.append(word)
    return own, command, others


def plan_of(resolved: Resolved, device: Device, processes: int, asked: Any) -> Plan:
    """The plan of a run whose settings are these.

    Raises:
        ConfigError: what is not planned yet, or cannot be.
    """
    args: Any = resolved.args
    join_problems(_not_planned(resolved.mode, args, processes))
    return plan_grpo(args, device, processes, asked)


def _not_planned(mode: str, args: Any, processes: int) -> list[str]:
    """What `swift plan` does not know of, one line each."""
    if mode != "rlhf":
        return [f"plan: {mode}: only swift rlhf --rlhf_type grpo is planned so far"]
    sharded = f"{args.deepspeed or args.fsdp}"
    problems = {
        f"--optim: {args.optim}: its memory is not known here; plan with one of {', '.join(TRACED)}": args.optim
        not in TRACED,
        f"--deepspeed, --fsdp: {sharded}: sharded models are not planned yet; plan without": args.sharded_by,
        f"--quant_method: {args.quant_method}: quantised weights are not planned yet; plan without": args.quant_method,
        f"--vllm_tensor_parallel_size: {args.vllm_tensor_parallel_size}: sharded engines are not planned yet; 1": (
            args.vllm_tensor_parallel_size > 1
        ),
    }
    return [problem for problem, holds in problems.items() if holds]


def plan_grpo(args: Any, device: Device, processes: int, asked: Any) -> Plan:
    """The plan of a run of GRPO."""
    from swift.planning.choices import advice
    from swift.planning.report import Plan
    from swift.rollout import placement

    placed = placement.place(
        placement.request_from(
            args,
            local_ranks=processes,
            accelerators=processes + (args.num_infer_workers or 1 if _is_apart(args) else 0),
            accelerator_kind="cuda",
            cores=(),
        )
    )
    batches = _batches(args, processes, asked.num_rows)
    policy, cost = _trainer(args, device, placed, batches.global_batch // processes, asked.prompt_tokens)
    rollout = _rollout(args, device, placed, policy, cost, batches, asked.prompt_tokens)
    phases = [*_around_rollouts(args, device, placed, cost, rollout), *_training(placed, cost, processes)]
    where = {"colocate": "vLLM beside the trainer", "in_process": "the trainer's model"}.get(
        placed.mode, "other devices"
    )
    plan = Plan(
        title=f"plan: {args.tuner_type} tuning of {args.model} in {args.torch_dtype}; rollouts by {where}, "
        f"{rollout.at_a_time} at a time on a device",
        device=device,
        devices=processes,
        cost=cost,
        phases=phases,
        step_s={"rollout": rollout.seconds, "passes": cost.training_s, "update": cost.update_s},
        ahead=bool(args.async_generate),
        steps=batches.max_steps if args.max_steps > 0 or asked.num_rows else None,
        completions=batches.global_batch,
        tokens_per_step=batches.global_batch * args.max_completion_length
        + batches.global_batch_prompts * asked.prompt_tokens,
        price_per_hour=asked.price_per_hour,
    )
    return replace(plan, advice=advice(plan, args))


def _batches(args: Any, processes: int, num_rows: int | None) -> BatchPlan:
    from swift.rollout.arithmetic import plan_batches

    names = inspect.signature(plan_batches).parameters.keys() - {"world_size", "num_rows", "max_steps"}
    steps = args.max_steps if args.max_steps > 0 or num_rows else 1
    given = {name: getattr(args, name) for name in names}
    return plan_batches(**given, world_size=processes, num_rows=num_rows, max_steps=steps)


def _trainer(
    args: Any, device: Device, placed: Placement, completions: int, prompt_tokens: int
) -> tuple[Any, StepCost]:
    """The policy on "meta", and what its step costs."""
    import torch

    from swift.models.policy import check_policy
    from swift.planning.report import ASLEEP_BYTES, CONTEXT_BYTES
    from swift.planning.step import trace_step
    from swift.trainers.grpo.arguments import trainer_settings
    from swift.trainers.grpo.build import reference_of

    policy = check_policy(args, weights=False)
    if policy is None:
        raise ConfigError(f"--model: {args.model}: code of its repository makes it, which needs real tensors")
    reference = reference_of(args, policy.train(), 0)
    taken = CONTEXT_BYTES + (ASLEEP_BYTES if placed.mode == "colocate" else 0)

    def optimizer(weights: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=1e-6, fused=args.optim != "adamw_torch")

    try:
        cost = trace_step(
            policy,
            reference,
            trainer_settings(args),
            shape_of(args, completions, prompt_tokens),
            device,
            optimizer=None if args.optim in HOST_OPTIMIZERS else optimizer,
            recomputes=args.gradient_checkpointing,
            free=lambda held: max(1, device.memory - taken - held),
            kernel=kernel_of(args),
        )
    except RuntimeError as error:  # what reads numbers of tensors that have none, such as a router of experts
        raise ConfigError(f"--model: {args.model}: such models are not planned yet ({first_line(error)})") from error
    return policy, cost


def shape_of(args: Any, completions: int, prompt_tokens: int) -> Shape:
    """The completions of a device and step; of a prompt as many as there are of it on one device."""
    from swift.planning.step import Shape

    prompts = math.ceil(completions / args.num_generations)
    return Shape(prompts, completions // prompts, prompt_tokens, args.max_completion_length)


def kernel_of(args: Any) -> Kernel | None:
    """The kernel of packed attention on a GPU."""
    return "flash" if args.attn_impl == "flash_attn" else "flex"


def _is_apart(args: Any) -> bool:
    """Whether engines have devices of their own."""
    return bool(args.async_generate or args.vllm_mode == "dedicated")


def _rollout(
    args: Any, device: Device, placed: Placement, policy: Any, cost: StepCost, batches: BatchPlan, prompt_tokens: int
) -> Rollout:
    """Generation on one device: the engine's share of it, and how long it takes."""
    from swift.models.activation_memory import ModelShape
    from swift.planning.report import CONTEXT_BYTES, ENGINE_BYTES, HOST_S, Rollout, decode_seconds
    from swift.rollout.engines.spec import OWN_SHARE
    from swift.trainers.engines import COLOCATED_SHARE

    shape = ModelShape.of(policy.config)
    cache_per_token = 2 * shape.layers * shape.key_value * 2
    # an engine has the base, into which an adapter is merged
    parameters = sum(parameter.numel() for name, parameter in policy.named_parameters() if "lora_" not in name)
    if placed.mode == "in_process":
        free = device.memory - CONTEXT_BYTES - cost.resident
        engine, cache, engines = 0, max(0, min(device.memory // 4, free // 2)), placed.local_ranks
    else:
        share = args.vllm_gpu_memory_utilization or (COLOCATED_SHARE if placed.mode == "colocate" else OWN_SHARE)
        engine = int(share * device.memory)
        cache, engines = max(0, engine - 2 * parameters - ENGINE_BYTES), max(1, len(placed.engines))
    completions = batches.rollout_prompts * args.num_generations / batches.updates_per_rollout
    pace = "transformers" if placed.mode == "in_process" else "eager" if args.vllm_enforce_eager else "graphs"
    at_a_time, seconds = decode_seconds(
        device,
        least_s=HOST_S[pace] * shape.layers,
        parameters=parameters,
        cache_per_token=cache_per_token,
        cache=cache,
        completions=math.ceil(completions / engines),
        prompt_tokens=prompt_tokens,
        completion_tokens=args.max_completion_length,
    )
    return Rollout(2 * parameters, engine, cache, at_a_time, seconds)


def _around_rollouts(args: Any, device: Device, placed: Placement, cost: StepCost, rollout: Rollout) -> list[Phase]:
    """The phases of a device of the trainer in which nothing is trained."""
    from swift.planning.report import ASLEEP_BYTES, BUCKET_BYTES, CONTEXT_BYTES, Phase

    process = {"process": CONTEXT_BYTES}
    if placed.mode == "in_process":
        return [Phase("rollout", {**process, "trainer": cost.resident, "engine": rollout.cache})]
    if placed.mode != "colocate":
        return []
    weights = 0 if args.offload_model else cost.weights
    trainer = weights + (0 if args.offload_optimizer else cost.resident - cost.weights)
    return [
        Phase("start", {**process, "trainer": cost.weights, "engine": rollout.engine}),
        Phase("weight sync", {**process, "trainer": trainer, "engine": rollout.weights + ASLEEP_BYTES + BUCKET_BYTES}),
        Phase("rollout", {**process, "trainer": trainer, "engine": rollout.engine}),
    ]


def _training(placed: Placement, cost: StepCost, processes: int) -> list[Phase]:
    """The passes and the update; DDP has the gradients a second time, in its buckets."""
    from swift.planning.report import ASLEEP_BYTES, CONTEXT_BYTES, SLACK, Phase

    beside = {"process": CONTEXT_BYTES, "engine": ASLEEP_BYTES if placed.mode == "colocate" else 0}
    buckets = cost.gradients if processes > 1 else 0
    return [
        Phase(name, {**beside, "trainer": held + buckets, "allocator": int(SLACK * held)})
        for name, held in (("forward, backward", cost.training), ("update", cost.update))
    ]
