"""Dr. GRPO (arXiv:2503.20783): a constant divisor, so that no length is favoured.

Every sequence counts, filtered or not, and each with `max_completion_length` tokens. The paper also drops
the division by the group's standard deviation: `--scale_rewards none`.
"""

from swift.rl.losses.base import Normaliser
from swift.rl.losses.surrogate import register_surrogate

register_surrogate(
    "dr_grpo",
    "arXiv:2503.20783",
    Normaliser(
        "sum m f / (S max_completion_length)",
        lambda length, nominal: 1.0,
        lambda counts, limit: counts.num_sequences * limit,
    ),
    summary="sum / (completions x max_completion_length)",
)
