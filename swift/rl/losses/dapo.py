"""DAPO (arXiv:2503.14476): the mean over all trained tokens of the global batch; long answers weigh by length."""

from swift.rl.losses.base import TOKEN_MEAN
from swift.rl.losses.surrogate import register_surrogate

register_surrogate("dapo", "arXiv:2503.14476", TOKEN_MEAN, summary="sum / trained tokens of the global batch")
