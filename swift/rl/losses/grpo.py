"""GRPO (arXiv:2402.03300): the mean over sequences of the mean over their tokens."""

from swift.rl.losses.base import SEQUENCE_MEAN
from swift.rl.losses.surrogate import register_surrogate

register_surrogate("grpo", "arXiv:2402.03300", SEQUENCE_MEAN, summary="mean of sequence means")
