"""A loss and an advantage estimator of a user's, in one file each, registered like the built-in ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from grouped_rewards import group_advantages
from padded_windows import window_of
from whole_objective import run_window

from swift.flags import flag
from swift.plugin import advantages, losses
from swift.rl.declared import parameters_of
from swift.rl.estimators import AdvantageEstimator, get_estimator
from swift.rl.losses import TOKEN_MEAN, Loss, LossConfig, Objective, describe, get_loss, loss_problems


@dataclass(kw_only=True)
class PowerParameters:
    power: float = flag(1.0, above=0)
    """Exponent of the ratio."""


def objective(inputs, config):
    return Objective(-(inputs.ratio_T**config.parameters.power) * inputs.advantages_T)


def above_the_worst(rewards_S, groups, parameters):
    return rewards_S - groups.lowest_P[groups.index_S]


@pytest.fixture
def registered():
    losses["power"] = Loss("power", "no paper", objective, TOKEN_MEAN, parameters=PowerParameters)
    advantages["worst"] = AdvantageEstimator("worst", "no paper", above_the_worst, default_scale="none")
    yield
    del losses["power"], advantages["worst"]


def test_a_registered_loss_trains_with_its_own_settings(registered):
    pair = window_of(policy=[[-0.5, -1.0], [-2.0]], old=[[-1.0, -1.0], [-2.0]], advantages=[1.0, -1.0])
    found = run_window(pair, LossConfig(loss_type="power", parameters=PowerParameters(power=2.0)))
    assert found.loss == pytest.approx((-(torch.tensor(0.5).exp() ** 2) - 1 + 1).item() / 3, rel=1e-6)
    assert describe(LossConfig(loss_type="power")) == "power (no paper): sum m f / N; token ratio"


def test_the_flat_settings_of_a_run_hold_them(registered):
    class Settings:
        loss_type, importance_sampling_level, power = "power", None, 3.0
        epsilon, epsilon_high, delta, kl_bias_correction, rollout_kl_coef = 0.2, None, None, False, 0.0

    assert LossConfig.read(Settings, beta=0.1).parameters == PowerParameters(power=3.0)
    assert parameters_of(get_loss("dapo"), Settings) is None
    Settings.delta = 2.0
    assert list(loss_problems(Settings)) == ["delta: 2: loss_type power has no clip that it could bound; drop it"]


def test_a_registered_estimator_keeps_the_rules_of_all_estimators(registered):
    rewards_PG = torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 1.0], [0.5, torch.nan, 0.0]])
    found = group_advantages(rewards_PG, estimator="worst").tolist()
    assert found == [[1.0, 0.5, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
    assert {"grpo", "rloo", "reinforce_plus_plus"} <= set(advantages.built_ins())
    with pytest.raises(ValueError, match="advantage_estimator: best: unknown; valid: grpo"):
        get_estimator("best")
