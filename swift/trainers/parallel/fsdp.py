"""Training with torch's FSDP2 (`--fsdp`): checks and accelerate's process state."""

from __future__ import annotations

import logging
from typing import Any

from swift.errors import join_problems


def require_fsdp(args: Any) -> None:
    """Checks `--fsdp` before anything is loaded.

    Raises:
        ConfigError: it does not go together with other settings.
    """
    if not args.fsdp:
        return
    problems = []
    if args.deepspeed:
        problems.append(f"--fsdp: {args.fsdp}: both shard the model, as does --deepspeed {args.deepspeed}; drop one")
    if dtype_name(args) == "float16":
        problems.append("--torch_dtype: float16: its loss scaling does not go with --fsdp; use --torch_dtype bfloat16")
    if args.gradient_checkpointing and args.gradient_checkpointing_kwargs.get("use_reentrant"):
        problems.append("--gradient_checkpointing_kwargs: use_reentrant: gathers out of order with --fsdp; drop it")
    join_problems(problems)


def fsdp_options(args: Any) -> dict[str, Any]:
    """The entries of TrainingArguments for it."""
    make_fsdp_state()
    logging.getLogger("transformers.training_args").addFilter(_not_about_checkpointing)
    # gathers again in the backward pass, or keeps what the forward pass gathered
    return {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": args.fsdp == "full_shard"}}


def _not_about_checkpointing(record: logging.LogRecord) -> bool:
    """Drops a hint at a setting of accelerate that swift does not have."""
    return "activation_checkpointing" not in record.getMessage()


def make_fsdp_state() -> None:
    """Make accelerate offer FSDP, on CPUs too."""
    import torch
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.accelerator.is_available():
        PartialState()
    else:  # accelerate offers FSDP to several accelerators only; torch's works as well over gloo
        PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU


def dtype_name(args: Any) -> str:
    """The type that weights are computed in: float32, bfloat16 or float16."""
    from swift.models.policy import pick_dtype

    return str(pick_dtype(args.torch_dtype)).removeprefix("torch.")
