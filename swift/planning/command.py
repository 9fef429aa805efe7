"""`swift plan`: the command line of a run, and flags of its own; nothing but configuration files is read.

swift plan [rlhf|sft|pt] <flags of the run> [--device NAME] [--num_devices N] [--prompt_tokens N] ...
"""

from __future__ import annotations

import inspect
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted, first_line, join_problems, printable

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.models.attention.layout import Kernel
    from swift.planning.devices import Device
    from swift.planning.report import Phase, Plan, Rollout
    from swift.planning.step import Shape, StepCost
    from swift.rollout.arithmetic import BatchPlan
    from swift.rollout.placement import Placement

RUNS = ("rlhf", "sft", "pt")
HOST_OPTIMIZERS = ("adamw_cpu",)
TRACED = ("adamw_torch", "adamw_torch_fused", *HOST_OPTIMIZERS)


def run(words: Sequence[str]) -> int | None:
    """The command, from the words after `plan`."""
    from swift.arguments import parse
    from swift.arguments.derived import Machine
    from swift.planning.choices import compared, fitted, table
    from swift.planning.devices import find_device

    own, command, others = split(words)
    asked: Any = parse("plan", own, os.environ).args
    device = find_device(asked.device)
    os.environ.update(parse(command, others, os.environ, machine=Machine(True, 1)).environment)  # of a config file
    processes = asked.num_devices or Machine.detect(os.environ).processes

    def planned(words: Sequence[str], processes: int) -> tuple[Plan, Resolved]:
        machine = Machine(has_accelerator=True, cores=os.cpu_count() or 1, processes=processes)
        resolved = parse(command, words, os.environ, machine=machine)
        return plan_of(resolved, device, processes, asked), resolved

    plan, resolved = planned(others, processes)
    for note in resolved.notes:
        print(printable(f"swift: {note}"), file=sys.stderr)
    lines, found = plan.lines(), plan.as_json()
    if asked.fit and not plan.fits:
        changed, last = fitted(plan, resolved.args, others, lambda words: planned(words, processes))
        ranks = f"NPROC_PER_NODE={processes} " if processes > 1 else ""
        typed = f"{ranks}swift {command} {shlex.join(changed)}"
        lines += ["", f"fits with: {typed}" if last.fits else f"does not fit with this either: {typed}", *last.lines()]
        found |= {"fit": {"command": typed, **last.as_json()}}
    if asked.compare:
        rows = compared(resolved.args, others, processes, planned)
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
            place = own if word[2:].partition("=")[0].replace("-", "_") in names else others
        place.append(word)
    return own, command, others


def plan_of(resolved: Resolved, device: Device, processes: int, asked: Any) -> Plan:
    """The plan of a run whose settings are these.

    Raises:
        ConfigError: what is not planned yet, or cannot be.
    """
    args: Any = resolved.args
    join_problems(_not_planned(resolved.mode, args))
    return plan_grpo(args, device, processes, asked)


def _not_planned(mode: str, args: Any) -> list[str]:
    """What `swift plan` does not know of, one line each."""
    if mode != "rlhf":
        return [f"plan: {mode}: only swift rlhf --rlhf_type grpo is planned so far"]
    problems = {
        f"--optim: {args.optim}: its memory is not known here; plan with one of {', '.join(TRACED)}": (
            args.optim not in TRACED
        ),
        f"--deepspeed: {args.deepspeed}: only --fsdp is planned so far": args.deepspeed,
        "--fsdp_offload_params: true: is not planned yet": args.fsdp_offload_params,
        f"--quant_method: {args.quant_method}: quantised weights are not planned yet": args.quant_method,
        f"--tuner_type: {args.tuner_type}: only lora and full are planned so far": (
            args.tuner_type not in ("lora", "full")
        ),
        "--use_dora: true: is not planned yet": args.use_dora,
        "--adapters: given: a run that starts from an adapter is not planned yet; plan with a new one": args.adapters,
        f"--ref_model: {args.ref_model}: another model as reference is not planned yet": (
            args.beta > 0 and args.ref_model not in (None, args.model)
        ),
        "--reward_model: given: reward models on the trainer's device are not planned yet": args.reward_model,
        "--use_lmdeploy: true: only vLLM and transformers are planned so far": args.use_lmdeploy,
    }
    return [problem for problem, holds in problems.items() if holds]


