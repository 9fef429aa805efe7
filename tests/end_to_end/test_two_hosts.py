"""The shipped scripts for two machines, run for real between two network namespaces, with tiny models."""

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import hosts
import psutil
import pytest

from swift.observability.jsonl import read_jsonl

pytestmark = [pytest.mark.long, pytest.mark.skipif(not hosts.possible(), reason="needs root and `ip netns`")]

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "train" / "grpo" / "multi_node"
LIMIT_S = 280
SMALL = shlex.split(
    "--reward_funcs odd --num_generations 4 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 "
    "--max_length 40 --max_completion_length 12 --learning_rate 1e-3 --save_steps 3 --logging_steps 1 --max_steps 3 "
    "--report_to none --add_version false --gradient_checkpointing false"
)


@pytest.fixture
def settings(material, tmp_path):
    """Variables and words that put tiny parts into the scripts."""
    model, folder = material
    variables = {
        "MODEL": model,
        "DATASET": folder / "train.jsonl",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "NPROC_PER_NODE": 1,
        "VLLM_CPU_KVCACHE_SPACE": 1,
    }
    return variables, [
        *SMALL,
        "--external_plugins",
        str(folder / "odd_plugin.py"),
        "--output_dir",
        str(tmp_path / "run"),
    ]


def wait(processes, folder):
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.wait(max(1, deadline - time.monotonic()))
    said = {path.name: path.read_text() for path in sorted(folder.glob("host-*.log"))}
    return [process.returncode for process in processes], said


def start_nodes(two, settings, folder, *words):
    """`node.sh` on both hosts, with the transformers engine: vLLM twice is too much for two cores."""
    variables, small = settings
    words = [*small, "--use_vllm", "false", "--infer_backend", "transformers", "--vllm_mode", "dedicated", *words]
    return [
        two.start(
            host,
            ["bash", str(SCRIPTS / "node.sh"), *words],
            folder=folder,
            NODE_RANK=host,
            MASTER_ADDR=two.address(0),
            **{"NNODES": 2, **variables},
        )
        for host in (0, 1)
    ]


def wait_for_steps(folder, count):
    log, deadline = folder / "run" / "logging.jsonl", time.monotonic() + LIMIT_S
    while not log.exists() or len(log.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, (folder / "host-0.log").read_text()
        time.sleep(0.2)


def test_two_nodes_train_one_policy_and_one_cluster_samples_on_both(settings, tmp_path):
    with hosts.TwoHosts() as two:
        codes, said = wait(start_nodes(two, settings, tmp_path), tmp_path)
        left = two.processes()
    assert codes == [0, 0], said
    assert not left
    rows = list(read_jsonl(tmp_path / "run" / "completions.jsonl"))
    assert sorted({row["step"] for row in rows}) == [1, 2, 3]
    assert all(len({r["group_id"] for r in rows if r["step"] == step}) == 2 for step in (1, 2, 3))
    assert max(row["weight_version"] for row in rows) >= 1
    logs = list(read_jsonl(tmp_path / "run" / "logging.jsonl"))
    assert max(row["mismatch/logp_abs_diff_max"] for row in logs if row["off_policy/max"] == 0) < 1e-5
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    assert len(list((tmp_path / "run" / "logs" / "attempt-1").glob("engine-*.log"))) == 2


def test_nothing_is_left_on_either_node_when_the_driver_is_killed(settings, tmp_path):
    with hosts.TwoHosts() as two:
        start_nodes(two, settings, tmp_path, "--max_steps", "100000")
        wait_for_steps(tmp_path, 2)
        assert all(any("ray::EngineActor" in words for words in two.processes(host).values()) for host in (0, 1))
        trainers = [pid for pid, words in two.processes(0).items() if "-m swift rlhf" in words]
        driver = next(pid for pid in trainers if psutil.Process(pid).environ().get("RANK") == "0")
        os.kill(driver, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while two.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not two.processes()


def test_a_trainer_uses_a_server_on_another_host(settings, tmp_path):
    variables, words = settings
    variables |= {"SWIFT_API_KEY": "a-long-random-text", "PORT": 8123}
    script = ["bash", str(SCRIPTS / "trainer_and_server.sh")]
    with hosts.TwoHosts() as two:
        small = ["--vllm_max_model_len", "128", "--use_vllm", "false"]  # vLLM has no kernel for heads as small as these
        two.start(0, [*script, *small], folder=tmp_path, ROLE="server", **variables)
        trainer = two.start(1, [*script, *words], folder=tmp_path, ROLE="trainer", SERVER=two.address(0), **variables)
        codes, said = wait([trainer], tmp_path)
    assert codes == [0], said
    assert "ready http://" in said["host-0.log"]
    assert f"generation by http://{two.address(0)}:8123" in said["host-1.log"]
    logs = list(read_jsonl(tmp_path / "run" / "logging.jsonl"))
    assert max(row["mismatch/logp_abs_diff_max"] for row in logs if row["off_policy/max"] == 0) < 1e-5


def test_a_cut_cable_ends_both_sides_in_a_minute_with_a_line_that_names_the_other(settings, tmp_path):
    with hosts.TwoHosts() as two:
        started = start_nodes(two, settings, tmp_path, "--max_steps", "100000")
        wait_for_steps(tmp_path, 1)
        two.cut()
        cut_at = time.monotonic()
        codes, said = wait(started, tmp_path)
    assert time.monotonic() - cut_at < 90
    assert 0 not in codes
    assert "rank 1: gave no sign of life" in said["host-0.log"]
    assert "rank 0: cannot be reached" in said["host-1.log"]
    assert json.loads((tmp_path / "run" / "attempts.jsonl").read_text().splitlines()[0])["attempt"] == 1
