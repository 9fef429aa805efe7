"""IPO (arXiv:2310.12036): identity preference optimization of pairs."""

from __future__ import annotations

from dataclasses import dataclass

from swift.plugin.registry import methods
from swift.trainers.arguments import ActivationArguments, RouterArguments
from swift.trainers.preferences.arguments import DivergenceArguments
from swift.trainers.preferences.shared import DIVERGENCE, PAIRS, TRL_PREFERENCES, options_of


@dataclass(kw_only=True)
class IPOParameters(DivergenceArguments, RouterArguments, ActivationArguments):
    """Settings of IPO."""


methods["ipo"] = PAIRS(
    parameters=IPOParameters,
    summary="identity preference optimization of pairs (arXiv:2310.12036)",
    options=options_of(*DIVERGENCE, loss_type=["ipo"]),
    parting=lambda args: "pairs",
    in_trl=TRL_PREFERENCES,
)