def plan_grpo(args: Any, device: Device, processes: int, asked: Any) -> Plan:
    """The plan of a run of GRPO."""
    from swift.planning.choices import advice
    from swift.planning.report import Plan
    from swift.trainers.parallel.sequence import data_ranks
    from swift.trainers.parallel.sharding import describe

    nodes = max(1, int(os.environ.get("NNODES", "1")))
    placed = _place(args, max(1, processes // nodes))
    batches = _batches(args, processes, asked.num_rows)
    completions = batches.global_batch // data_ranks(args, processes)
    policy, cost = _trainer(args, device, placed, processes, completions, asked.prompt_tokens)
    rollout = _rollout(args, device, placed, nodes, policy, cost, batches, asked.prompt_tokens)
    phases = _phases(args, placed, cost, rollout, buckets=cost.gradients if processes > 1 and not args.fsdp else 0)
    where = {"colocate": "vLLM beside the trainer", "in_process": "the trainer's model"}.get(
        placed.mode, "servers, taken to be" if placed.servers else "engines"
    )
    if rollout.devices > 1 or placed.servers:
        where += f" on {counted(rollout.devices, 'device')} each"
    sharing = f", micro-batches of {args.sequence_parallel_size} processes" if args.sequence_parallel_size > 1 else ""
    plan = Plan(
        title=f"plan: {args.tuner_type} tuning of {args.model} in {args.torch_dtype}{describe(args)}{sharing}; "
        f"rollouts by {where}, {rollout.at_a_time} at a time on a device; prompts of {asked.prompt_tokens} tokens, "
        f"completions of {args.max_completion_length} all of them",
        device=device,
        devices=processes,
        engine_devices=nodes * sum(map(len, placed.engines)) if placed.mode == "dedicated" else 0,
        cost=cost,
        phases=phases,
        step_s={"rollout": rollout.seconds, "passes": cost.training_s, "update": cost.update_s},
        ahead=bool(args.async_generate),
        steps=batches.max_steps if args.max_steps > 0 or asked.num_rows else None,
        completions=batches.global_batch,
        tokens_per_step=batches.global_batch * args.max_completion_length
        + batches.global_batch_prompts * asked.prompt_tokens,
        price_per_hour=asked.price_per_hour,
        heads=policy.config.get_text_config().num_attention_heads,
        problem=rollout.problem,
    )
    return replace(plan, advice=advice(plan, args))


def _place(args: Any, ranks: int) -> Placement:
    """The placement of one node, which has the devices that the settings need."""
    from swift.rollout import placement

    workers = args.num_infer_workers
    apart = args.async_generate or args.vllm_mode == "dedicated" or (workers not in (None, ranks))
    apart = apart and args.use_vllm and args.vllm_mode not in ("colocate", "server") and not args.vllm_server_host
    return placement.place(
        placement.request_from(
            args,
            local_ranks=ranks,
            accelerators=ranks + ((workers or 1) * args.vllm_tensor_parallel_size if apart else 0),
            accelerator_kind="cuda",
            cores=(),
        )
    )


def _batches(args: Any, processes: int, num_rows: int | None) -> BatchPlan:
    from swift.rollout.arithmetic import plan_batches

    names = inspect.signature(plan_batches).parameters.keys() - {"world_size", "num_rows", "max_steps"}
    steps = args.max_steps if args.max_steps > 0 or num_rows else 1
    given = {name: getattr(args, name) for name in names}
    return plan_batches(**given, world_size=processes, num_rows=num_rows, max_steps=steps)


def _trainer(
    args: Any, device: Device, placed: Placement, processes: int, completions: int, prompt_tokens: int
) -> tuple[Any, StepCost]:
    """The policy on "meta", and what its step costs; `completions`: of the ranks that share them."""
    import torch

    from swift.models.attention.choice import packing_obstacle
    from swift.models.policy import check_policy
    from swift.planning.devices import host_update_seconds
    from swift.planning.report import CONTEXT_BYTES, engine_in_training
    from swift.planning.sharded import World
    from swift.planning.step import trace_step
    from swift.trainers.grpo.arguments import trainer_settings
    from swift.trainers.grpo.build import reference_of
    from swift.trainers.parallel.sequence import require_shareable

    policy = check_policy(args, weights=False)
    if policy is None:
        raise ConfigError(f"--model: {args.model}: code of its repository makes it, which needs real tensors")
    if hasattr(policy.config, "quantization_config"):
        raise ConfigError(f"--model: {args.model}: its weights are quantised, which is not planned yet")
    if (obstacle := packing_obstacle(policy)) is not None:
        raise ConfigError(f"--model: {args.model}: {obstacle}: models that are not packed are not planned yet")
    require_shareable(policy, args)
    reference = reference_of(args, policy.train(), 0)
    taken = CONTEXT_BYTES + engine_in_training(placed, _share(args, placed), device)
    if processes > 1 and not args.fsdp:
        taken += sum(parameter.nbytes for parameter in policy.parameters() if parameter.requires_grad)

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
            world=World(
                processes,
                args.sequence_parallel_size,
                args.fsdp,
                args.fsdp_replicas,
                getattr(torch, args.torch_dtype),
            ),
        )
    except RuntimeError as error:  # what reads numbers of tensors that have none, such as a router of experts
        raise ConfigError(f"--model: {args.model}: its step cannot be traced yet ({first_line(error)})") from error
    if args.optim in HOST_OPTIMIZERS:
        cost = replace(cost, update_s=host_update_seconds(cost.gradients, cost.trained))
    return policy, cost


def shape_of(args: Any, completions: int, prompt_tokens: int) -> Shape:
    """The completions of a device and step; of a prompt as many as there are of it on one device."""
    from swift.planning.step import Shape

    prompts = math.ceil(completions / args.num_generations)
    return Shape(prompts, math.ceil(completions / prompts), prompt_tokens, args.max_completion_length)


def kernel_of(args: Any) -> Kernel | None:
    """The kernel of packed attention on a GPU."""
    return "flash" if args.attn_impl == "flash_attn" else "flex"


def _share(args: Any, placed: Placement) -> float:
    """VLLM's share of its device's memory."""
    from swift.rollout.engines.spec import OWN_SHARE
    from swift.trainers.engines import COLOCATED_SHARE

    return float(args.vllm_gpu_memory_utilization or (COLOCATED_SHARE if placed.mode == "colocate" else OWN_SHARE))


def _rollout(
    args: Any,
    device: Device,
    placed: Placement,
    nodes: int,
    policy: Any,
    cost: StepCost,
    batches: BatchPlan,
    prompt_tokens: int,
) -> Rollout:
    """Generation on one device: the engine's share of it, and how long it takes."""
    from swift.models.activation_memory import ModelShape
    from swift.planning.devices import GIB
    from swift.planning.report import CONTEXT_BYTES, ENGINE_BYTES, HOST_S, MOST_SEQUENCES, Rollout, decode_seconds

    shape, size = ModelShape.of(policy.config), 4 if args.torch_dtype == "float32" else 2
    cache_per_token = 2 * shape.layers * shape.key_value * size
    # an engine has the base, into which an adapter is merged
    parameters = sum(parameter.numel() for name, parameter in policy.named_parameters() if "lora_" not in name)
    weights, longest = size * parameters, prompt_tokens + args.max_completion_length
    in_process = placed.mode == "in_process"
    spread = 1 if in_process else max(1, args.vllm_tensor_parallel_size)
    if placed.servers:  # as many devices as the weights need in half of their memory
        spread = 1 << max(0, math.ceil(math.log2(2 * weights / device.memory)))
    cache_per_token, weights = math.ceil(cache_per_token / spread), math.ceil(weights / spread)
    if in_process:
        gathered = weights if args.fsdp else 0
        free = device.memory - CONTEXT_BYTES - cost.weights - gathered
        engine, cache, engines = gathered, min(device.memory // 4, max(free // 2, GIB)), placed.local_ranks * nodes
    else:
        engine = int(_share(args, placed) * device.memory)
        cache = engine - weights - ENGINE_BYTES
        engines = nodes * len(placed.engines) or len(placed.servers)
    completions = math.ceil(batches.rollout_prompts * args.num_generations / engines)
    problem = ""
    if cache < cache_per_token * longest:
        problem = f"an engine's {max(0, cache) / GIB:.1f} GiB of keys and values do not hold {longest} tokens"
    pace = "transformers" if in_process else "eager" if args.vllm_enforce_eager else "graphs"
    at_a_time, seconds = decode_seconds(
        device,
        least_s=HOST_S[pace] * shape.layers,
        parameters=active_parameters(policy) // spread,
        weights=weights,
        cache_per_token=cache_per_token,
        cache=cache,
        most=args.vllm_max_num_seqs or MOST_SEQUENCES,
        completions=completions,
        prompts=math.ceil(completions / args.num_generations),
        prompt_tokens=prompt_tokens,
        completion_tokens=args.max_completion_length,
    )
    needed = min(cache, cache_per_token * longest * at_a_time) if in_process else cache
    return Rollout(weights, engine, needed, at_a_time, seconds / batches.updates_per_rollout, problem, spread)


def active_parameters(policy: Any) -> int:
    """Those that compute a token: of the base, and of its experts the share that the router chooses."""
    config = policy.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    total = 0.0
    for name, parameter in policy.named_parameters():
        if "lora_" not in name:
            total += parameter.numel() * (min(1.0, chosen / parameter.shape[0]) if parameter.ndim == 3 else 1)
    return int(total)


def _phases(args: Any, placed: Placement, cost: StepCost, rollout: Rollout, *, buckets: int) -> list[Phase]:
    """The phases of a device of the trainer; DDP has the gradients a second time, in buckets that stay."""
    from swift.planning.report import ASLEEP_BYTES, BUCKET_BYTES, CONTEXT_BYTES, SLACK, Phase

    process = {"process": CONTEXT_BYTES}
    colocated = placed.mode == "colocate"
    beside = 0 if not colocated else ASLEEP_BYTES if placed.sleep_level else rollout.engine
    phases = []
    if placed.mode == "in_process":
        phases.append(
            Phase("rollout", {**process, "trainer": cost.resident + buckets, "engine": rollout.engine + rollout.cache})
        )
    if colocated:
        weights = 0 if args.offload_model else cost.weights
        trainer = weights + (0 if args.offload_optimizer else cost.resident - cost.weights) + buckets
        waking = (rollout.weights + ASLEEP_BYTES if placed.sleep_level else rollout.engine) + BUCKET_BYTES
        phases = [
            Phase("start", {**process, "trainer": cost.weights, "engine": rollout.engine}),
            Phase("weight sync", {**process, "trainer": trainer, "engine": waking}),
            Phase("rollout", {**process, "trainer": trainer, "engine": rollout.engine}),
        ]
    for name, held in (("forward, backward", cost.training), ("update", cost.update)):
        parts = {"trainer": held + buckets, "engine": beside, "allocator": int(SLACK * held)}
        phases.append(Phase(name, {**process, **parts}))
    return phases
