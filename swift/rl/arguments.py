"""Settings of the objective: advantages, loss, KL, corrections, and which groups are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from swift.flags import flag
from swift.rl.losses import loss_problems

ASYNCHRONOUS = "Asynchronous and data"
CORRECTS = "rollout_importance_sampling_mode=token_truncate|token_mask|sequence_truncate|sequence_mask"


@dataclass(kw_only=True)
class ObjectiveArguments:
    """From rewards to the loss."""

    GROUP: ClassVar[str] = "Objective"

    preset: Literal["none"] = flag("none", everyday=False, registry="presets")
    """Paper whose values the objective takes. Flags override them."""

    beta: float = flag(0.04, at_least=0, aliases=("kl_coef",))
    """Weight of the KL to the reference model (k3). 0 needs no reference."""

    teacher_kl_coef: float = flag(1.0, above=0, everyday=False, needs="teacher_model")
    """Weight of the teacher's log-prob less the policy's in the advantage of a token."""

    rollout_kl_coef: float = flag(0.0, at_least=0, everyday=False)
    """Weight of the KL (k3) to the policy that sampled, by its own log-probs."""

    loss_type: str = flag("grpo", registry="losses")
    """Objective and normaliser."""

    epsilon: float = flag(0.2, at_least=0, aliases=("clip_eps",))
    """Lower clip range of the ratio."""

    epsilon_high: float | None = flag(at_least=0)
    """Upper clip range of the ratio; 0.28 in DAPO (arXiv:2503.14476). For cispo the cap of the ratio, at least 1 and
    required (5.0 in arXiv:2510.13786)."""

    delta: float | None = flag(above=1, everyday=False, unset="off")
    """Cap of the unclipped ratio (two-sided clip, arXiv:2505.07291), above 1 + epsilon_high."""

    num_iterations: int = flag(1, at_least=1, resume="fixed")
    """Number of passes over each generation batch (mu)."""

    advantage_estimator: str = flag("grpo", everyday=False, registry="advantages", resume="fixed")
    """Baseline of a reward."""

    scale_rewards: Literal["group", "batch", "population", "none", "gdpo"] | None = flag(
        aliases=("advantage_norm",), values={"true": "group", "false": "none"}
    )
    """Divisor of an advantage: standard deviation of the group, of the batch, of the group as a population (ddof 0), or
    none. gdpo normalises each reward function."""

    kl_in_reward: bool | None = flag(needs="beta", everyday=False)
    """Whether the KL is subtracted from the reward instead of added to the loss."""

    importance_sampling_level: Literal["token", "sequence", "sequence_token"] | None = flag(everyday=False)
    """Level of the ratio: each token, or the sequence."""

    overlong_filter: bool = flag(False, aliases=("mask_truncated_completions",))
    """Whether completions cut at max_completion_length are left out of the loss, but not of group statistics."""

    dynamic_sample: bool = flag(False, resume="fixed")
    """Whether zero-variance groups are replaced by new ones (DAPO)."""

    max_resample_times: int = flag(3, at_least=0, everyday=False, needs="dynamic_sample")
    """Maximum extra launches per generation batch, as a multiple of its groups."""

    log_entropy: bool | None = flag(
        everyday=False, unset="every 10 steps, or each where it costs nothing", resume="free"
    )
    """Whether the policy's entropy at the sampling temperature is logged in each step."""

    top_entropy_quantile: float = flag(1.0, above=0, at_most=1, everyday=False)
    """Share of tokens to train on, those of highest entropy (0.2 in arXiv:2506.01939). May need one more forward
    pass."""

    rollout_importance_sampling_mode: (
        Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = flag(aliases=("vllm_importance_sampling_mode",), everyday=False)
    """Correction for differences between engine and trainer: weights per token or sequence, truncated or masked at the
    threshold."""

    vllm_importance_sampling_correction: bool | None = flag(everyday=False, unset="the mode alone decides")
    """TRL's switch of the correction. false is `--rollout_importance_sampling_mode none`; true is token_truncate unless
    a mode is given."""

    rollout_importance_sampling_threshold: float = flag(
        2.0,
        above=0,
        aliases=("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
        needs=CORRECTS,
        everyday=False,
    )
    """Upper bound of the correction's weights."""

    rollout_importance_sampling_lower: float = flag(
        0.0, at_least=0, aliases=("vllm_importance_sampling_clip_min",), needs=CORRECTS, everyday=False
    )
    """Lower bound of the correction's weights."""

    rollout_importance_sampling_ratio: Literal["mean", "sum"] = flag(
        "mean", needs="rollout_importance_sampling_mode=sequence_truncate|sequence_mask", everyday=False
    )
    """Length rule of the sequence ratio."""

    old_logprobs: Literal["trainer", "sampler"] = flag(
        "trainer", aliases=("atropos_ratio",), values={"rollout": "sampler"}, everyday=False
    )
    """Source of the old log-probs: the policy when it starts on a batch (arXiv:2505.24298), or those recorded at
    sampling."""

    moe_router_replay: Literal["off", "rollout", "trainer"] = flag(
        "off",
        aliases=("router_replay_mode",),
        values={"disabled": "off", "false": "off", "r2": "trainer", "r3": "rollout"},
        everyday=False,
        resume="fixed",
    )
    """Experts of a mixture in forward passes of the trainer: its own choice; that of the rollout engine (R3,
    arXiv:2510.11370); or that of the trainer's first pass over a completion (R2). Gate weights are those of the current
    router."""

    log_rollout_offpolicy_metrics: bool = flag(False, everyday=False, resume="free")
    """Whether log-probs are logged by the sign of the advantage (`logp/...`)."""

    off_policy_sequence_mask_delta: float | None = flag(
        aliases=("off_policy_mask_threshold",), everyday=False, unset="off"
    )
    """Distance from the policy beyond which sequences of negative advantage are masked (arXiv:2512.02556)."""

    sync_ref_model: bool = flag(False, everyday=False, resume="fixed")
    """Whether the reference model moves towards the policy (arXiv:2404.09656). With LoRA it gets a copy of the
    adapter."""

    ref_model_sync_steps: int = flag(512, at_least=1, everyday=False, needs="sync_ref_model")
    """Number of steps between two updates of a reference model that follows the policy."""

    ref_model_mixup_alpha: float = flag(0.6, at_least=0, at_most=1, everyday=False, needs="sync_ref_model")
    """Share of the policy in an update of a reference model that follows it; the rest is the reference model."""

    kl_bias_correction: bool = flag(False, aliases=("use_bias_correction_kl",), everyday=False)
    """Whether the KL penalty of a token is multiplied by its probability ratio of new to old policy, for an
    unbiased gradient (arXiv:2512.02556)."""

    entropy_coef: float = flag(0.0, at_least=0, everyday=False)
    """Weight of the entropy bonus in the loss."""

    use_adaptive_entropy: bool = flag(False, everyday=False)
    """Whether a controller steers the entropy bonus towards a target (arXiv:2505.22312)."""

    entropy_target: float = flag(0.2, at_least=0, everyday=False, needs="use_adaptive_entropy")
    """Entropy per token, in nats, that the adaptive entropy bonus aims at."""

    entropy_coef_min: float = flag(0.0, at_least=0, everyday=False, needs="use_adaptive_entropy")
    """Minimum weight of the adaptive entropy bonus."""

    entropy_coef_max: float = flag(1.0, at_least=0, everyday=False, needs="use_adaptive_entropy")
    """Maximum weight of the adaptive entropy bonus."""

    entropy_coef_delta: float = flag(0.005, at_least=0, everyday=False, needs="use_adaptive_entropy")
    """Change per step of the weight of the adaptive entropy bonus."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] | None = flag(everyday=False)
    """Order of summing and normalising several rewards. normalize_then_sum is `--scale_rewards gdpo`."""

    prefetch_depth: int = flag(1, at_least=1, group=ASYNCHRONOUS, everyday=False, needs="async_generate")
    """Number of generation batches sampled ahead. More than 1 helps only with `--vllm_sync_interval` above 1 or
    `--in_flight_updates`; at most 1 with `--dynamic_sample`."""

    vllm_sync_interval: int = flag(
        1, at_least=1, aliases=("vllm_restart_interval",), group=ASYNCHRONOUS, everyday=False
    )
    """Number of optimizer steps between two weight syncs."""

    max_staleness: int | None = flag(
        at_least=0, group=ASYNCHRONOUS, everyday=False, unset="the bound that depth and interval imply"
    )
    """Maximum number of optimizer steps between sampling and training."""

    in_flight_updates: bool = flag(False, group=ASYNCHRONOUS, everyday=False, needs="async_generate")
    """Whether weights are swapped between the tokens of running completions."""

    streaming_partial_batch: bool = flag(False, group=ASYNCHRONOUS, everyday=False)
    """Whether scored groups are trained while others are sampled."""

    streaming_min_groups: int = flag(1, at_least=1, group=ASYNCHRONOUS, everyday=False, needs="streaming_partial_batch")
    """Minimum number of scored groups to train on."""

    skip_zero_advantage_batches: bool = flag(True, group=ASYNCHRONOUS, everyday=False)
    """Whether completions without advantage skip forward and backward, where that changes nothing."""

    replay_buffer_size: int = flag(0, at_least=0, group=ASYNCHRONOUS, everyday=False)
    """Number of groups kept to replace zero-variance groups. 0 is off."""

    replay_recompute_logps: bool = flag(True, group=ASYNCHRONOUS, everyday=False, needs="replay_buffer_size")
    """Whether old log-probs of replayed groups are recomputed."""

    replay_max_age: int = flag(32, at_least=1, group=ASYNCHRONOUS, everyday=False, needs="replay_buffer_size")
    """Maximum age of a stored group, in optimizer steps."""

    reroll_start_fraction: float = flag(1.0, at_least=0, at_most=1, group=ASYNCHRONOUS, everyday=False)
    """Share of the run after which prompts that always failed are sampled again. 1.0 is off."""

    reroll_max_groups: int = flag(1, at_least=1, group=ASYNCHRONOUS, needs="reroll_start_fraction<1", everyday=False)
    """Maximum number of re-rolled prompts per generation batch."""

    reroll_fail_reward: float = flag(0.0, group=ASYNCHRONOUS, needs="reroll_start_fraction<1", everyday=False)
    """Reward up to which a completion counts as failed."""

    def problems(self) -> Iterator[str]:
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
        correction = self.vllm_importance_sampling_correction
        if correction is not None and correction == (self.rollout_importance_sampling_mode == "none"):
            yield (
                f"--vllm_importance_sampling_correction: {str(correction).lower()}: contradicts "
                f"--rollout_importance_sampling_mode {self.rollout_importance_sampling_mode}; drop one of the two"
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
        if self.use_adaptive_entropy or self.entropy_coef_min > self.entropy_coef_max:
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
