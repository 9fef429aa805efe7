"""Settings of the objective: advantages, loss, KL, corrections, and which groups are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from swift.flags import flag
from swift.rl.losses import loss_problems

ASYNCHRONOUS = "Asynchronous and data"


@dataclass(kw_only=True)
class ObjectiveArguments:
    """From rewards to the loss."""

    GROUP: ClassVar[str] = "Objective"

    preset: Literal[
        "none", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "luspo", "vespo", "rloo", "reinforce_plus_plus",
        "gdpo",
    ] = flag("none", everyday=False)  # fmt: skip
    """Values of a paper for the objective, each of which a file, the environment or the command line overrides. The
    plan of a run prints them with their sources."""

    beta: float = flag(0.04, at_least=0)
    """Weight of the KL to the reference model (k3); 0 needs no reference and saves its forward pass."""

    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo", "gspo"] = flag("dapo")
    """How the losses of tokens become one number. dapo: sum / trained tokens of the whole optimizer step. grpo:
    mean of sequence means. bnpo: token mean of each micro-batch. dr_grpo: sum / (completions x
    max_completion_length). cispo caps the ratio at epsilon_high; sapo gates it smoothly; gspo and luspo use the
    ratio of whole sequences."""

    epsilon: float = flag(0.2, at_least=0)
    """Clip range of the ratio below 1."""

    epsilon_high: float | None = flag(at_least=0)
    """Clip range of the ratio above 1. DAPO (arXiv:2503.14476) uses 0.28. For cispo it is the cap on the ratio
    itself, at least 1, and must be given (5.0 in arXiv:2510.13786)."""

    delta: float | None = flag(above=1, everyday=False, unset="off")
    """Cap of the unclipped ratio (two-sided clip, arXiv:2505.07291); above 1 + epsilon_high."""

    num_iterations: int = flag(1, at_least=1)
    """Passes over each generation batch, the mu of the paper."""

    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = flag("grpo", everyday=False)
    """What a completion's reward is compared with: the group's mean, or the mean of the others (rloo)."""

    scale_rewards: Literal["group", "batch", "none", "gdpo"] | None = flag(values={"true": "group", "false": "none"})
    """What an advantage is divided by: the group's standard deviation, the batch's, or nothing. gdpo normalises
    each reward function on its own."""

    kl_in_reward: bool | None = flag(everyday=False)
    """Subtract the KL from the reward instead of adding it to the loss."""

    importance_sampling_level: Literal["token", "sequence", "sequence_token"] | None = flag(everyday=False)
    """Whether each token or the whole sequence has a ratio."""

    overlong_filter: bool = flag(False)
    """Leave completions cut at max_completion_length out of the loss; they still count in group statistics."""

    dynamic_sample: bool = flag(False)
    """Replace groups whose rewards are all equal by newly sampled ones (DAPO)."""

    max_resample_times: int = flag(3, at_least=0, everyday=False, needs="dynamic_sample")
    """Most extra launches per generation batch, as a multiple of its groups."""

    log_entropy: bool = flag(False, everyday=False)
    """Log the entropy of the policy at the temperature of sampling, over the tokens that are passed through."""

    top_entropy_quantile: float = flag(1.0, above=0, at_most=1, everyday=False)
    """Train on this share of the tokens of a step, those of the highest entropy (0.2 in arXiv:2506.01939); 1.0 is all.
    Where a step has several passes or processes, it costs a forward pass more."""

    rollout_importance_sampling_mode: (
        Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = flag(everyday=False)
    """Correction for differences between engine and trainer: weights per token or sequence, truncated or masked
    at the threshold."""

    rollout_importance_sampling_threshold: float = flag(2.0, above=0, everyday=False)
    """Upper bound of the correction's weights."""

    rollout_importance_sampling_lower: float = flag(0.0, at_least=0, everyday=False)
    """Lower bound of the correction's weights."""

    rollout_importance_sampling_ratio: Literal["mean", "sum"] = flag("mean", everyday=False)
    """Length rule of the sequence ratio."""

    old_logprobs: Literal["trainer", "sampler"] = flag("trainer", everyday=False)
    """What the ratio compares the policy with. trainer: its own log-probs when it starts on a batch
    (arXiv:2505.24298). sampler: those recorded at sampling, whatever weights those were; then the ratio alone bears the
    difference between engine and trainer, so it excludes `--rollout_importance_sampling_mode`."""

    log_rollout_offpolicy_metrics: bool = flag(False, everyday=False)
    """Log the policy's log-probs by the sign of the advantage too (`logp/...`), and end the run where the sampler's are
    missing. How far engine and trainer are apart (`rollout_ratio/...`) is always logged."""

    off_policy_sequence_mask_delta: float | None = flag(everyday=False, unset="off")
    """Mute sequences of negative advantage that are further than this from the policy (arXiv:2512.02556)."""

    sync_ref_model: bool = flag(False, everyday=False)
    """Move the reference model towards the policy from time to time (arXiv:2404.09656). With LoRA the reference gets a
    copy of the adapter for it."""

    ref_model_sync_steps: int = flag(512, at_least=1, everyday=False, needs="sync_ref_model")
    """Steps between two moves of the reference model."""

    ref_model_mixup_alpha: float = flag(0.6, at_least=0, at_most=1, everyday=False, needs="sync_ref_model")
    """Share of the policy in the moved reference model."""

    tau_pos: float = flag(1.0, above=0, everyday=False, needs="loss_type=sapo")
    """sapo: temperature of the gate where the advantage is positive."""

    tau_neg: float = flag(1.05, above=0, everyday=False, needs="loss_type=sapo")
    """sapo: temperature of the gate elsewhere."""

    kl_bias_correction: bool = flag(False, aliases=("use_bias_correction_kl",), everyday=False)
    """Multiply the KL term by the token's ratio, which makes its gradient unbiased (arXiv:2512.02556)."""

    entropy_coef: float = flag(0.0, at_least=0, everyday=False)
    """Weight of the entropy bonus."""

    use_adaptive_entropy: bool = flag(False, everyday=False)
    """Steer the weight of the entropy bonus towards a target entropy (arXiv:2505.22312)."""

    entropy_target: float = flag(0.2, at_least=0, everyday=False, needs="use_adaptive_entropy")
    """Entropy per token, in nats, that the controller aims at."""

    entropy_coef_min: float = flag(0.0, at_least=0, everyday=False, needs="use_adaptive_entropy")
    """Smallest weight the controller sets."""

    entropy_coef_max: float = flag(1.0, at_least=0, everyday=False, needs="use_adaptive_entropy")
    """Largest weight the controller sets."""

    entropy_coef_delta: float = flag(0.005, at_least=0, everyday=False, needs="use_adaptive_entropy")
    """Change of the weight per step."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] | None = flag(everyday=False)
    """Add up the rewards and normalise the sum, or normalise each; the latter is `--scale_rewards gdpo`."""

    prefetch_depth: int = flag(1, at_least=1, group=ASYNCHRONOUS, everyday=False, needs="async_generate")
    """Generation batches made ahead. More than 1 pays only where weights are published less often than batches are made
    (`--vllm_sync_interval`), or with `--in_flight_updates true`; else each batch waits for the one before it. With
    `--dynamic_sample` it is 1 at most."""

    vllm_sync_interval: int = flag(1, at_least=1, group=ASYNCHRONOUS, everyday=False)
    """Optimizer steps between two publications of the weights."""

    max_staleness: int | None = flag(
        at_least=0, group=ASYNCHRONOUS, everyday=False, unset="the bound that depth and interval imply"
    )
    """Most optimizer steps between sampling and training."""

    in_flight_updates: bool = flag(False, group=ASYNCHRONOUS, everyday=False, needs="async_generate")
    """Swap weights between the tokens of running completions."""

    streaming_partial_batch: bool = flag(False, group=ASYNCHRONOUS, everyday=False)
    """Train on scored groups while others are still sampled."""

    streaming_min_groups: int = flag(1, at_least=1, group=ASYNCHRONOUS, everyday=False, needs="streaming_partial_batch")
    """Scored groups needed before a partial batch is trained."""

    skip_zero_advantage_batches: bool = flag(True, group=ASYNCHRONOUS, everyday=False)
    """Spare completions without advantage their forward and backward pass where that changes nothing."""

    replay_buffer_size: int = flag(0, at_least=0, group=ASYNCHRONOUS, everyday=False)
    """Groups kept to fill slots of groups that teach nothing; 0 is off."""

    replay_recompute_logps: bool = flag(True, group=ASYNCHRONOUS, everyday=False, needs="replay_buffer_size")
    """Compute the old log-probs of replayed groups anew."""

    replay_max_age: int = flag(32, at_least=1, group=ASYNCHRONOUS, everyday=False, needs="replay_buffer_size")
    """Optimizer steps after which a stored group is forgotten."""

    reroll_start_fraction: float = flag(1.0, at_least=0, at_most=1, group=ASYNCHRONOUS, everyday=False)
    """Share of the run after which prompts that always failed are tried again; 1.0 is off."""

    reroll_max_groups: int = flag(1, at_least=1, group=ASYNCHRONOUS, everyday=False)
    """Prompts tried again per generation batch."""

    reroll_fail_reward: float = flag(0.0, group=ASYNCHRONOUS, everyday=False)
    """Reward up to which a completion counts as failed."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        yield from (f"--{line}" for line in loss_problems(self))
        if self.scale_rewards is not None and self.multi_objective_aggregation is not None:
            normalises_each = self.multi_objective_aggregation == "normalize_then_sum"
            if normalises_each != (self.scale_rewards == "gdpo"):
                yield (
                    f"--multi_objective_aggregation: {self.multi_objective_aggregation}: contradicts "
                    f"--scale_rewards {self.scale_rewards}; normalize_then_sum goes with gdpo, "
                    f"sum_then_normalize with group, batch, none"
                )
        if self.rollout_importance_sampling_lower > self.rollout_importance_sampling_threshold:
            yield (
                f"--rollout_importance_sampling_lower: {self.rollout_importance_sampling_lower:g}: above "
                f"--rollout_importance_sampling_threshold {self.rollout_importance_sampling_threshold:g}; lower it"
            )
        if self.old_logprobs == "sampler" and self.rollout_importance_sampling_mode not in (None, "none"):
            yield (
                f"--old_logprobs: sampler: the ratio compares with the sampler already, so --rollout_importance_"
                f"sampling_mode {self.rollout_importance_sampling_mode} would correct nothing; drop one of the two"
            )
        if self.sync_ref_model and self.beta == 0:
            yield "--sync_ref_model: true: there is no reference with --beta 0; raise --beta, or drop --sync_ref_model"
        if self.kl_bias_correction and self.beta == 0:
            yield "--kl_bias_correction: true: there is no KL with --beta 0; raise --beta, or drop --kl_bias_correction"
        if self.kl_bias_correction and self.kl_in_reward and self.beta > 0:
            yield (
                "--kl_bias_correction: true: the KL is in the reward, and the loss has none; --kl_in_reward false, or "
                "drop --kl_bias_correction"
            )
        yield from self._entropy_problems()

    def _entropy_problems(self) -> Iterator[str]:
        if self.use_adaptive_entropy and not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            yield (
                f"--entropy_coef: {self.entropy_coef:g}: the controller starts there, and its bounds are "
                f"--entropy_coef_min {self.entropy_coef_min:g} and --entropy_coef_max {self.entropy_coef_max:g}"
            )
        if self.entropy_coef_min > self.entropy_coef_max:
            yield (
                f"--entropy_coef_min: {self.entropy_coef_min:g}: above --entropy_coef_max "
                f"{self.entropy_coef_max:g}; lower it"
            )
