"""The settings of `swift rlhf --rlhf_type gkd`: generalized knowledge distillation (arXiv:2306.13649)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.arguments.rlhf import RLHFArguments
from swift.flags import flag
from swift.trainers.arguments import EvaluationArguments

TEACHES = "leave it out: the teacher's distributions are the only signal; --rlhf_type grpo --teacher_model adds rewards"
NO_RATIO = "leave it out: the loss is a divergence and has no ratio"
NO_REWARD = "leave it out: there are no rewards"

REPLACED = {
    **dict.fromkeys(("reward_funcs", "reward_model", "reward_weights", "teacher_kl_coef"), TEACHES),
    **dict.fromkeys(
        ("epsilon", "epsilon_high", "delta", "importance_sampling_level", "num_iterations", "old_logprobs",
         "rollout_importance_sampling_mode", "vllm_importance_sampling_correction", "off_policy_sequence_mask_delta",
         "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "rollout_kl_coef", "kl_bias_correction"),
        NO_RATIO),
    **dict.fromkeys(
        ("advantage_estimator", "scale_rewards", "multi_objective_aggregation", "kl_in_reward", "dynamic_sample",
         "replay_buffer_size", "reroll_start_fraction", "use_env_advantages", "preset", "overlong_filter"),
        NO_REWARD),
    "ref_model": "leave it out: --beta is that of the divergence, and there is no reference",
    "sync_ref_model": "leave it out: there is no reference",
    "num_generations": "--num_generations 1: a prompt needs no group",
    "loss_type": "leave it out: all tokens of the global batch count alike",
    "streaming_partial_batch": "--streaming_partial_batch false",
    "router_aux_loss_coef": "--router_aux_loss_coef 0",
    "moe_router_replay": "--moe_router_replay off",
    "rollout_func": "leave it out",
    "rollout_source": "--rollout_source engine: others bring rewards of their own",
}  # fmt: skip
"""Settings of GRPO that have no meaning here, and what to use instead."""


@dataclass(kw_only=True)
class GKDArguments(RLHFArguments, EvaluationArguments):
    """`swift rlhf --rlhf_type gkd`: generalized knowledge distillation."""

    SEES: ClassVar[bool] = True
    REPLACED: ClassVar[dict[str, str]] = REPLACED

    lmbda: float = flag(0.5, at_least=0, at_most=1, group="Objective")
    """Share of the completions that the model samples itself; the others are the answers of the data."""

    beta: float = flag(0.5, at_least=0, at_most=1, group="Objective")
    """Generalized Jensen-Shannon divergence between the forward (0) and the reverse (1) KL."""

    seq_kd: bool = flag(False, group="Objective", everyday=False)
    """Whether the teacher samples the other answers, instead of those of the data."""

    sft_alpha: float = flag(0.0, at_least=0, group="Objective", everyday=False)
    """Weight of the cross-entropy of answers that the model has not sampled, which is added."""

    gkd_logits_topk: int | None = flag(at_least=1, group="Objective", everyday=False, unset="the whole vocabulary")
    """Number of likeliest tokens of the teacher that are compared one by one; all others count as one."""

    num_generations: int = flag(1, at_least=1, group="Sampling", everyday=False)
    """Number of completions per prompt."""

    loss_type: str = flag("dapo", registry="losses", everyday=False, group="Objective")
    """Normaliser of the loss: all tokens of the global batch count alike (dapo)."""

    truncation_strategy: Literal["left", "right", "delete"] = flag("delete", everyday=False, group="Sampling")
    """Treatment of prompts over `--max_length`. A row with its answer is never cut, but left out (delete)."""

    @property
    def needs_reward(self) -> bool:
        """The teacher gives the signal."""
        return False

    def _teacher_problems(self) -> Iterator[str]:
        if not self.has_teacher:
            yield "--teacher_model: missing: required; give a folder or hub id, or --teacher_model_server URL"
        if self.teacher_model and self.teacher_model_server:
            yield (
                f"--teacher_model_server: {self.teacher_model_server}: there is --teacher_model {self.teacher_model}; "
                "give one of the two"
            )
        elsewhere = {"teacher_model_server": self.teacher_model_server, "teacher_device": " ".join(self.teacher_device)}
        for name, value in elsewhere.items():
            if value and self.gkd_logits_topk is None:
                yield f"--{name}: {value}: there only the likeliest tokens are told; give --gkd_logits_topk, e.g. 64"

    @property
    def needs_answers(self) -> bool:
        """Whether answers of the data are trained on."""
        return self.lmbda < 1 and not self.seq_kd

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        args: Any = self
        if self.needs_answers and self.truncation_strategy != "delete":
            yield (
                f"--truncation_strategy: {self.truncation_strategy}: cuts no row with its answer; use delete, or "
                "--lmbda 1"
            )
        if self.seq_kd and self.lmbda == 1:
            yield "--seq_kd: true: --lmbda 1 leaves no answers to the teacher; lower it, or leave --seq_kd out"
        if self.seq_kd and args.async_generate and args.teaches_here:
            yield (
                "--seq_kd: true: a teacher in the trainer's processes cannot sample while they train; --async_generate "
                "false, or --teacher_model_server"
            )
        makers = [name for name in ("multi_turn_scheduler", "gym_env", "rollout_tools") if getattr(args, name)]
        if makers and self.lmbda == 0:
            yield f"--{makers[0]}: given: --lmbda 0 samples nothing; leave it out, or raise --lmbda"
        if self.lmbda == 0 and (args.use_vllm or args.use_lmdeploy):
            backend = "use_vllm" if args.use_vllm else "use_lmdeploy"
            yield f"--{backend}: true: --lmbda 0 samples nothing with the model; leave it out, or raise --lmbda"

    def notes(self) -> Iterator[str]:
        """Remarks about settings that work but should be known about."""
        if self.sft_alpha and self.lmbda == 1:
            yield f"--sft_alpha: {self.sft_alpha:g}: no effect with --lmbda 1: all answers are the model's own"
        if self.gkd_logits_topk is not None and self.beta == 1:
            yield (
                f"--gkd_logits_topk: {self.gkd_logits_topk}: the reverse KL (--beta 1) of the likeliest tokens has no "
                "bound of its error; with --beta below 1 it is logged"
            )
