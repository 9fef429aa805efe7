"""The plan of a run of GRPO, or of structured EBFT: the trainer's step, rollouts, and what both need at a time."""

from __future__ import annotations

import functools
import inspect
import math
import os
from typing import TYPE_CHECKING, Any

from swift.errors import counted
from swift.planning.report import PROMPT_TOKENS, described, shown_in

if TYPE_CHECKING:
    from swift.planning.cost import StepCost
    from swift.planning.devices import Device
    from swift.planning.images import DrawnImages
    from swift.planning.report import Phase, Plan, Rollout
    from swift.planning.step import Shape
    from swift.rollout.arithmetic import BatchPlan
    from swift.rollout.placement import Placement


def plan_grpo(
    args: Any, policy: Any, device: Device, processes: int, asked: Any, images: DrawnImages | None = None
) -> Plan:
    """The plan of a run of GRPO or structured EBFT, whose policy is on "meta"."""
    from swift.planning.images import prompt_of
    from swift.planning.report import Plan
    from swift.trainers.parallel.sequence import data_ranks

    nodes = max(1, int(os.environ.get("NNODES", "1")))
    prompt_tokens = prompt_of(images, asked.prompt_tokens, PROMPT_TOKENS)
    placed = _place(args, max(1, processes // nodes))
    batches = _batches(args, processes, asked.num_rows)
    completions = batches.global_batch // data_ranks(args, processes)
    shape = shape_of(args, completions, prompt_tokens, images)
    cost = _trainer(args, policy, device, placed, processes, shape, images)
    rollout = _rollout(args, device, placed, nodes, policy, cost, batches, prompt_tokens)
    phases = _phases(args, placed, cost, rollout, processes, policy)
    where = {"colocate": "vLLM beside the trainer", "in_process": "the trainer's model"}.get(
        placed.mode, "servers, taken to be" if placed.servers else "engines"
    )
    if rollout.devices > 1 or placed.servers:
        where += f" on {counted(rollout.devices, 'device')} each"
    features = {"features": cost.features_s} if cost.features_s else {}
    return Plan(
        title=f"plan: {described(args)}; rollouts by {where}, {rollout.at_a_time} at a time on a device; prompts of "
        f"{prompt_tokens} tokens, completions of {args.max_completion_length} all of them{shown_in(images)}",
        device=device,
        devices=processes,
        engine_devices=nodes * sum(map(len, placed.engines)) if placed.mode == "dedicated" else 0,
        cost=cost,
        phases=phases,
        step_s={"rollout": rollout.seconds, **features, "passes": cost.training_s, "update": cost.update_s},
        ahead=bool(args.async_generate),
        steps=batches.max_steps if args.max_steps > 0 or asked.num_rows else None,
        rows=batches.global_batch,
        noun="completion",
        tokens_per_step=batches.global_batch * args.max_completion_length
        + batches.global_batch_prompts * prompt_tokens,
        price_per_hour=asked.price_per_hour,
        heads=policy.config.get_text_config().num_attention_heads,
        problem=rollout.problem,
    )


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
    args: Any,
    policy: Any,
    device: Device,
    placed: Placement,
    processes: int,
    shape: Shape,
    images: DrawnImages | None,
) -> StepCost:
    """What a step of the trainer costs; `shape`: of the ranks that share completions."""
    from swift.models.features import load_features
    from swift.planning.cost import optimizer_of
    from swift.planning.kernels import kernel_of
    from swift.planning.report import CONTEXT_BYTES, engine_in_training
    from swift.planning.sharded import world_of
    from swift.planning.step import trace_step
    from swift.trainers.grpo.arguments import trainer_settings
    from swift.trainers.grpo.build import load_beside
    from swift.trainers.images import show_images
    from swift.trainers.parallel.sequence import require_shareable

    require_shareable(policy, args)
    if images is not None:
        images.vision.attach(policy)
        show_images(images.vision, policy, args)
    beside = load_beside(args, policy.train(), 0, weights=False)
    taken = CONTEXT_BYTES + engine_in_training(placed, _share(args, placed), device)
    if processes > 1 and not args.fsdp:
        taken += sum(parameter.nbytes for parameter in policy.parameters() if parameter.requires_grad)
    return trace_step(
        policy,
        beside,
        trainer_settings(args),
        shape,
        device,
        optimizer=functools.partial(optimizer_of, args),
        recomputes=args.gradient_checkpointing,
        free=lambda held: max(1, device.memory - taken - held),
        features=load_features(args, policy, beside.get("ref_logprobs")) if hasattr(args, "ebft_mode") else None,
        kernel=kernel_of(args),
        world=world_of(args, processes),
    )


def shape_of(args: Any, completions: int, prompt_tokens: int, images: DrawnImages | None = None) -> Shape:
    """The completions of a device and step; of a prompt as many as there are of it on one device."""
    from swift.planning.step import Shape

    prompts = math.ceil(completions / args.num_generations)
    shown = tuple(images.ids) if images else ()
    return Shape(prompts, math.ceil(completions / prompts), prompt_tokens, args.max_completion_length, shown)


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
    from swift.models.quantisation import count_of
    from swift.planning.devices import GIB
    from swift.planning.report import CONTEXT_BYTES, ENGINE_BYTES, HOST_S, MOST_SEQUENCES, Rollout, decode_seconds

    shape, size = ModelShape.of(policy.config), 4 if (args.autocast or args.torch_dtype) == "float32" else 2
    attending, states = kept_by(policy.config.get_text_config(), shape.layers)
    cache_per_token = 2 * attending * shape.key_value * size
    # an engine has the base, into which an adapter is merged
    parameters = sum(count_of(parameter) for name, parameter in policy.named_parameters() if "lora_" not in name)
    weights, longest = size * parameters, prompt_tokens + args.max_completion_length
    in_process = placed.mode == "in_process"
    spread = 1 if in_process else max(1, args.vllm_tensor_parallel_size)
    if placed.servers:  # as many devices as the weights need in half of their memory
        spread = 1 << max(0, math.ceil(math.log2(2 * weights / device.memory)))
    cache_per_token, states, weights = (math.ceil(one / spread) for one in (cache_per_token, states, weights))
    if in_process:
        gathered = weights if args.fsdp else 0
        free = device.memory - CONTEXT_BYTES - cost.weights - gathered
        engine, cache, engines = gathered, min(device.memory // 4, max(free // 2, GIB)), placed.local_ranks * nodes
    else:
        engine = int(_share(args, placed) * device.memory)
        cache = engine - weights - ENGINE_BYTES
        engines = nodes * len(placed.engines) or len(placed.servers)
    completions = math.ceil(batches.rollout_prompts * args.num_generations / engines)
    problem, sequence = "", cache_per_token * longest + states
    if cache < sequence:
        problem = f"an engine's {max(0, cache) / GIB:.1f} GiB of keys and values do not hold {longest} tokens"
    pace = "transformers" if in_process else "eager" if args.vllm_enforce_eager else "graphs"
    at_a_time, seconds = decode_seconds(
        device,
        least_s=HOST_S[pace] * shape.layers,
        parameters=active_parameters(policy) // spread,
        weights=weights,
        cache_per_token=cache_per_token,
        states=states,
        cache=cache,
        most=args.vllm_max_num_seqs or MOST_SEQUENCES,
        completions=completions,
        prompts=math.ceil(completions / args.num_generations),
        prompt_tokens=prompt_tokens,
        completion_tokens=args.max_completion_length,
    )
    needed = min(cache, sequence * at_a_time) if in_process else cache
    return Rollout(weights, engine, needed, at_a_time, seconds / batches.updates_per_rollout, problem, spread)


def kept_by(config: Any, layers: int) -> tuple[int, int]:
    """How many of a text model's layers keep keys and values, and bytes of a sequence's other states in 16 bits."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    from swift.models.policy import quiet_loading

    cache: Any = DynamicCache(config=config)
    hybrid = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if not hybrid:
        return layers, 0
    with quiet_loading(), torch.no_grad(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model(torch.zeros(1, 2, dtype=torch.long), past_key_values=cache)
    states = [
        state for layer in hybrid for kind in (layer.conv_states, layer.recurrent_states) for state in kind.values()
    ]
    attending = sum(getattr(layer, "keys", None) is not None for layer in cache.layers)
    return attending, sum(state.nbytes for state in states if state is not None)


def active_parameters(policy: Any) -> int:
    """Those that compute a token: of the base, and of its experts the share that the router chooses."""
    from swift.models.quantisation import count_of

    config = policy.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    total = 0.0
    for name, parameter in policy.named_parameters():
        if "lora_" not in name:
            stacked = parameter.ndim == 3 and parameter.shape[1] > 1  # of experts, not of a convolution
            total += count_of(parameter) * (min(1.0, chosen / parameter.shape[0]) if stacked else 1)
    return int(total)


def _phases(args: Any, placed: Placement, cost: StepCost, rollout: Rollout, processes: int, policy: Any) -> list[Phase]:
    """The phases of a device of the trainer."""
    from swift.planning.report import ASLEEP_BYTES, CONTEXT_BYTES, SLACK, Phase, buckets_of, trained_in
    from swift.rollout.weights.base import BUCKET_BYTES
    from swift.rollout.weights.policy import PolicyWeights

    process, buckets = {"process": CONTEXT_BYTES}, buckets_of(args, cost, processes)
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
        bucket = BUCKET_BYTES
        if not args.vllm_enable_lora:
            bucket = PolicyWeights(policy, move_model_batches=args.move_model_batches).largest
        waking = (rollout.weights + ASLEEP_BYTES if placed.sleep_level else rollout.engine) + bucket
        phases = [
            Phase("start", {**process, "trainer": cost.weights, "engine": rollout.engine}),
            Phase("weight sync", {**process, "trainer": trainer, "engine": waking}),
            Phase("rollout", {**process, "trainer": trainer, "engine": rollout.engine}),
        ]
    if cost.features:
        slack = int(SLACK * cost.features)
        held = {"trainer": cost.features + buckets, "engine": beside, "allocator": slack}
        phases.append(Phase("features", {**process, **held}))
    return [*phases, *trained_in(cost, buckets, engine=beside)]
