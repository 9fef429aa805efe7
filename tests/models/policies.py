"""Settings of policies, policies that are not what they began as, and how two are compared."""

from __future__ import annotations

from pathlib import Path

import torch

from swift.models.arguments import ModelArguments
from swift.models.forward import TokenSequence

IDS = torch.arange(40).reshape(2, 20) + 60  # [B, T] ordinary characters

SEQUENCES = [
    TokenSequence([5, 6, 7, 8], [10, 11, 12]),
    TokenSequence([5, 6, 7, 8], [13]),
    TokenSequence([5, 6, 7, 8], [10, 14, 15, 16, 17, 18]),
    TokenSequence([9], [20, 21]),
    TokenSequence([30, 31], [32]),
]


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


def gradients_of(model: torch.nn.Module, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a loss that looks at every value."""
    model.zero_grad()
    (values * torch.linspace(-1, 1, values.numel()).reshape(values.shape)).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_equal_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative=1e-5, least=1e-7
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= relative * gradient.norm() + least, name
