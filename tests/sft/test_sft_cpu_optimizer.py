"""Supervised tuning with `--optim adamw_cpu`: the numbers of adamw, and an exact resume."""

import shutil

import pytest
from safetensors.torch import load_file
from test_sft_run import sft
from trl_runs import losses

pytestmark = pytest.mark.long


def test_it_trains_like_adamw_and_resumes_exactly(sft_argv):
    flags = "--torch_dtype bfloat16 --save_steps 3"
    plain = sft(sft_argv(flags, "--optim adamw"))
    run_dir = sft(sft_argv(flags, "--optim adamw_cpu"))
    assert losses(run_dir) == losses(plain)
    expected = load_file(plain / "checkpoint-6" / "model.safetensors")
    shutil.rmtree(run_dir / "checkpoint-6")
    again = sft(sft_argv(flags, f"--optim adamw_cpu --resume_from_checkpoint {run_dir / 'checkpoint-3'}"))
    weights = load_file(again / "checkpoint-6" / "model.safetensors")
    assert all(weights[name].equal(expected[name]) for name in expected)
