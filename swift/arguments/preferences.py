"""The settings of `swift rlhf --rlhf_type dpo` and the other methods that learn from given preferences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from swift.arguments.common import TrainerModeArguments
from swift.arguments.rlhf import MethodArguments
from swift.flags import REQUIRED, flag
from swift.trainers.arguments import ActivationArguments, RouterArguments
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
class PreferenceArguments(TrainerModeArguments, MethodArguments):
    """What all methods that learn from given preferences have."""

    max_length: int | None = flag(at_least=1, group="Data", unset="the model's context", resume="fixed")
    """Maximum length of prompt and answer together, in tokens. Longer rows are left out and counted."""


@dataclass(kw_only=True)
class DPOArguments(DPOParameters, RouterArguments, ActivationArguments, PreferenceArguments):
    """`swift rlhf --rlhf_type dpo`: direct preference optimization of pairs."""

    SEES: ClassVar[bool] = True


@dataclass(kw_only=True)
class IPOArguments(DivergenceArguments, RouterArguments, ActivationArguments, PreferenceArguments):
    """`swift rlhf --rlhf_type ipo`: identity preference optimization of pairs (arXiv:2310.12036)."""

    SEES: ClassVar[bool] = True


@dataclass(kw_only=True)
class KTOArguments(KTOParameters, RouterArguments, ActivationArguments, PreferenceArguments):
    """`swift rlhf --rlhf_type kto`: single answers, each good or bad."""

    SEES: ClassVar[bool] = True


@dataclass(kw_only=True)
class ORPOArguments(BetaArguments, PreferenceArguments):
    """`swift rlhf --rlhf_type orpo`: supervised tuning with an odds ratio of pairs, without a reference."""

    SEES: ClassVar[bool] = True


@dataclass(kw_only=True)
class SimPOArguments(SimPOParameters, PreferenceArguments):
    """`swift rlhf --rlhf_type simpo`: length-normalised preference optimization of pairs, without a reference."""

    SEES: ClassVar[bool] = True


@dataclass(kw_only=True)
class CPOArguments(CPOParameters, PreferenceArguments):
    """`swift rlhf --rlhf_type cpo`: contrastive preference optimization of pairs, without a reference."""

    SEES: ClassVar[bool] = True


@dataclass(kw_only=True)
class RewardModelArguments(RewardParameters, ActivationArguments, PreferenceArguments):
    """`swift rlhf --rlhf_type rm`: a reward model from pairs."""

    SEES: ClassVar[bool] = True


@dataclass(kw_only=True)
class ProcessRewardArguments(PreferenceArguments):
    """`swift rlhf --rlhf_type prm`: a process reward model, from answers whose steps are right or wrong."""

    step_separator: str = flag("\n", group="Data", resume="fixed")
    """Text between two steps of an answer. The model says at its last token whether the step before it is right."""

    train_on_last_step_only: bool = flag(False, group="Objective", everyday=False, resume="fixed")
    """Whether only the last step of an answer is learnt, which makes an outcome reward model."""

    def problems(self) -> Iterator[str]:
        if self.tuner_type == "vera":
            yield "--tuner_type: vera: PEFT cannot keep it out of the head, which is trained in full; use lora"
        if not self.step_separator:
            yield "--step_separator: '': empty; give the text between steps, such as '\\n'"
        elif self.step_separator != "\n" and self.tuner_type != "full":
            yield (
                f"--step_separator: {self.step_separator!r}: an adapter does not record it for --reward_model; "
                "use --tuner_type full, or leave it out"
            )


@dataclass(kw_only=True)
class DistillationArguments(PreferenceArguments):
    """`swift rlhf --rlhf_type gkd`: generalized knowledge distillation (arXiv:2306.13649)."""

    teacher_model: str | None = flag(group="Model", unset=REQUIRED, resume="fixed")
    """Folder or hub id of the teacher, which has the model's vocabulary."""

    lmbda: float = flag(0.5, at_least=0, at_most=1, group="Objective")
    """Share of batches with answers that the model samples itself; the others have those of the data."""

    beta: float = flag(0.5, at_least=0, at_most=1, group="Objective")
    """Generalized Jensen-Shannon divergence between the forward (0) and the reverse (1) KL."""

    seq_kd: bool = flag(False, group="Objective", everyday=False)
    """Whether the teacher samples the other answers, instead of those of the data."""

    temperature: float = flag(0.9, at_least=0.01, group="Sampling")
    """Sampling temperature."""

    max_completion_length: int = flag(512, at_least=1, aliases=("max_new_tokens", "response_length"), group="Sampling")
    """Maximum number of sampled tokens."""


PREFERENCES: dict[str, type] = {
    "dpo": DPOArguments,
    "ipo": IPOArguments,
    "kto": KTOArguments,
    "orpo": ORPOArguments,
    "simpo": SimPOArguments,
    "cpo": CPOArguments,
    "rm": RewardModelArguments,
    "prm": ProcessRewardArguments,
    "gkd": DistillationArguments,
}
"""Method -> its settings."""
