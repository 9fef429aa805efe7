"""GSPO (arXiv:2507.18071): GRPO with one ratio per sequence; the paper clips it at 3e-4 and 4e-4."""

from swift.rl.losses.base import SEQUENCE_MEAN
from swift.rl.losses.surrogate import register_surrogate

register_surrogate(
    "gspo", "arXiv:2507.18071", SEQUENCE_MEAN, summary="grpo with one ratio per sequence", default_level="sequence"
)
