"""What a GRPO step needs to know beyond transformers' TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.rl.correction import CorrectionMode, SequenceRatio
from swift.rl.losses import LossConfig
from swift.trainers.grpo.entropy import EntropySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Weights for tokens that another policy sampled than the one that trains (`swift.rl.correction`)."""

    mode: CorrectionMode = "none"
    threshold: float = 2.0
    lower: float = 0.0
    sequence_ratio: SequenceRatio = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings:
    """What the step needs to know beyond transformers' TrainingArguments.

    per_device: completions of a nominal micro-batch, for losses that average over these. max_samples, max_tokens: most
        completions and most tokens of a micro-batch; without max_tokens the device's memory decides.
    keep_dropout: dropout is on during policy forwards, so old log-probs need an evaluation forward of their own.
    skip_zero_advantage: leave samples out that cannot move the gradient; they count in the normaliser all the same.
    comparable_sampling: the sampler draws from the trainer's own distribution (no truncation, no penalty), so that
        their log-probs can be compared.
    correctable_sampling: its log-probs are at the training temperature, so that their ratio to the trainer's can weigh
        tokens; biased where they are not comparable too.
    correction: weights for tokens that another policy sampled. log_offpolicy: log more about it than the ratios, which
        are logged wherever they are correctable.
    off_policy_delta: mask sequences of negative advantage that have drifted further than this; None is off.
    old_logprobs: what the ratio compares the policy with: the trainer's log-probs at the start of the batch, or those
        that the sampler recorded (the ratio of the Atropos example trainer), for which no forward pass is needed.
    entropy: bonus, choice of tokens, logs.
    ce_coef: weight of the cross-entropy of `RolloutBatch.references`, a mean over their tokens; None outside of EBFT.
    rl_coef: factor that the advantages have in EBFT.
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
