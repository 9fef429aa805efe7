"""Optimizers from the command line: adamw_cpu has the numbers of adamw, adamw_8bit a quarter of its state."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cli_runs import ROOT, assert_same, log_rows, state_files

pytestmark = pytest.mark.slow

OPTIONAL = Path(sys.prefix) / "optional"
"""Where `make install` puts packages that not every process is to import."""
FLAGS = {"max_steps": 5, "save_steps": 2, "torch_dtype": "bfloat16", "num_iterations": 2}


def test_it_trains_like_adamw_and_resumes_exactly(cli):
    plain, _, _ = cli.finish("plain", optim="adamw", **FLAGS)
    folder, _, _ = cli.finish("cpu", optim="adamw_cpu", **FLAGS)
    assert_same(log_rows(folder), log_rows(plain), "logging")
    straight = state_files(folder)
    assert_same(straight, state_files(plain), "checkpoint")
    for name in ("checkpoint-4", "checkpoint-5"):
        shutil.rmtree(folder / name)
    cli.finish("cpu", optim="adamw_cpu", **FLAGS, resume_from_checkpoint=folder / "checkpoint-2")
    assert_same(state_files(folder), straight, "resumed")


def types_in(state):
    """Those of all tensors; bitsandbytes keeps them in a dict of its own for each weight."""
    for one in state.values():
        yield from types_in(one) if isinstance(one, dict) else [one.dtype] if isinstance(one, torch.Tensor) else []


def test_eight_bit_states_train_and_resume_exactly(cli):
    if not list(OPTIONAL.glob("bitsandbytes-*")):
        pytest.skip(f"no bitsandbytes in {OPTIONAL}; make install puts it there")
    flags = {**FLAGS, "optim": "adamw_8bit", "variables": {"PYTHONPATH": f"{ROOT}{os.pathsep}{OPTIONAL}"}}
    folder, _, _ = cli.finish("bits", **flags)
    straight = state_files(folder)
    assert log_rows(folder)[-1]["grad_norm"] > 0
    state = torch.load(folder / "checkpoint-5" / "optimizer.pt", weights_only=False)["state"]
    assert torch.uint8 in set(types_in(state)), "no weight was large enough"
    for name in ("checkpoint-4", "checkpoint-5"):
        shutil.rmtree(folder / name)
    cli.finish("bits", **flags, resume_from_checkpoint=folder / "checkpoint-2")
    assert_same(state_files(folder), straight, "resumed")
