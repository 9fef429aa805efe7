from pathlib import Path

import pytest
import torch

from swift.models.arguments import ModelArguments
from swift.models.policy import load_policy
from swift.models.tiny import ARCHS

IDS = torch.arange(40).reshape(2, 20) + 60  # [B, T] ordinary characters


@pytest.fixture(scope="session")
def tiny_folders(nano_folders) -> dict[str, Path]:
    return nano_folders


@pytest.fixture(params=ARCHS)
def any_model(request, tiny_folders) -> str:
    return str(tiny_folders[request.param])


@pytest.fixture(scope="session")
def qwen2(tiny_folders) -> str:
    return str(tiny_folders["qwen2"])


def _random_adapter(model: str, folder: Path, seed: int = 0) -> Path:
    policy = load_policy(ModelArguments(model=model, tuner_type="lora", lora_dropout=0.0))
    torch.manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    policy.save_pretrained(folder)
    return folder


@pytest.fixture
def make_adapter(tmp_path):
    """Builds an adapter with random weights, so that it changes what the model says."""

    def make(model: str, name: str = "adapter", seed: int = 0) -> str:
        return str(_random_adapter(model, tmp_path / name, seed))

    return make


@pytest.fixture
def logits():
    """Logits of a module on fixed token ids, without gradients."""

    def compute(module: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return module(input_ids=IDS).logits

    return compute
