"""The counter of other people's YAML files: each verdict, with its reasons."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BASE = {
    "base_model": "NousResearch/Llama-3.2-1B", "datasets": [{"path": "d", "type": "alpaca", "split": "train[:1000]"}],
    "learning_rate": 1e-4, "sequence_len": 2048, "output_dir": "./outputs", "special_tokens": {"eos_token": "</s>"},
}  # fmt: skip
SEEING = {"base_model": "Qwen/Qwen2.5-VL-7B-Instruct", "processor_type": "AutoProcessor", "chat_template": "qwen2_vl"}
CONFIGS = {
    "fits.yaml": (BASE, "ok", ""),
    "rl/dpo.yml": ({**BASE, "rl": "dpo", "datasets": [{"path": "d", "type": "chat_template"}]}, "ok", ""),
    "sees.yaml": ({**BASE, **SEEING, "datasets": [{"path": "d", "type": "chat_template"}]}, "ok", ""),
    "loses.yaml": ({**BASE, "fp8": True}, "lost", "fp8: unknown"),
    "refused.yaml": ({**BASE, "gptq": True}, "refused", "gptq: true"),
    "misses.yaml": ({**BASE, "use_swanlab": True}, "here", "--report_to: swanlab"),
}


@pytest.mark.long
def test_files_are_imported_and_tried_with_small_parts(tmp_path):
    for name, (config, _, _) in CONFIGS.items():
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "in" / name).write_text(yaml.safe_dump(config))
    script, out = ROOT / "benchmarks/foreign_configs.py", tmp_path / "out.json"
    subprocess.run([sys.executable, script, tmp_path / "in", "--out", out, "--pretend"], check=True)
    found = {one["script"]: (one["verdict"], "".join(one["lines"])) for one in json.loads(out.read_text())}
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        name: verdict for name, (_, verdict, _) in CONFIGS.items()
    }
    assert all(reason in found[name][1] for name, (_, _, reason) in CONFIGS.items())
