"""BNPO (TRL): the token mean of each nominal micro-batch, averaged over the nominal micro-batches.

A nominal micro-batch is `per_device_train_batch_size` sequences of a rank, whatever is computed at once, so
this loss depends on that setting by definition and on the physical cut never. A nominal micro-batch without
a trained token adds 0 and is counted, as in TRL.
"""

from swift.rl.losses.base import Normaliser
from swift.rl.losses.surrogate import register_surrogate

register_surrogate(
    "bnpo",
    "TRL 1.16",
    Normaliser(
        "(1/M) sum_b sum_{t in b} m f / N_b",
        lambda length, nominal: 1.0 / nominal,
        lambda counts, limit: counts.num_nominal_batches,
    ),
    summary="token mean of each micro-batch",
)
