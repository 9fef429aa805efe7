"""Which way a model is sharded over ranks: `--deepspeed`, `--fsdp`, or not at all."""

from __future__ import annotations

from typing import Any

from swift.errors import ConfigError
from swift.trainers.parallel.deepspeed import deepspeed_config, make_deepspeed_state, stage_of
from swift.trainers.parallel.fsdp import dtype_name, fsdp_options


def require_best_model(args: Any) -> None:
    """Checks that the best checkpoint could be loaded at the end.

    Raises:
        ConfigError: it would hold no state that DeepSpeed or FSDP can load.
    """
    if (args.deepspeed or args.fsdp) and args.save_only_model and args.load_best_model_at_end:
        way = f"--deepspeed {args.deepspeed}" if args.deepspeed else f"--fsdp {args.fsdp}"
        raise ConfigError(
            f"--load_best_model_at_end: true: {way} cannot load checkpoints of --save_only_model true; drop one"
        )


def describe(args: Any) -> str:
    """How the model is sharded, for the plan: ", ZeRO-2", ", FSDP" or nothing."""
    if args.deepspeed:
        return f", ZeRO-{stage_of(args)}"
    return ", FSDP" if args.fsdp else ""


def sharding_options(args: Any) -> dict[str, Any]:
    """The entries of TrainingArguments that `--deepspeed` or `--fsdp` decide; {} without them.

    Accelerate's process state is made here, because on CPUs transformers would not offer either.
    """
    config = deepspeed_config(args)
    if config is None and not args.fsdp:
        return {}
    if config is not None:
        make_deepspeed_state()
    way = {"deepspeed": config} if config is not None else fsdp_options(args)
    dtype = dtype_name(args)
    return {
        **way,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "accelerator_config": {"use_configured_state": True},
    }
