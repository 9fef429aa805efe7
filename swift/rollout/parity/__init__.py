"""Parity check: log-probs of the rollout engine against those of the trainer, on real prompts, token by token.

    as loaded      engine and trainer have read the same checkpoint
    with noise     both have the same noise on one tensor of each place in a layer, the engine by a weight sync
    restored       the true weights are synced again, with the same prompts

The first stage detects a wrong temperature or shifted log-probs. The second one detects a weight sync without effect,
which the first cannot: the checkpoint equals the trainer's weights. The second or third one detects a KV or prefix
cache that is not reset by a weight sync.

`check` runs the stages, `noise` makes the noise, `tolerance` computes the differences and compares them with limits.
"""

from swift.rollout.parity.check import ParityCheck, ParityReport

__all__ = ["ParityCheck", "ParityReport"]
