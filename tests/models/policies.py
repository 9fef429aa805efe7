"""Settings of policies, and policies that are not what they began as."""

from __future__ import annotations

from pathlib import Path

import torch

from swift.models.arguments import ModelArguments

IDS = torch.arange(40).reshape(2, 20) + 60  # [B, T] ordinary characters


def lora(model: str | Path, **more) -> ModelArguments:
    return ModelArguments(model=str(model), tuner_type="lora", **more)


def full(model: str | Path, **more) -> ModelArguments:
    return ModelArguments(model=str(model), tuner_type="full", **more)


def moved(policy: torch.nn.Module, scale: float = 0.05, seed: int = 0) -> torch.nn.Module:
    """The policy after a step of its trained parameters at random."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for one in policy.parameters():
            if one.requires_grad:
                one.add_(scale * torch.randn_like(one))
    return policy
