"""examples/train/chain.sh from the first step to the last, and a process reward model as the reward of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_whole_chain_ends_with_a_better_model(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("swift", "-m swift "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    run = subprocess.run(
        ["sh", "examples/train/chain.sh"],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    before, after = (float(word) for word in run.stdout.splitlines()[-1].split() if word[0].isdigit())
    assert after > before + 0.2


@pytest.mark.long
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_process_reward_model_is_a_reward_of_grpo(nano_folders, tmp_path, tuner):
    from swift.cli.main import main

    rows = [{"prompt": f"{n}", "completions": ["a", "b"], "labels": [True, n % 2 == 0]} for n in range(16)]
    data = tmp_path / "steps.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = f"--model {nano_folders['qwen2']} --report_to none --add_version false --max_steps 2".split()
    prm = f"rlhf --rlhf_type prm --dataset {data} --tuner_type {tuner} --output_dir {tmp_path / 'prm'}"
    assert main([*prm.split(), *shared]) == 0
    grpo = f"rlhf --rlhf_type grpo --dataset {data} --num_generations 4 --max_completion_length 4 --logging_steps 1"
    grpo += f" --reward_model {tmp_path / 'prm' / 'checkpoint-2'} --output_dir {tmp_path / 'grpo'}"
    grpo += ' --columns {"completions":"steps"} --per_device_train_batch_size 8'
    assert main([*grpo.split(), *shared]) == 0
    lines = (tmp_path / "grpo" / "logging.jsonl").read_text().splitlines()
    assert all(0 < json.loads(line)["reward"] < 1 for line in lines)
