"""What `swift rlhf` and its dry run refuse once placement, rewards and batch sizes are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swift.errors import join_problems

if TYPE_CHECKING:
    from swift.rewards.pipeline import RewardPipeline
    from swift.rollout.arithmetic import BatchPlan


def check_run(args: Any, mode: str, rewards: RewardPipeline, plan: BatchPlan) -> None:
    """Raises ConfigError with all that the placement's mode, the reward functions or the batch sizes do not allow."""
    join_problems([*_group_scoring(args, rewards), *_partial_batches(args, mode, plan)])


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
