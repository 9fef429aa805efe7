"""Advantages of rewards that are laid out by group."""

from __future__ import annotations

import torch

from swift.rl.advantages import compute_advantages


def group_advantages(rewards_PG, **settings):
    """Advantages [P, G] of total rewards, NaN for excluded samples."""
    index_S = torch.arange(len(rewards_PG)).repeat_interleave(rewards_PG.shape[1])
    return compute_advantages(rewards_PG.reshape(-1, 1), index_S, **settings).advantages_S.view(rewards_PG.shape)
