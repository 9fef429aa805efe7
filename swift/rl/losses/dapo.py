"""DAPO (arXiv:2503.14476): the mean over all trained tokens of the window; long answers weigh by length."""

from swift.rl.losses.base import TOKEN_MEAN, Loss
from swift.rl.losses.surrogate import surrogate

DAPO = Loss("dapo", "arXiv:2503.14476", surrogate, TOKEN_MEAN)
