"""The settings of `swift rlhf --rlhf_type ebft`: energy-based fine-tuning (arXiv:2603.12248)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from swift.arguments.rlhf import RLHFArguments
from swift.flags import flag

STRUCTURED, STRIDED = "ebft_mode=structured", "ebft_mode=strided"

REPLACED = {
    "advantage_estimator": "--ebft_advantage_estimator rloo, group_norm or reinforce",
    "scale_rewards": "--ebft_advantage_estimator group_norm for a standard deviation",
    "reward_weights": "--ebft_alignment_coef and --ebft_diversity_coef; reward functions are logged only",
    "multi_objective_aggregation": "leave it out",
    "kl_in_reward": "leave it out: --beta adds the KL to the loss",
    "dynamic_sample": "--dynamic_sample false: feature rewards are known after the whole batch",
    "streaming_partial_batch": "--streaming_partial_batch false: feature rewards are known after the whole batch",
    "replay_buffer_size": "--replay_buffer_size 0: each rollout has one update",
    "reroll_start_fraction": "--reroll_start_fraction 1: no feature reward is a failure",
    "use_env_advantages": "--use_env_advantages false",
    "teacher_model": "leave it out: features give the rewards",
    "num_iterations": "--num_iterations 1: each rollout has one update",
    "top_entropy_quantile": "--top_entropy_quantile 1.0: all tokens are trained on",
    "epsilon": "leave it out: with one update of each rollout the ratio is 1",
    "epsilon_high": "leave it out: with one update of each rollout the ratio is 1",
    "delta": "leave it out: with one update of each rollout the ratio is 1",
    "importance_sampling_level": "leave it out: with one update of each rollout the ratio is 1",
    "old_logprobs": "--old_logprobs trainer",
    "moe_router_replay": "--moe_router_replay off: it has been tried with GRPO only",
    "rollout_func": "leave it out: features need the tokens of the engine",
    "rollout_source": "--rollout_source engine: others bring rewards of their own",
    "preset": "leave it out",
}
"""Settings of GRPO that have no meaning in EBFT, and what to use instead."""


@dataclass(kw_only=True)
class FeatureArguments:
    """Features, rewards and coefficients of EBFT, and its two modes."""

    GROUP: ClassVar[str] = "Energy-based fine-tuning"

    ebft_mode: Literal["structured", "strided"] = flag("structured", resume="fixed")
    """Source of the samples: completions of prompts with a reference (structured), or blocks of plain text that the
    trainer samples itself (strided)."""

    ebft_feature_layers: list[float] = flag(
        [0.25, 0.5, 0.75], above=0, at_most=1, aliases=("feature_layers",), resume="fixed"
    )
    """Depths of the layers whose hidden states are features, as shares of the number of layers."""

    ebft_embed_method: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = flag(
        "last_token", aliases=("embed_method",), resume="fixed"
    )
    """Pooling over tokens: the last one; the mean over the whole sequence (strided: over the block); the mean over the
    completion; or the tokens at a quarter, half and three quarters of it, side by side."""

    ebft_feature_norm: Literal["concat", "per_layer"] = flag("concat", everyday=False, resume="fixed")
    """L2 norm of a token's features: over all layers, or over each layer."""

    ebft_whitening: Literal["none", "pooled", "group"] = flag(
        "none", aliases=("ebft_use_whitening", "use_whitening"), values={"true": "pooled", "false": "none"}
    )
    """Whitening of features: by the references of the generation batch (pooled), or by the samples of each group
    (group), which makes the diversity 0 unless samples are almost equal."""

    ebft_whitening_shrinkage: float = flag(
        0.1, above=0, at_most=1, everyday=False, needs="ebft_whitening=pooled", strict=True
    )
    """Share of the identity in the covariance of pooled whitening."""

    ebft_alignment_coef: float = flag(1.0, at_least=0, aliases=("alignment_coef",))
    """Weight of the alignment with the reference."""

    ebft_diversity_coef: float = flag(1.0, at_least=0, aliases=("diversity_coef",))
    """Weight of the similarity to the other samples of a group, which lowers the reward."""

    ebft_advantage_estimator: Literal["rloo", "group_norm", "reinforce"] = flag("rloo")
    """Advantage: less the leave-one-out mean, over the group's standard deviation, or the reward itself."""

    ebft_rl_coef: float = flag(1.0, at_least=0, aliases=("rl_coef",))
    """Weight of the policy gradient."""

    ebft_ce_coef: float = flag(0.0, at_least=0, aliases=("ce_coef",))
    """Weight of the cross-entropy of references (strided: of documents), as a mean over their tokens. The paper uses 0,
    0.03 and 0.1."""

    ebft_adaptive_max_tokens: bool = flag(True, aliases=("adaptive_max_tokens",), needs=STRUCTURED, strict=True)
    """Whether a completion is at most `--ebft_gt_length_multiplier` times as long as its reference, but at least 64
    tokens, and at most `--max_completion_length`."""

    ebft_gt_length_multiplier: float = flag(
        1.5, above=0, aliases=("gt_length_multiplier",), needs=STRUCTURED, strict=True, everyday=False
    )
    """Maximum length of a completion, as a multiple of its reference."""

    ebft_stride: int = flag(8, at_least=1, aliases=("stride",), needs=STRIDED, strict=True, resume="fixed")
    """Distance between the starts of two blocks, in tokens."""

    ebft_context_length: int = flag(
        8, at_least=1, aliases=("context_length",), needs=STRIDED, strict=True, resume="fixed"
    )
    """Number of tokens before the first block. Each block sees all of its document before it."""

    ebft_generate_max_len: int = flag(
        8, at_least=1, aliases=("generate_max_len",), needs=STRIDED, strict=True, resume="fixed"
    )
    """Length of a block in tokens."""

    ebft_n_samples_per_prompt: int = flag(4, at_least=1, aliases=("n_samples_per_prompt",), needs=STRIDED, strict=True)
    """Number of samples of each block."""

    ebft_temperature: float = flag(0.6, at_least=0.01, needs=STRIDED, strict=True)
    """Sampling temperature of blocks. Structured mode uses `--temperature`."""

    ebft_top_p: float = flag(1.0, above=0, at_most=1, needs=STRIDED, strict=True, everyday=False)
    """Nucleus of the samples of blocks. Structured mode uses `--top_p`."""

    ebft_min_completion_prefix: int = flag(
        0, at_least=0, aliases=("min_completion_prefix",), needs=STRIDED, strict=True, everyday=False, resume="fixed"
    )
    """Number of tokens after the prompt of a document before its first block."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if not self.ebft_feature_layers:
            yield "--ebft_feature_layers: none: features come from at least one layer; give depths, e.g. 0.25 0.5 0.75"
        if not (self.ebft_alignment_coef or self.ebft_diversity_coef) and self.ebft_rl_coef:
            yield "--ebft_alignment_coef: 0: with --ebft_diversity_coef 0 no sample has a reward; raise one of them"
        if not (self.ebft_rl_coef or self.ebft_ce_coef):
            yield "--ebft_rl_coef: 0: with --ebft_ce_coef 0 there is no loss; raise one of them"

    def notes(self) -> Iterator[str]:
        """Remarks about settings that work but should be known about."""
        if self.ebft_whitening == "group" and self.ebft_diversity_coef:
            yield (
                "--ebft_whitening: group: makes independent samples orthogonal, so --ebft_diversity_coef acts on "
                "near-duplicates only; ebft/rank_deficient_frac is their share"
            )


@dataclass(kw_only=True)
class EBFTArguments(RLHFArguments, FeatureArguments):
    """`swift rlhf --rlhf_type ebft`: energy-based fine-tuning."""

    SEES: ClassVar[bool] = False
    REPLACED: ClassVar[dict[str, str]] = REPLACED

    beta: float = flag(0.0, at_least=0, aliases=("kl_coef",), group="Objective")
    """Weight of the KL to the reference model (k3). 0 needs no reference."""

    loss_type: Literal["dapo", "grpo", "dr_grpo"] = flag(  # type: ignore[assignment]
        "dapo", everyday=False, group="Objective"
    )
    """Normaliser of the loss, which is REINFORCE's: all tokens of the global batch count alike (dapo), all completions
    do (grpo), or a token counts 1 / `--max_completion_length` (dr_grpo)."""

    truncation_strategy: Literal["left", "right", "delete"] = flag(
        "delete", everyday=False, group="Sampling", resume="fixed"
    )
    """What happens to a row whose prompt is above `--max_length` or whose reference is above
    `--max_completion_length`. No row is cut, so it is left out and counted (delete)."""

    dataset_transform: (
        Literal[
            "opencode", "chat_multiturn", "chat_multiturn_last", "chat_multiturn_all", "reasoning",
            "reasoning_split_thinking", "reasoning_answer_only",
        ]
        | None
    ) = flag(group="Data", unset="rows have a prompt and ground_truth", resume="fixed")  # fmt: skip
    """Rows of other formats as prompts with a reference."""

    @property
    def needs_reward(self) -> bool:
        """Features give the rewards."""
        return False

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if self.truncation_strategy != "delete":
            yield f"--truncation_strategy: {self.truncation_strategy}: EBFT cuts no row; leave it out, or use delete"
        if not self.ebft_adaptive_max_tokens and self.ebft_gt_length_multiplier != 1.5:
            yield (
                f"--ebft_gt_length_multiplier: {self.ebft_gt_length_multiplier:g}: no effect with "
                "--ebft_adaptive_max_tokens false; leave one of them out"
            )
