"""Where completions are sampled changes nothing of a run but its speed: every mode, through the command line."""

import re
import time
from pathlib import Path

import pytest
from cli_runs import Cli, attempts, completion_rows, engines_of, log_rows, sampled

from swift.trainers.checkpoint import verify

pytestmark = pytest.mark.slow

STEPS = {"max_steps": 3, "save_steps": 3, "max_length": 40, "gradient_checkpointing": "false"}
VLLM = {**STEPS, "use_vllm": "true", "vllm_enforce_eager": "true", "vllm_max_num_seqs": 16}


def agrees(folder, limit=1e-5):
    """Every step that trained on fresh tokens saw what the sampler saw."""
    rows = [row for row in log_rows(folder) if "mismatch/logp_abs_diff_max" in row]
    assert len(rows) == 3
    assert max(row["mismatch/logp_abs_diff_max"] for row in rows) <= limit


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model whose heads are as wide as vLLM's kernels for CPUs want them."""
    from swift.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tiny") / "qwen2", arch="qwen2", size="tiny")


@pytest.fixture
def cli(tiny, material, tmp_path):
    with Cli(tiny, material[1], tmp_path) as runs:
        yield runs


@pytest.fixture(scope="module")
def colocated(tiny, material, tmp_path_factory):
    """A run with vLLM in the trainer's process, and what it printed."""
    with Cli(tiny, material[1], tmp_path_factory.mktemp("colocated")) as runs:
        return runs.finish("colocate", **VLLM), runs.printed


def test_vllm_in_the_trainers_process(colocated):
    folder, printed = colocated
    agrees(folder)
    assert [row["weight_version"] for row in completion_rows(folder)] == sorted([0, 1, 2] * 8)
    assert "placement: colocate" in printed
    assert re.search(r"max \|logp difference\| \S+e-0[5-9]", printed)


@pytest.mark.long
def test_vllm_in_a_process_of_its_own(cli, colocated):
    folder = cli.finish("dedicated", **VLLM, vllm_mode="dedicated")
    agrees(folder)
    assert sampled(folder) == sampled(colocated[0])
    assert "placement: dedicated" in cli.printed
    assert (folder / "logs" / "attempt-1" / "engine-0.log").is_file()


TWO_RANKS = {**VLLM, "vllm_mode": "colocate", "per_device_train_batch_size": 2, "variables": {"NPROC_PER_NODE": 2}}


@pytest.mark.long
def test_one_engine_over_two_ranks(cli):
    folder = cli.finish("wide", **TWO_RANKS, vllm_tensor_parallel_size=2)
    agrees(folder)
    # whose names are those of the next such run
    assert [one.name for one in Path("/dev/shm").glob("-*cpushm*")] == []


@pytest.mark.long
@pytest.mark.parametrize("way", [{}, {"deepspeed": "zero2"}, {"deepspeed": "zero3"}], ids=["ddp", "zero2", "zero3"])
def test_two_ranks_with_an_engine_each(cli, way):
    agrees(cli.finish("two", **TWO_RANKS, **way))


@pytest.mark.long
def test_an_engine_that_may_not_be_replaced_ends_the_run_and_is_named(cli):
    settings = {**STEPS, "infer_backend": "transformers", "vllm_mode": "dedicated", "max_steps": 1000}
    run = cli.start("mortal", **settings, engine_restarts=0)
    run.reach(2)
    killed_at = time.monotonic()
    err = run.ends(4, lambda: [engine.kill() for engine in engines_of(run)])
    assert time.monotonic() - killed_at < 60
    assert "engine 0 (cpu:1)" in err
    assert "--engine_restarts 0" in err
    last = f"checkpoint-{attempts(run.folder)[-1]['end_step']}"
    assert f"{last} is its last checkpoint; resume: swift rlhf" in err
    verify(run.folder / last)
