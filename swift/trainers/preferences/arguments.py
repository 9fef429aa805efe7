"""Settings of the preference methods: losses and reference model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.flags import flag

DIVERGENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
"""Losses of the difference of two rewards, in which the partition function of another f-divergence cancels."""


@dataclass(kw_only=True)
class BetaArguments:
    """Settings of every preference loss."""

    GROUP: ClassVar[str] = "Objective"

    beta: float = flag(0.1, above=0)
    """Scale of the implicit reward; lower values allow a larger distance from the reference. ORPO: weight of the odds
    ratio (arXiv:2403.07691). IPO: its tau."""


@dataclass(kw_only=True)
class ReferenceArguments(BetaArguments):
    """Settings of the frozen reference model."""

    ref_model: str | None = flag(group="Model", everyday=False, unset="the model as it starts", resume="fixed")
    """Model or adapter folder of the reference. By default LoRA switches its adapter off, full tuning keeps a copy."""

    precompute_ref_log_probs: bool = flag(False, everyday=False)
    """Whether the reference's log-probs are computed once before training, so that it leaves memory."""

    precompute_ref_batch_size: int | None = flag(
        at_least=1, everyday=False, needs="precompute_ref_log_probs", unset="the batch size of each split"
    )
    """Number of rows per process in a batch of the pass that precomputes the reference's log-probs."""

    sync_ref_model: bool = flag(False, everyday=False, resume="fixed")
    """Whether the reference moves towards the model (TR-DPO, arXiv:2404.09656). Full tuning only."""

    ref_model_sync_steps: int = flag(512, at_least=1, everyday=False, needs="sync_ref_model")
    """Number of steps between two updates of a reference model that follows the policy."""

    ref_model_mixup_alpha: float = flag(0.6, at_least=0, at_most=1, everyday=False, needs="sync_ref_model")
    """Share of the policy in an update of a reference model that follows it; the rest is the reference model."""

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        args: Any = self
        if self.precompute_ref_log_probs and args.streaming:
            yield (
                "--precompute_ref_log_probs: true: a stream has no end that could be reached before training; use "
                "--streaming false, or leave it out"
            )
        if not self.sync_ref_model:
            return
        if args.tuner_type != "full":
            yield (
                f"--sync_ref_model: true: with --tuner_type {args.tuner_type} the reference is the model without its "
                "adapter and cannot move; use --tuner_type full, or --sync_ref_model false"
            )
        if self.precompute_ref_log_probs:
            yield (
                "--precompute_ref_log_probs: true: the log-probs of a reference that moves (--sync_ref_model) cannot "
                "be computed before; drop one"
            )
        if way := "--deepspeed" if args.deepspeed else "--fsdp" if args.fsdp else "":
            yield f"--sync_ref_model: true: a moved reference cannot be saved with {way}; drop one"


@dataclass(kw_only=True)
class DivergenceArguments(ReferenceArguments):
    """Settings of losses of a pair's log-ratios."""

    ld_alpha: float | None = flag(at_least=0, at_most=1, everyday=False, unset="1: all tokens count alike")
    """Weight of the tokens beyond the length that both answers have (LD-DPO, arXiv:2409.06411)."""

    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = flag(
        "reverse_kl", everyday=False
    )
    """Divergence from the reference (f-DPO, arXiv:2309.16240)."""

    f_alpha_divergence_coef: float = flag(0.5, everyday=False, needs="f_divergence_type=alpha_divergence")
    """Alpha of the alpha-divergence."""

    packing: bool = flag(False, group="Data", resume="fixed")
    """Whether pairs are put together to rows of packing_length tokens. A micro-batch of them is a stream of tokens
    without padding, in which the answers of a pair share their prompt; its loss is the mean over its pairs."""

    packing_length: int | None = flag(
        at_least=2, group="Data", needs="packing", everyday=False, unset="max_length", resume="fixed"
    )
    """Length of packed rows in tokens. A prompt counts once, or twice with sequence_parallel_size, which computes it
    twice. A longer pair has a row of its own."""

    padding_free: bool = flag(False, group="Data", everyday=False, resume="fixed")
    """Whether a micro-batch is one stream of tokens, as with packing."""

    def notes(self) -> Iterator[str]:
        """Remarks about settings that work but should be known about."""
        args: Any = self
        if self.packing and not (self.packing_length or args.max_length):
            yield "--packing_length: at most 2048, without --max_length; in ms-swift the model's whole context"

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        args: Any = self
        for name in (name for name in ("packing", "padding_free") if getattr(self, name)):
            if args.torch_compile:
                yield f"--{name}: true: each batch would be compiled anew with --torch_compile true; drop one"
            if args.neftune_noise_alpha:
                yield (
                    f"--{name}: true: the noise of --neftune_noise_alpha {args.neftune_noise_alpha:g} depends on the "
                    "length of padded rows; drop one"
                )
        if self.packing and self.precompute_ref_log_probs:
            yield "--precompute_ref_log_probs: true: not for packed rows; use --padding_free true instead of --packing"


@dataclass(kw_only=True)
class ContrastiveParameters(BetaArguments):
    """Settings of CPO and SimPO."""

    cpo_alpha: float = flag(1.0, at_least=0)
    """Weight of the negative log-likelihood of the chosen answer; 0 is SimPO as in its paper."""

    simpo_gamma: float = flag(1.0, needs="loss_type=simpo")
    """Target margin of SimPO's rewards (arXiv:2405.14734)."""

    label_smoothing: float = flag(0.0, at_least=0, below=0.5, everyday=False)
    """Probability that a preference is wrong."""

    alpha: float = flag(0.0, everyday=False)
    """Shape of the reward (AlphaPO, arXiv:2501.03884); 0 is the log-prob."""
