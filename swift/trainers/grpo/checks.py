"""What `swift rlhf` and its dry run refuse once placement, rewards and batch sizes are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, join_problems

if TYPE_CHECKING:
    from swift.rewards.pipeline import RewardPipeline
    from swift.rollout.arithmetic import BatchPlan


def check_run(args: Any, mode: str, rewards: RewardPipeline, plan: BatchPlan) -> None:
    """Refuses settings that the placement, the reward functions or the batch sizes do not allow.

    Args:
        args: settings of `swift rlhf`.
        mode: of the placement: in_process, colocate, dedicated or server.
        rewards: the reward functions.
        plan: the batch sizes.

    Raises:
        ConfigError: with every problem.
    """
    join_problems([*_group_scoring(args, rewards), *_partial_batches(args, mode, plan)])


def prompt_limit(args: Any, context: int | None) -> int | None:
    """`--max_length`: the longest prompt in tokens; by default what the model's context leaves beside the completion.

    Raises:
        ConfigError: the completion fills the context, alone or with `--max_length`.
    """
    if context is None:
        return None if args.max_length is None else int(args.max_length)
    room = context - args.max_completion_length
    if room < 1:
        raise ConfigError(
            f"--max_completion_length: {args.max_completion_length}: leaves no room for a prompt in the model's "
            f"context of {context} tokens; use at most {context - 1}"
        )
    if args.max_length is not None and args.max_length > room:
        raise ConfigError(
            f"--max_length: {args.max_length}: with --max_completion_length {args.max_completion_length} it exceeds "
            f"the model's context of {context} tokens; use at most {room}"
        )
    return room if args.max_length is None else int(args.max_length)


def _group_scoring(args: Any, rewards: RewardPipeline) -> Iterator[str]:
    if (args.dynamic_sample or args.streaming_partial_batch) and rewards.needs_whole_batch:
        flag = "dynamic_sample" if args.dynamic_sample else "streaming_partial_batch"
        names = [one.name for one in rewards.signatures if one.scope == "batch"]
        yield (
            f"--{flag}: true: groups are scored one by one, but {', '.join(names)} must see the whole batch; "
            f"--{flag} false, or a function of scope group"
        )


def _partial_batches(args: Any, mode: str, plan: BatchPlan) -> Iterator[str]:
    if not args.streaming_partial_batch:
        return
    if mode in ("in_process", "colocate"):
        yield (
            "--streaming_partial_batch: true: the rollout engine samples in the trainer's own process, which cannot "
            "train meanwhile; --vllm_mode dedicated or server, or --streaming_partial_batch false"
        )
    if plan.global_batches_per_rollout > 1:
        yield (
            f"--streaming_partial_batch: true: a generation batch of {plan.generation_batch} completions feeds "
            f"{plan.global_batches_per_rollout} optimizer steps, which wait for its end anyway; "
            f"--generation_batch_size {plan.global_batch}, or --streaming_partial_batch false"
        )
