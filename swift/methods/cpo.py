"""CPO (arXiv:2401.08417): contrastive preference optimization of pairs, without a reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from swift.flags import flag
from swift.plugin.registry import methods
from swift.trainers.preferences.arguments import ContrastiveParameters
from swift.trainers.preferences.shared import CONTRASTIVE, CONTRASTS, TRL_CONTRASTIVE, options_of


@dataclass(kw_only=True)
class CPOParameters(ContrastiveParameters):
    """Settings of CPO."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = flag("sigmoid")
    """Loss."""

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
            yield (
                f"--label_smoothing: {self.label_smoothing:g}: --loss_type {self.loss_type} has none; use "
                "--loss_type sigmoid, or 0"
            )


methods["cpo"] = CONTRASTS(
    parameters=CPOParameters,
    summary="contrastive preference optimization of pairs, without a reference",
    options=options_of(*CONTRASTIVE, "loss_type"),
    in_trl=TRL_CONTRASTIVE,
    commands_of_trl=("cpo",),
)
