"""Whole runs under the launcher: two training processes behave like one command."""

import json
import os
import subprocess
import sys

import pytest

from swift.models.tiny import build_tiny

pytestmark = pytest.mark.slow


@pytest.fixture
def command(tmp_path):
    build_tiny(tmp_path / "tiny", size="nano")
    rows = [{"query": f"{n} + 1?", "solution": str(n + 1)} for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "rlhf --rlhf_type grpo --model tiny --dataset rows.jsonl --reward_funcs accuracy --max_completion_length 8"
    return [sys.executable, "-m", "swift", *words.split(), "--per_device_train_batch_size", "4", "--report_to", "none"]


def environment(**more):
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        **{name: value for name, value in os.environ.items() if name not in outer},
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def run(command, tmp_path, **more):
    return subprocess.run(
        command, cwd=tmp_path, env=environment(**more), capture_output=True, text=True, timeout=240, check=False
    )


def test_an_error_in_two_processes_is_told_once(command, tmp_path):
    done = run([*command, "--dataset", "raws.jsonl"], tmp_path, NPROC_PER_NODE="2")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("swift: error: ")]
    assert errors == ["swift: error: --dataset: raws.jsonl: no such file or folder; nearest: rows.jsonl"]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "output").exists()


def test_torchrun_starts_the_same_program(command, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "swift", *command[3:]]
    done = run([*torchrun, "--max_steps", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("Everything lies in") == 1
