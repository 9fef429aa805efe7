"""How a model is sharded over ranks: `--deepspeed`, torch's FSDP2 (`--fsdp`), or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from swift.devices import own_device
from swift.errors import ConfigError, counted, join_problems
from swift.trainers.parallel.deepspeed import (
    deepspeed_config,
    dtype_name,
    make_deepspeed_state,
    require_deepspeed,
    stage_of,
)

if TYPE_CHECKING:
    import torch


def require_sharding(args: Any) -> None:
    """Check `--deepspeed` and `--fsdp`, one of which is set, before anything is loaded."""
    if args.deepspeed:
        require_deepspeed(args)
    problems = []
    if args.fsdp and args.deepspeed:
        problems.append(f"--fsdp: {args.fsdp}: both shard the model, as does --deepspeed {args.deepspeed}; drop one")
    if args.fsdp and dtype_name(args) == "float16":
        problems.append("--torch_dtype: float16: its loss scaling does not go with --fsdp; use --torch_dtype bfloat16")
    if args.fsdp and args.gradient_checkpointing and args.gradient_checkpointing_kwargs.get("use_reentrant"):
        problems.append("--gradient_checkpointing_kwargs: use_reentrant: gathers out of order with --fsdp; drop it")
    if (args.deepspeed or args.fsdp) and args.save_only_model and args.load_best_model_at_end:
        way = f"--deepspeed {args.deepspeed}" if args.deepspeed else f"--fsdp {args.fsdp}"
        problems.append(
            f"--load_best_model_at_end: true: {way} cannot load checkpoints of --save_only_model true; drop one"
        )
    join_problems(problems)


def check_replicas(args: Any, world_size: int) -> None:
    """Raises ConfigError: `--fsdp_replicas` does not divide the processes, or leaves nothing to shard over."""
    copies = args.fsdp_replicas
    if not args.fsdp or copies == 1 or (world_size % copies == 0 and copies < world_size):
        return
    valid = ", ".join(str(number) for number in range(1, max(2, world_size)) if world_size % number == 0)
    raise ConfigError(
        f"--fsdp_replicas: {copies}: each copy needs the same number of the {counted(world_size, 'process')}, and more "
        f"than one; valid: {valid}"
    )


def describe(args: Any) -> str:
    """How the model is sharded, for the plan: ", ZeRO-2", ", FSDP" or nothing."""
    if args.deepspeed:
        return f", ZeRO-{stage_of(args)}"
    copies = f" of {args.fsdp_replicas} copies" if args.fsdp_replicas > 1 else ""
    place = " on the host" if args.fsdp_offload_params else ""
    return f", FSDP{copies}{place}" if args.fsdp else ""


def loading_device(args: Any) -> torch.device | None:
    """Where the model to train is loaded: this process's device, or None for the host, if only shards are on it."""
    sharded = args.fsdp or (args.deepspeed and stage_of(args) == 3)
    return None if sharded else own_device()


def sharding_options(args: Any) -> dict[str, Any]:
    """The entries of TrainingArguments that `--deepspeed` or `--fsdp`, one of which is set, decide.

    Accelerate's process state is made here, because on CPUs transformers would not offer either.
    """
    if args.deepspeed:
        config = deepspeed_config(args)
        make_deepspeed_state()
        options: dict[str, Any] = {"deepspeed": config}
    else:
        _make_fsdp_state()
        # gathers again in the backward pass, or keeps what the forward pass gathered
        config = {"version": 2, "reshard_after_forward": args.fsdp == "full_shard"}
        options = {"fsdp": True, "fsdp_config": {**config, "cpu_offload": args.fsdp_offload_params}}
        if args.fsdp_replicas > 1:
            from accelerate.parallelism_config import ParallelismConfig

            sizes = args.fsdp_replicas, int(os.environ["WORLD_SIZE"]) // args.fsdp_replicas
            options["parallelism_config"] = ParallelismConfig(dp_replicate_size=sizes[0], dp_shard_size=sizes[1])
    dtype = dtype_name(args)
    return {
        **options,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "accelerator_config": {"use_configured_state": True},
    }


def _make_fsdp_state() -> None:
    """Make accelerate offer FSDP, on CPUs too."""
    import torch
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.accelerator.is_available():
        PartialState()
    else:  # accelerate offers FSDP to several accelerators only; torch's works as well over gloo
        PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU
