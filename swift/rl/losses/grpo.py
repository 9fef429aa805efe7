"""GRPO (arXiv:2402.03300): the mean over sequences of the mean over their tokens."""

from swift.rl.losses.base import SEQUENCE_MEAN, Loss
from swift.rl.losses.surrogate import surrogate

GRPO = Loss("grpo", "arXiv:2402.03300", surrogate, SEQUENCE_MEAN)
