"""vLLM over two training processes (gloo), and over two processes of its own; the trainer's collectives go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from oracle import load, with_noise
from vllm_parts import LIMIT, drift, require_vllm, sample
from vllm_parts import requests as some_requests
from vllm_parts import spec_of as spec

from swift.errors import ConfigError
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import build_engine
from swift.rollout.weights.policy import PolicyWeights

require_vllm()
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def segments():
    """Shared memory of this machine, without the semaphores that Python makes and unlinks at once."""
    return {one for one in Path("/dev/shm").iterdir() if not one.name.startswith("sem.mp-")}


def parts():
    return [one for one in psutil.Process().children() if "VLLM" in " ".join(one.cmdline())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"), arch="qwen2", size="tiny")


@pytest.mark.long
def test_two_ranks_with_an_engine_each_and_then_with_one_over_both(folder):
    before = segments()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=localhost:0", str(HERE / "vllm_rank.py"), str(folder)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert segments() <= before
    # two processes write into one pipe, and one's end of line may come after the other's beginning
    printed = [json.JSONDecoder().raw_decode(text.strip())[0] for text in done.stdout.split("FACTS")[1:]]
    facts = {(one["mode"], one["rank"]): one for rank in printed for one in rank}
    assert len(facts) == 4, done.stdout[-2000:]
    for one in facts.values():
        assert set(one["sums"]) == {3.0}
        assert max(one["drifts"]) <= LIMIT
        assert one["again"] == one["tokens"]
        assert one["awake"] and one["freed"] > 0 and one["environment_kept"]
    for mode, parts in (("own", 1), ("split", 2)):
        first, second = facts[mode, 0], facts[mode, 1]
        assert first["digest"] == second["digest"]
        assert first["weights"] == second["weights"] == weight_bytes(folder) // parts
        if mode == "own":
            assert not first["tokens"].keys() & second["tokens"].keys()
        else:
            assert first["tokens"] == second["tokens"]


def weight_bytes(folder):
    return sum(parameter.nbytes for parameter in load(folder).parameters())


@pytest.mark.long
def test_one_engine_over_processes_of_its_own(folder):
    before = segments()
    engine = build_engine(spec(folder, tensor_parallel_size=2, devices=("cpu:0", "cpu:1")))
    try:
        model = load(folder)
        for version in (1, 2):
            with_noise(model, seed=version)
            engine.load_weights(PolicyWeights(model, move_model_batches=2), version)
            assert drift(engine, model) <= LIMIT
        tokens = {name: one.token_ids for name, one in sample(engine, some_requests()).items()}
        assert engine.sleep(1).freed_bytes > 0
        engine.wake()
        assert {name: one.token_ids for name, one in sample(engine, some_requests()).items()} == tokens
        assert len(parts()) == 2
    finally:
        engine.close()
    assert parts() == []
    assert segments() <= before


def test_tensor_parallelism_over_ranks_needs_ranks(folder):
    with pytest.raises(ConfigError, match=r"--vllm_tensor_parallel_size: 2: torch.distributed is not initialised"):
        build_engine(spec(folder, tensor_parallel_size=2, in_ranks=True))
