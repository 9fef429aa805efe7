"""`--optim adamw_cpu` from the command line: the numbers of adamw, and an exact resume."""

import shutil

import pytest
from cli_runs import assert_same, log_rows, state_files

pytestmark = pytest.mark.slow

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
