"""Optimizers from the command line: adamw_cpu has the numbers of adamw, adamw_8bit 8-bit states; plugins add others."""

import os
import sys
from pathlib import Path

import pytest
import torch
from cli_runs import ROOT, assert_resumes, assert_same, log_rows, state_files
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

OPTIONAL = Path(sys.prefix) / "optional"
"""Where `make install` puts packages that not every process is to import."""
FLAGS = {"max_steps": 5, "save_steps": 2, "torch_dtype": "bfloat16", "num_iterations": 2}


@pytest.mark.long
def test_it_trains_like_adamw_and_resumes_exactly(cli):
    plain = cli.finish("plain", optim="adamw", **FLAGS)
    folder = cli.finish("cpu", optim="adamw_cpu", **FLAGS)
    assert_same(log_rows(folder), log_rows(plain), "logging")
    assert_same(state_files(folder), state_files(plain), "checkpoint")
    assert_resumes(cli, folder, 2, optim="adamw_cpu", **FLAGS)


@pytest.mark.parametrize(
    "precision",
    [{"torch_dtype": "bfloat16", "master_weights": "bf16_stochastic"}, {"torch_dtype": "float32", "bf16": "true"}],
)
def test_weights_without_masters_resume_exactly(cli, precision):
    flags = {**FLAGS, "max_steps": 4, "tuner_type": "full", **precision}
    folder = cli.finish("precision", **flags)
    assert log_rows(folder)[-1]["grad_norm"] > 0
    state = torch.load(folder / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
    assert state and all(set(one) == {"step", "exp_avg", "exp_avg_sq"} for one in state.values())
    weights = load_file(folder / "checkpoint-4" / "model.safetensors")
    assert {str(one.dtype) for one in weights.values()} == {f"torch.{precision['torch_dtype']}"}
    assert_resumes(cli, folder, 2, **flags)


def types_in(state):
    """Those of all tensors; bitsandbytes keeps them in a dict of its own for each weight."""
    for one in state.values():
        yield from types_in(one) if isinstance(one, dict) else [one.dtype] if isinstance(one, torch.Tensor) else []


@pytest.mark.long
def test_eight_bit_states_train_and_resume_exactly(cli):
    if not list(OPTIONAL.glob("bitsandbytes-*")):
        pytest.skip(f"no bitsandbytes in {OPTIONAL}; make install puts it there")
    flags = {**FLAGS, "optim": "adamw_8bit", "variables": {"PYTHONPATH": f"{ROOT}{os.pathsep}{OPTIONAL}"}}
    folder = cli.finish("bits", **flags)
    assert log_rows(folder)[-1]["grad_norm"] > 0
    state = torch.load(folder / "checkpoint-5" / "optimizer.pt", weights_only=False)["state"]
    assert torch.uint8 in set(types_in(state)), "no weight was large enough"
    assert_resumes(cli, folder, 2, **flags)


PLUGIN = '''
from dataclasses import dataclass

import torch

from swift.flags import flag
from swift.plugin import optimizers


@dataclass
class SignParameters:
    """Sign descent."""

    GROUP = "Optimization"
    sign_decay: float = flag(0.9, at_least=0, below=1)
    """Decay of the mean of gradients."""


@optimizers.register("sign", parameters=SignParameters)
class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr, sign_decay):
        super().__init__(params, {"lr": lr, "sign_decay": sign_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    mean.lerp_(weight.grad, 1 - group["sign_decay"])
                    weight.sub_(mean.sign(), alpha=group["lr"])
'''


def test_a_plugin_adds_an_optimizer_with_settings_of_its_own(cli, material, tmp_path):
    file = tmp_path / "sign.py"
    file.write_text((material[1] / "odd_plugin.py").read_text() + PLUGIN)
    flags = {"optim": "sign", "sign_decay": 0.5, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    folder = cli.finish("sign", external_plugins=file, max_steps=2, save_steps=2, **flags)
    state = torch.load(folder / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert {(group["sign_decay"], group["lr"]) for group in state["param_groups"]} == {(0.5, 1e-2)}
    assert all("mean" in one for one in state["state"].values())
