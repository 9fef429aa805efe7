"""Settings of the preference methods: losses and reference model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.flags import flag

DPOLoss = Literal[
    "sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
"""The losses of TRL's DPOTrainer."""

SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
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
    """Number of rows per process in a batch of that pass."""

    sync_ref_model: bool = flag(False, everyday=False, resume="fixed")
    """Whether the reference moves towards the model (TR-DPO, arXiv:2404.09656). Full tuning only."""

    ref_model_sync_steps: int = flag(512, at_least=1, everyday=False, needs="sync_ref_model")
    """Number of steps between two moves."""

    ref_model_mixup_alpha: float = flag(0.6, at_least=0, at_most=1, everyday=False, needs="sync_ref_model")
    """Share of the model in a move."""

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


@dataclass(kw_only=True)
class DPOParameters(DivergenceArguments):
    """DPO (arXiv:2305.18290) and the losses that share its trainer."""

    loss_type: list[DPOLoss] = flag(["sigmoid"])
    """Losses, one or several that are added (MPO, arXiv:2411.10442). robust is cDPO without bias (arXiv:2403.00409)."""

    loss_weights: list[float] = flag([], everyday=False, unset="1 each")
    """Weight of each of several losses."""

    rpo_alpha: float | None = flag(at_least=0, unset="off, as 0")
    """Weight of the negative log-likelihood of the chosen answer, which is added (RPO, arXiv:2404.19733)."""

    label_smoothing: float = flag(0.0, at_least=0, below=0.5, everyday=False)
    """Probability that a preference is wrong, for robust and aot; for exo_pair its smoothing (1e-3 in
    arXiv:2402.00856)."""

    use_weighting: bool = flag(False, everyday=False)
    """Whether pairs are weighted by their probability under the model (WPO, arXiv:2406.11827)."""

    discopop_tau: float = flag(0.05, above=0, everyday=False, needs="loss_type=discopop")
    """Temperature of discopop (arXiv:2406.08414)."""

    def notes(self) -> Iterator[str]:
        """Settings that have no effect, one line each."""
        if set(self.loss_type) != {"sft"}:
            return
        defaults: dict[str, Any] = {
            "beta": DPOParameters.beta,
            "ref_model": getattr(self, "model", None),
            "f_divergence_type": DPOParameters.f_divergence_type,
            "ld_alpha": 1,
        }
        for name, default in defaults.items():
            if (value := getattr(self, name)) not in (None, default):
                yield f"--{name}: {value}: no effect on --loss_type sft alone"

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        losses = " ".join(self.loss_type)
        if self.loss_weights and len(self.loss_weights) != len(self.loss_type):
            shown = " ".join(f"{weight:g}" for weight in self.loss_weights)
            yield f"--loss_weights: {shown}: {len(self.loss_weights)} for --loss_type {losses}; give one each"
        if self.rpo_alpha and "sft" in self.loss_type:
            yield "--rpo_alpha: adds the loss sft, which --loss_type has already; use --loss_weights"
        if self.label_smoothing and not set(SMOOTHED) & set(self.loss_type):
            yield (
                f"--label_smoothing: {self.label_smoothing:g}: --loss_type {losses} has none; use --loss_type robust"
            )
        if "exo_pair" in self.loss_type and not self.label_smoothing:
            yield "--loss_type: exo_pair: needs --label_smoothing above 0; its paper uses 1e-3"
        if self.f_divergence_type != "reverse_kl" and (other := set(self.loss_type) - set(DIVERGENCES)):
            yield (
                f"--f_divergence_type: {self.f_divergence_type}: not defined for --loss_type {min(other)}; valid: "
                f"{', '.join(DIVERGENCES)}"
            )
        if self.use_weighting and (sorting := {"aot", "aot_unpaired"} & set(self.loss_type)):
            yield f"--use_weighting: true: --loss_type {min(sorting)} sorts its pairs; drop one"


@dataclass(kw_only=True)
class KTOParameters(ReferenceArguments):
    """KTO (arXiv:2402.01306): unpaired answers, each with a label."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = flag("kto")
    """Loss. apo_zero_unpaired (arXiv:2408.06266) has no KL term."""

    desirable_weight: float = flag(1.0, above=0)
    """Weight of good answers."""

    undesirable_weight: float = flag(1.0, above=0)
    """Weight of bad answers."""

    per_device_train_batch_size: int = flag(2, at_least=1, group="Optimization", resume="fixed")
    """Number of rows per process and accumulation step. The KL term pairs the prompts of a batch with each other's
    answers, with 1 those of the accumulation steps."""

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        rows = self.per_device_train_batch_size * (getattr(self, "gradient_accumulation_steps", None) or 1)
        if self.loss_type == "kto" and rows < 2:
            yield (
                "--per_device_train_batch_size: 1: the KL term of kto pairs rows, and there is one in a step; use 2 or "
                "more here or in --gradient_accumulation_steps, or --loss_type apo_zero_unpaired"
            )

    def notes(self) -> Iterator[str]:
        """Remarks about settings that work but should be known about."""
        if self.loss_type == "kto" and self.per_device_train_batch_size == 1:
            yield (
                "--per_device_train_batch_size: 1: the KL of a pass is that of a single row, as in ms-swift; larger "
                "batches estimate it better"
            )


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


@dataclass(kw_only=True)
class CPOParameters(ContrastiveParameters):
    """CPO (arXiv:2401.08417)."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = flag("sigmoid")
    """Loss."""

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
            yield (
                f"--label_smoothing: {self.label_smoothing:g}: --loss_type {self.loss_type} has none; use "
                "--loss_type sigmoid, or 0"
            )


@dataclass(kw_only=True)
class SimPOParameters(ContrastiveParameters):
    """SimPO (arXiv:2405.14734): length-normalised log-probs and a target margin, without a reference."""

    beta: float = flag(2.0, above=0)
    """Scale of the reward, the mean log-prob of a token. SimPO's paper uses 2.0 to 2.5."""


@dataclass(kw_only=True)
class RewardParameters:
    """Reward models: the Bradley-Terry loss."""

    GROUP: ClassVar[str] = "Objective"

    center_rewards_coefficient: float | None = flag(at_least=0, unset="off")
    """Weight of the squared sum of a pair's rewards, which centres them at 0 (arXiv:2312.09244 uses 0.01)."""
