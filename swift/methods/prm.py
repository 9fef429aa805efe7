"""Process reward models (arXiv:2305.20050), from answers whose steps are right or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swift.flags import flag
from swift.plugin.registry import methods
from swift.trainers.trl.method import Method


@dataclass(kw_only=True)
class StepParameters:
    """Settings of process reward models."""

    step_separator: str = flag("\n", group="Data", resume="fixed")
    """Text between two steps of an answer. The model says at its last token whether the step before it is right."""

    train_on_last_step_only: bool = flag(False, group="Objective", everyday=False, resume="fixed")
    """Whether only the last step of an answer is learnt, which makes an outcome reward model."""

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        args: Any = self
        if args.tuner_type == "vera":
            yield "--tuner_type: vera: PEFT cannot keep it out of the head, which is trained in full; use lora"
        if not self.step_separator:
            yield "--step_separator: '': empty; give the text between steps, such as '\\n'"
        elif self.step_separator != "\n" and args.tuner_type != "full":
            yield (
                f"--step_separator: {self.step_separator!r}: an adapter does not record it for --reward_model; "
                "use --tuner_type full, or leave it out"
            )


methods["prm"] = Method(
    parameters=StepParameters,
    summary="a process reward model, from answers whose steps are right or wrong",
    sees=False,
    trainer="transformers:Trainer",
    config="transformers:TrainingArguments",
    encode="swift.trainers.preferences.steps:encode",
    reward_head="step",
    parts="swift.trainers.preferences.steps:keep_separator",
    overrides=("swift.trainers.preferences.steps:StepTrainer",),
    measured=("accuracy", "f1"),
    shown=(("accuracy", "accuracy"), ("f1", "F1 of wrong steps")),
    commands_of_trl=("prm",),
)
