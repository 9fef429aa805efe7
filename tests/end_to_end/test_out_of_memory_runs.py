"""A run that runs out of memory while it trains samples and trains as one that does not."""

import pytest
from cli_runs import assert_close, log_rows, sampled

pytestmark = pytest.mark.slow

SHORT = """
import os
from pathlib import Path

import torch

import swift.trainers.grpo.logprobs as logprobs

usual, room = logprobs.score_tokens, int(os.environ.get("ROOM", 10**9))
later = Path(os.environ.get("FROM", "."))
if os.environ.get("RANK", "0") not in os.environ.get("RANKS", "01"):
    room = 10**9

def score_tokens(model, tokens, **settings):
    scores = usual(model, tokens, **settings)
    if torch.is_grad_enabled() and later.exists() and tokens.inputs["input_ids"].numel() > room:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return scores

logprobs.score_tokens = score_tokens
"""
FLAGS = {"max_steps": 4, "beta": 0.04, "num_iterations": 2}


@pytest.fixture
def plugins(cli):
    (cli.folder / "short.py").write_text(SHORT)
    return [cli.material / "odd_plugin.py", cli.folder / "short.py"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_nothing_is_sampled_twice_and_the_steps_are_the_same(cli, plugins, processes):
    ranks = {"NPROC_PER_NODE": processes}
    ample = cli.finish("ample", variables=ranks, external_plugins=plugins, **FLAGS)
    assert "ran out" not in cli.printed
    short = cli.finish("short", variables={**ranks, "ROOM": 60}, external_plugins=plugins, **FLAGS)
    lines = [line for line in cli.printed.splitlines() if "memory: ran out" in line]
    assert lines and all("again, with " in line for line in lines)
    assert sampled(short) == sampled(ample)
    assert len(log_rows(short)) == FLAGS["max_steps"]
    assert_close(short, ample, "loss", "grad_norm", "kl")


@pytest.mark.long  # each start waits for a process that waits for the one that is gone
@pytest.mark.parametrize("sharding", [{"fsdp": "full_shard"}, {"deepspeed": "zero3"}, {"sequence_parallel_size": 2}])
def test_a_run_whose_passes_cannot_be_made_again_goes_on_from_its_checkpoint(cli, plugins, sharding):
    flags, ranks = {**FLAGS, **sharding, "save_steps": 1, "external_plugins": plugins}, {"NPROC_PER_NODE": 2}
    ample = cli.finish("ample", variables=ranks, **flags)
    less = {"ROOM": 60, "RANKS": 1, "FROM": cli.folder / "short" / "checkpoint-2"}
    run = cli.start("short", variables={**ranks, **less}, **flags)
    code, _, err = run.wait()
    short = run.folder
    assert code == 0, err
    again = [line for line in err.splitlines() if line.startswith("swift: note: the run starts again: ")]
    assert again and all("--max_tokens_per_micro_batch" in line and "checkpoint-2" in line for line in again)
    assert sampled(short) == sampled(ample)
    assert len(log_rows(short)) == FLAGS["max_steps"]
    assert_close(short, ample, "loss", "grad_norm", "kl")


def test_a_completion_that_does_not_fit_ends_the_run_and_says_what_to_lower(cli, plugins):
    code, _, err = cli.start("never", variables={"ROOM": 5}, external_plugins=plugins, **FLAGS).wait()
    assert code == 3
    assert "memory: out of memory in phase train" in err and "--max_completion_length" in err
