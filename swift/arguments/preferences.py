"""The settings of `swift rlhf --rlhf_type dpo` and the other methods that learn from given preferences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swift.arguments.common import CommonArguments, adamw_cpu_problems, model_missing, training_data_missing
from swift.arguments.rlhf import MethodArguments
from swift.data.arguments import DataArguments
from swift.flags import flag
from swift.models.arguments import TunerArguments
from swift.trainers.arguments import OptimizationArguments, RunArguments, TrainerArguments
from swift.trainers.preferences.arguments import (
    BetaArguments,
    CPOParameters,
    DivergenceArguments,
    DPOParameters,
    KTOParameters,
    RewardParameters,
    SimPOParameters,
)


@dataclass(kw_only=True)
class PreferenceArguments(
    CommonArguments,
    RunArguments,
    TrainerArguments,
    OptimizationArguments,
    DataArguments,
    TunerArguments,
    MethodArguments,
):
    """What all methods that learn from given preferences have."""

    max_length: int | None = flag(at_least=1, group="Data", unset="the model's context")
    """Maximum length of prompt and answer together, in tokens. Longer rows are left out and counted."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        yield from model_missing(self)
        yield from training_data_missing(self)
        yield from adamw_cpu_problems(self)
        yield from self.tuner_problems()
        if self.changes_base:
            yield (
                f"--init_weights: {self.init_weights}: the reference is the model without its adapter, and the base "
                "lacks what this adapter starts with; use true, or gaussian"
            )


@dataclass(kw_only=True)
class DPOArguments(DPOParameters, PreferenceArguments):
    """`swift rlhf --rlhf_type dpo`: direct preference optimization of pairs."""


@dataclass(kw_only=True)
class IPOArguments(DivergenceArguments, PreferenceArguments):
    """`swift rlhf --rlhf_type ipo`: identity preference optimization of pairs (arXiv:2310.12036)."""


@dataclass(kw_only=True)
class KTOArguments(KTOParameters, PreferenceArguments):
    """`swift rlhf --rlhf_type kto`: single answers, each good or bad."""


@dataclass(kw_only=True)
class ORPOArguments(BetaArguments, PreferenceArguments):
    """`swift rlhf --rlhf_type orpo`: supervised tuning with an odds ratio of pairs, without a reference."""


@dataclass(kw_only=True)
class SimPOArguments(SimPOParameters, PreferenceArguments):
    """`swift rlhf --rlhf_type simpo`: length-normalised preference optimization of pairs, without a reference."""


@dataclass(kw_only=True)
class CPOArguments(CPOParameters, PreferenceArguments):
    """`swift rlhf --rlhf_type cpo`: contrastive preference optimization of pairs, without a reference."""


@dataclass(kw_only=True)
class RewardModelArguments(RewardParameters, PreferenceArguments):
    """`swift rlhf --rlhf_type rm`: a reward model from pairs."""


PREFERENCES: dict[str, type] = {
    "dpo": DPOArguments,
    "ipo": IPOArguments,
    "kto": KTOArguments,
    "orpo": ORPOArguments,
    "simpo": SimPOArguments,
    "cpo": CPOArguments,
    "rm": RewardModelArguments,
}
"""Method -> its settings."""
