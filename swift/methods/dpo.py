"""DPO (arXiv:2305.18290) and the losses that share its trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swift.flags import flag
from swift.plugin.registry import methods
from swift.trainers.arguments import ActivationArguments, RouterArguments
from swift.trainers.preferences.arguments import DIVERGENCES, DivergenceArguments
from swift.trainers.preferences.shared import DIVERGENCE, PAIRS, TRL_PREFERENCES, options_of

if TYPE_CHECKING:
    from swift.trainers.trl.parts import Parting

Loss = Literal[
    "sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
"""The losses of TRL's DPOTrainer."""

SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
OVER_BATCHES = {"aot", "aot_unpaired", "bco_pair", "sft"}
"""Losses that are no mean over pairs: they sort a batch, average over it, or count its tokens."""


@dataclass(kw_only=True)
class DPOParameters(DivergenceArguments, RouterArguments, ActivationArguments):
    """Settings of DPO."""

    loss_type: list[Loss] = flag(["sigmoid"])
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


def _with_losses(args: Any) -> dict[str, Any]:
    """The losses of DPO with their weights; that of `--rpo_alpha` is TRL's loss sft."""
    losses, weights = list(args.loss_type), list(args.loss_weights) or [1.0] * len(args.loss_type)
    if args.rpo_alpha:
        losses, weights = [*losses, "sft"], [*weights, args.rpo_alpha]
    own = options_of(*DIVERGENCE, "label_smoothing", "use_weighting", "discopop_tau")(args)
    return {"loss_type": losses, "loss_weights": weights, **own}


def _parting(args: Any) -> Parting:
    return "" if args.rpo_alpha or OVER_BATCHES & set(args.loss_type) else "pairs"


methods["dpo"] = PAIRS(
    parameters=DPOParameters,
    summary="direct preference optimization of pairs",
    options=_with_losses,
    parting=_parting,
    in_trl={**TRL_PREFERENCES, "loss_type": ["sigmoid"], "label_smoothing": 0.0},
    commands_of_trl=("dpo",),
)
