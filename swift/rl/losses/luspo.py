"""LUSPO (arXiv:2602.05261): GSPO's ratio, sequences weighted by their length instead of averaged over it."""

from swift.rl.losses.base import Normaliser
from swift.rl.losses.surrogate import register_surrogate

register_surrogate(
    "luspo",
    "arXiv:2602.05261",
    Normaliser(
        "(1/B) sum_i sum_t m f",
        lambda length, nominal: 1.0,
        lambda counts, limit: counts.num_trained_sequences,
    ),
    default_level="sequence",
    summary="gspo with sequences weighted by length",
)
