"""Whole runs under the launcher: two training processes behave like one command."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def command(desk):
    return [sys.executable, "-m", "swift", *desk.rlhf("--per_device_train_batch_size 4")]


def run(command, tmp_path, **more):
    return subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **more},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.long
def test_an_error_in_two_processes_is_told_once(command, tmp_path):
    done = run([*command, "--dataset", "raws.jsonl"], tmp_path, NPROC_PER_NODE="2")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("swift: error: ")]
    assert errors == ["swift: error: --dataset: raws.jsonl: no such file or folder; nearest: rows.jsonl"]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "output").exists()


@pytest.mark.long
def test_torchrun_starts_the_same_program(command, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "swift", *command[3:]]
    done = run([*torchrun, "--max_steps", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("Everything lies in") == 1
