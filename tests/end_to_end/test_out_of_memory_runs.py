"""A run that runs out of memory while it trains samples and trains as one that does not."""

import pytest
from cli_runs import assert_close, log_rows, sampled

pytestmark = pytest.mark.slow

SHORT = """
import os

import torch

import swift.trainers.grpo.logprobs as logprobs

usual, room = logprobs.score_tokens, int(os.environ.get("ROOM", 10**9))

def score_tokens(model, tokens, **settings):
    scores = usual(model, tokens, **settings)
    if torch.is_grad_enabled() and tokens.inputs["input_ids"].numel() > room:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return scores

logprobs.score_tokens = score_tokens
"""
FLAGS = {"max_steps": 4, "beta": 0.04, "num_iterations": 2}


@pytest.fixture
def plugins(cli):
    (cli.folder / "short.py").write_text(SHORT)
    return [cli.material / "odd_plugin.py", cli.folder / "short.py"]


@pytest.mark.parametrize("processes", [1, 2])
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


def test_a_completion_that_does_not_fit_ends_the_run_and_says_what_to_lower(cli, plugins):
    code, _, err = cli.start("never", variables={"ROOM": 5}, external_plugins=plugins, **FLAGS).wait()
    assert code == 3
    assert "memory: out of memory in phase train" in err and "--max_completion_length" in err
