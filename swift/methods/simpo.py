"""SimPO (arXiv:2405.14734): length-normalised log-probs and a target margin, without a reference."""

from __future__ import annotations

from dataclasses import dataclass

from swift.flags import flag
from swift.plugin.registry import methods
from swift.trainers.preferences.arguments import ContrastiveParameters
from swift.trainers.preferences.shared import CONTRASTIVE, CONTRASTS, TRL_CONTRASTIVE, options_of


@dataclass(kw_only=True)
class SimPOParameters(ContrastiveParameters):
    """Settings of SimPO."""

    beta: float = flag(2.0, above=0)
    """Scale of the reward, the mean log-prob of a token. SimPO's paper uses 2.0 to 2.5."""


methods["simpo"] = CONTRASTS(
    parameters=SimPOParameters,
    summary="length-normalised preference optimization of pairs, without a reference",
    options=options_of(*CONTRASTIVE, loss_type="simpo"),
    in_trl=TRL_CONTRASTIVE,
)
