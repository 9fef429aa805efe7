"""Bands for the metrics of the examples: `python tests/support/metric_history.py --write [part of a script's name]`.

Each script runs for `STEPS` steps with five seeds. A metric's band reaches from the smallest to the largest of its
medians over these steps, and further by the larger of `REACH` times their distance and `SLACK`, of values above `NOISE`
as ratios: about six standard deviations to each side, since another processor draws other tokens from the same seed. A
metric far off in the good direction is a broken metric, too. Bands are read in review like code.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "train"
BANDS = Path(__file__).with_name("metric_history.json")
STEPS = 8
SEEDS = (42, 43, 44, 46, 47)
REACH = 2.0
SLACK = 0.3
NOISE = 1e-6
"""Of rounding; values below it may have either sign."""
SCRIPTS = [
    *(TRAIN / "grpo" / f"{name}.sh" for name in (
        "distillation", "experts_cpu", "guided_regex", "hybrid_cpu", "off_policy_cpu", "rollout_func",
        "two_processes_cpu", "vision/colours",
    )),
    TRAIN / "ebft" / "structured.sh",
    TRAIN / "sft" / "tiny.sh",
    TRAIN / "sft" / "pretrain.sh",
    *(TRAIN / "preference" / f"{name}.sh" for name in ("dpo",)),
]  # fmt: skip
"""Of those that make their own model and data."""

METRICS = (
    "loss", "grad_norm", "reward", "reward_std", "kl", "entropy", "completions/mean_length", "mismatch/kl",
    "teacher_kl", "rewards/margins", "rewards/accuracies", "accuracy", "mean_token_accuracy", "ebft/cfm_loss",
)  # fmt: skip


WITHOUT_FLAGS = ("ebft", "sft")
"""Folders whose scripts take no further flags."""
SHORTER = """case $1 in
  {command}) exec {python} -m swift "$@" {words};;
  infer) exit 0;;
esac
"""


def name_of(script: Path) -> str:
    """Its path below examples/train."""
    return str(script.relative_to(TRAIN))


def measured(script: Path, folder: Path, seed: int) -> dict[str, float]:
    """Median over the first steps of each metric that the script's last run logs; it runs in a copy of the examples."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    programs = folder / "bin"
    programs.mkdir()
    words = f"--max_steps {STEPS} --logging_steps 1 --seed {seed}"
    flags = [] if script.parent.name in WITHOUT_FLAGS else words.split()
    trains = "rlhf" if "swift rlhf" in script.read_text() else "sft|pt"
    shorter = "" if flags else SHORTER.format(command=trains, python=sys.executable, words=words)
    (programs / "swift").write_text(f'#!/bin/sh\n{shorter}exec {sys.executable} -m swift "$@"\n')
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", str(folder / "examples" / "train" / name_of(script)), *flags]
    run = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    log = max((folder / "output").rglob("logging.jsonl"), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row for row in rows if "loss" in row and "grad_norm" in row]
    assert len(rows) == STEPS, log
    return {
        metric: statistics.median(row[metric] for row in rows)
        for metric in METRICS
        if all(metric in row for row in rows)
    }


def band(medians: list[float]) -> list[float]:
    """Lower and upper end, to four digits."""
    low, high = min(medians), max(medians)
    if low > NOISE:
        ratio = max((high / low) ** REACH, 1 + SLACK)
        low, high = low / ratio, high * ratio
    else:
        reach = max(REACH * (high - low), SLACK * abs(low + high) / 2, NOISE)
        low, high = low - reach, high + reach
    return [float(f"{low:.4g}"), float(f"{high:.4g}")]


def main() -> None:
    """Writes the bands of the scripts whose names have the given part."""
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    bands = json.loads(BANDS.read_text()) if BANDS.exists() else {}
    for script in SCRIPTS:
        if part not in name_of(script):
            continue
        runs = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(measured(script, Path(folder), seed))
        bands[name_of(script)] = {metric: band([run[metric] for run in runs]) for metric in runs[0]}
        print(name_of(script), bands[name_of(script)], flush=True)
        BANDS.write_text(json.dumps(bands, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    main()
