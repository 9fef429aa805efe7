"""Reward models from pairs: the Bradley-Terry loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swift.flags import flag
from swift.plugin.registry import methods
from swift.trainers.arguments import ActivationArguments
from swift.trainers.preferences.shared import options_of
from swift.trainers.trl.method import Method


@dataclass(kw_only=True)
class RewardParameters(ActivationArguments):
    """Settings of reward models."""

    GROUP: ClassVar[str] = "Objective"

    center_rewards_coefficient: float | None = flag(at_least=0, unset="off")
    """Weight of the squared sum of a pair's rewards, which centres them at 0 (arXiv:2312.09244 uses 0.01)."""


methods["rm"] = Method(
    parameters=RewardParameters,
    summary="a reward model from pairs",
    trainer="trl:RewardTrainer",
    config="trl:RewardConfig",
    rows="scored pair",
    collator="trl.trainer.reward_trainer:DataCollatorForPreference",
    reward_head="answer",
    parting=lambda args: "pairs",
    options=options_of("center_rewards_coefficient"),
    overrides=("swift.trainers.preferences.shared:PreparedRows",),
    logged=("accuracy", "margin", "min_reward", "mean_reward", "max_reward"),
    measured=("num_tokens",),
    shown=(("accuracy", "accuracy"), ("margin", "margin")),
    in_trl={"learning_rate": 1e-4, "max_length": 1024},
    commands_of_trl=("reward", "reward_modeling"),
)
