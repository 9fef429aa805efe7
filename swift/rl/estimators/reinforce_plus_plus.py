"""REINFORCE++ with a group baseline (arXiv:2501.03262): the group's mean, scaled by the batch of centred values."""

from swift.rl.estimators.base import AdvantageEstimator, advantages
from swift.rl.estimators.grpo import centre

advantages["reinforce_plus_plus"] = AdvantageEstimator(
    "reinforce_plus_plus",
    "arXiv:2501.03262",
    centre,
    default_scale="batch",
    scales_centred=True,
    kl_in_reward=True,
    summary="the mean of the group, scaled by the batch",
)
