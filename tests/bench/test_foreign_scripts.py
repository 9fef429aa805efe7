"""The counter of other people's scripts: each verdict, with the lines that the user sees."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "sft/fits.sh": "NPROC_PER_NODE=2 \\\nswift sft \\\n  --model Qwen/Qwen3-8B \\\n  --dataset 'd#500' # rows\n",
    "sft/omni.sh": "swift sft --model Qwen/Qwen2.5-Omni-7B --dataset who/charts --tuner_type full\n",
    "sft/sees.sh": "swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --dataset who/charts\n",
    "rl/unknown.sh": "swift rlhf --rlhf_type grpo --model Qwen3-8B --dataset d --reward_funcs accuracy --no_flag 1\n",
    "rl/misses.sh": "swift rlhf --rlhf_type dpo --model Qwen/Qwen3-8B --dataset d --report_to swanlab\n",
    "megatron/left_out.sh": "swift sft --model m --dataset d\n",
    "infer.sh": "swift infer --model m\n",
}


@pytest.mark.long
def test_scripts_are_tried_with_small_parts(tmp_path):
    for name, text in SCRIPTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    words = [ROOT / "benchmarks/foreign_scripts.py", tmp_path, "--out", tmp_path / "out.json", "--pretend"]
    subprocess.run([sys.executable, *map(str, words)], check=True)
    found = {one["script"]: one for one in json.loads((tmp_path / "out.json").read_text())}
    verdicts = {name: (one["kind"], one["verdict"]) for name, one in found.items()}
    assert verdicts == {
        "sft/fits.sh": ("text", "ok"),
        "sft/omni.sh": ("images", "ok"),
        "sft/sees.sh": ("images", "ok"),
        "rl/unknown.sh": ("text", "refused"),
        "rl/misses.sh": ("text", "here"),
    }
    assert "--no_flag" in found["rl/unknown.sh"]["lines"][0]
