"""ORPO (arXiv:2403.07691): supervised tuning with an odds ratio of pairs, without a reference."""

from __future__ import annotations

from swift.plugin.registry import methods
from swift.trainers.preferences.arguments import BetaArguments
from swift.trainers.preferences.shared import ACCURACY, MARGINS, TRL_PREFERENCES, WITHOUT_REFERENCE, options_of

methods["orpo"] = WITHOUT_REFERENCE(
    parameters=BetaArguments,
    summary="supervised tuning with an odds ratio of pairs, without a reference",
    trainer="trl.experimental.orpo:ORPOTrainer",
    config="trl.experimental.orpo:ORPOConfig",
    options=options_of("beta"),
    logged=(*MARGINS, ACCURACY[0], "nll_loss", "log_odds_ratio", "log_odds_chosen"),
    in_trl=TRL_PREFERENCES,
    commands_of_trl=("orpo",),
)
