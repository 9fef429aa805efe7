"""REINFORCE++ with a group baseline (arXiv:2501.03262): the group's mean, scaled by the batch of centred values."""

from swift.rl.estimators.base import AdvantageEstimator, advantage_estimators
from swift.rl.estimators.grpo import centre

advantage_estimators["reinforce_plus_plus"] = AdvantageEstimator(
    "reinforce_plus_plus", "arXiv:2501.03262", centre, default_scale="batch", scales_centred=True
)
