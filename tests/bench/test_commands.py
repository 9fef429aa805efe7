"""The benchmark itself, in small: both sides' commands run, agree, and their logs give the figures."""

import json
import os
import subprocess
import sys

import pytest


def execute(benchmarks, *words):
    return subprocess.run(
        [sys.executable, str(benchmarks / "run.py"), *words],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "steps"), [("small", 3), ("linear-prompt", 2), ("conv-prompt", 2), ("vision-prompt", 2)]
)
def test_swift_and_trl_take_turns_and_their_gradients_agree(benchmarks, tmp_path, row, steps):
    out = tmp_path / "run.json"
    words = ["--rows", row, "--size", "nano", "--turns", "1", "--folder", str(tmp_path / "work"), "--out", str(out)]
    done = execute(benchmarks, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(out.read_text())["rows"]
    assert found["agreement"]["cosine"] > 0.9999999 and not found["void"]
    for side in ("swift", "trl"):
        (run,) = found["sides"][side]["runs"]
        assert len(run["seconds"]) == steps and run["tokens"] == [64 * 64] * steps
        assert 0 < sum(run["seconds"]) < run["wall_s"] and run["start_s"] < run["wall_s"] and run["peak_mib"] > 100
    assert found["ratios"]["trl"]["step"]["value"] > 0


def test_a_command_that_fails_is_named_with_what_it_printed(tmp_path):
    from harness.sides import Command
    from harness.turns import measure

    words = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with pytest.raises(RuntimeError, match=r"ended with 3 after 0 of 2 steps:\nno such model"):
        measure(Command(words, dict(os.environ), tmp_path), 2)


def test_gradients_that_differ_void_the_row(tmp_path):
    import torch
    from harness.agreement import compare
    from safetensors.torch import save_file

    weights = {"start": [1.0, 1.0], "ours": [2.0, 1.0], "same": [2.0, 1.0], "other": [1.0, 2.0]}
    for name, values in weights.items():
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor(values)}, tmp_path / name / "model.safetensors")
    assert compare(tmp_path / "start", tmp_path / "ours", tmp_path / "same")["cosine"] == pytest.approx(1.0)
    assert compare(tmp_path / "start", tmp_path / "ours", tmp_path / "other")["cosine"] == pytest.approx(0.0)


@pytest.mark.slow
@pytest.mark.long
def test_the_check_of_a_gpu_runs_in_small_on_a_cpu(benchmarks, tmp_path):
    wanted = ["gradients", "packed", "lora", "hybrid", "vision", "ahead"]
    words = ["sh", str(benchmarks / "gpu" / "check.sh"), str(tmp_path / "out"), "--small", "--only", *wanted]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "out" / "check.jsonl").read_text().splitlines()]
    assert [row["row"] for row in found] == wanted and found[0]["sdpa float32"]["cosine"] > 0.999999
    assert all(row["planned_mib"] > 0 for row in found[1:-2]) and found[-2]["ok"]
    assert found[-1]["agreement"]["cosine"] > 0.999999 and found[-1]["trl"]["attention"].startswith("sdpa")
    (report,) = (tmp_path / "out").glob("gpu-cpu-*.json")
    assert json.loads(report.read_text())["rows"] == found
