"""Settings of a GRPO training step beyond transformers' TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.rl.correction import CorrectionMode, SequenceRatio
from swift.rl.losses import LossConfig
from swift.trainers.grpo.entropy import EntropySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Importance weights of tokens for the mismatch between sampler and trainer (`swift.rl.correction`)."""

    mode: CorrectionMode = "none"
    threshold: float = 2.0
    lower: float = 0.0
    sequence_ratio: SequenceRatio = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSettings:
    """Distillation in place of the policy gradient (`swift.trainers.gkd.loss`).

    beta: of the divergence. sft_alpha: weight of the cross-entropy of given answers. top_k: number of likeliest tokens
    of the teacher that are told apart; None: all.
    """

    beta: float
    sft_alpha: float = 0.0
    top_k: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings:
    """Settings of a GRPO training step beyond transformers' TrainingArguments.

    per_device: completions of a nominal micro-batch, for losses that average over these. max_samples, max_tokens:
        maximum completions and tokens of a micro-batch; max_tokens None: as many as fit the device's memory.
    keep_dropout: whether dropout is on in training forward passes; old log-probs then need an evaluation pass.
    skip_zero_advantage: whether samples without a gradient are left out; the normaliser counts them in any case.
    comparable_sampling: whether the sampler draws from the trainer's own distribution (no truncation, no penalty).
    correctable_sampling: whether the sampler's log-probs are at the training temperature. Then their ratio to the
        trainer's can weigh tokens; the weights are biased without comparable_sampling.
    correction: the importance weights for that ratio. log_offpolicy: whether to log more than the ratios, which are
        logged with correctable_sampling.
    off_policy_delta: mask sequences of negative advantage that have drifted further than this; None is off.
    old_logprobs: the denominator of the policy ratio: the trainer's log-probs at the start of the batch, or the
        sampler's (the ratio of the Atropos example trainer), which need no forward pass.
    entropy: bonus, top-entropy mask, logs.
    ce_coef: weight of the cross-entropy of `RolloutBatch.references`, a mean over their tokens; None outside of EBFT.
    rl_coef: factor of the advantages in EBFT.
    teacher_kl_coef: weight of the teacher's log-ratio in the advantages of tokens; 0 is off.
    distillation: a loss that replaces the policy gradient; None outside of GKD.
    router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts; 0 is off.
    router_replay: whose experts training passes of a mixture use (`swift.trainers.grpo.routes`).
    """

    loss: LossConfig
    temperature: float
    max_completion_length: int
    per_device: int
    max_samples: int | None = None
    max_tokens: int | None = None
    keep_dropout: bool = False
    skip_zero_advantage: bool = True
    comparable_sampling: bool = True
    correctable_sampling: bool = True
    correction: CorrectionSettings = CorrectionSettings()
    log_offpolicy: bool = False
    off_policy_delta: float | None = None
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    entropy: EntropySettings = field(default_factory=EntropySettings)
    ce_coef: float | None = None
    rl_coef: float = 1.0
    teacher_kl_coef: float = 0.0
    distillation: DistillationSettings | None = None
    router_aux_loss_coef: float = 0.0
    router_replay: Literal["off", "rollout", "trainer"] = "off"
