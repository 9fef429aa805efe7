"""The demo's tiny model and problems, for scripts that need a model which has something to learn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "demo"
KEY = "cat examples/demo.sh examples/demo/problems.py examples/tiny/build.py swift/models/tiny.py | cksum"
SFT_STEPS, SEED = 400, 0
LIMIT_S = 1800.0


def environment(**more: str) -> dict[str, str]:
    """That of a shell in which this Python's `swift` is on the PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def demo_model(folder: Path) -> Path:
    """The model after supervised tuning: that of the last demo, or made by one of a single step.

    Args:
        folder: where that demo may write.

    Raises:
        RuntimeError: it could not be made; with the end of what was printed.
    """
    key = subprocess.run(["sh", "-c", KEY], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[0]
    model = CACHE / f"{key}-{SFT_STEPS}-{SEED}"
    if model.is_dir():
        return model
    done = subprocess.run(
        ["sh", "examples/demo.sh"],
        cwd=ROOT,
        env=environment(OUT=str(folder / "demo"), STEPS="1", SFT_STEPS=str(SFT_STEPS), SEED=str(SEED)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,  # one step does not reach the demo's target; the model is what matters
    )
    if not model.is_dir():
        raise RuntimeError(f"examples/demo.sh made no {model}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return model


def make_problems(folder: Path) -> tuple[Path, Path]:
    """The demo's train.jsonl and held_out.jsonl."""
    command = [sys.executable, "examples/demo/problems.py", str(folder), "--sft_rows", "1", "--seed", str(SEED)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S)
    return folder / "train.jsonl", folder / "held_out.jsonl"
