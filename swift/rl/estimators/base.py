"""Advantage estimators: a centred value of each reward, and its default scale.

`swift.rl.advantages` excludes faulty samples before, and sets groups without reward spread to 0 afterwards, for every
estimator. A user's plugin registers one like the files beside this:

    from swift.plugin import advantages
    from swift.rl.estimators import AdvantageEstimator

    def above_the_worst(rewards_S, groups, parameters):
        return rewards_S - groups.lowest_P[groups.index_S]

    advantages["worst"] = AdvantageEstimator("worst", "no paper", above_the_worst)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swift.plugin.registry import advantages
from swift.rl.declared import find

if TYPE_CHECKING:
    from torch import Tensor

    from swift.rl.advantages import GroupStatistics

Scale = Literal["group", "batch", "population", "none", "gdpo"]


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """How rewards become advantages, up to their scale.

    name, paper: as logged. centre: `(rewards_S, groups, parameters)` -> the centred value of each reward, [S] float64;
        rewards are NaN for excluded samples, and so are their centred values.
    summary: for the help. default_scale: what divides the centred value where `--scale_rewards` is not given.
    kl_in_reward: whether the KL is in the reward where `--kl_in_reward` is not given.
    scales_centred: a batch's standard deviation is that of the centred values, not of the rewards.
    parameters: a dataclass of settings of its own (`swift.flags.flag`), given to `centre`; None for none.
    """

    name: str
    paper: str
    centre: Callable[[Tensor, GroupStatistics, Any], Tensor]
    default_scale: Scale = "group"
    scales_centred: bool = False
    parameters: type | None = None
    kl_in_reward: bool = False
    summary: str = ""


def get_estimator(name: str) -> AdvantageEstimator:
    """The estimator of that name; a ValueError if there is none."""
    return find(advantages, name, "advantage_estimator")
