"""Do swift and TRL compute the same gradient? One step of plain gradient descent each, through their commands.

Both get the same completions, of mixed lengths, from a file, take one step of SGD with rate 1 and save the model: what
has changed is the gradient. `python agreement.py MODEL A B` compares two saved models and prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.sides import recorded_command
from harness.turns import measure
from harness.works import Work, prompts, write_prompts

REQUIRED_COSINE, NORM_TOLERANCE = 0.9999, 0.01
TEXT_TOKENS = 256
COMPARE_LIMIT_S = 600.0


def agreement(work: Work) -> dict[str, Any]:
    """Cosine and ratio of lengths of both gradients on one batch of the row's size, in float32."""
    recorded = write_recorded(replace(work, row=replace(work.row, dtype="float32")))
    with tempfile.TemporaryDirectory() as folder:
        saved = []
        for side in ("swift", "trl"):
            output = Path(folder) / side
            output.mkdir()
            measure(recorded_command(side, recorded, output), 1)
            saved.append(next(path.parent for path in sorted(output.rglob("model.safetensors"))))
        found = compared(work.model, *saved)
    close = abs(found["norm_ratio"] - 1) <= NORM_TOLERANCE
    return {**found, "agrees": found["cosine"] >= REQUIRED_COSINE and close}


def write_recorded(work: Work) -> Work:
    """The same work with recorded completions, and a dataset of their prompts alone: one batch."""
    row, rng = work.row, random.Random(0)
    texts = prompts(row.prompt_tokens)[: row.num_completions // row.num_generations]
    completions = {
        text: [
            [rng.randrange(TEXT_TOKENS) for _ in range(rng.randint(1, row.completion_tokens))]
            for _ in range(row.num_generations)
        ]
        for text in texts
    }
    work.recorded.write_text(json.dumps(completions), encoding="utf-8")
    dataset = work.recorded.with_name("recorded-prompts.jsonl")
    write_prompts(dataset, texts, row.image_side)
    return replace(work, dataset=dataset)


def compared(model: Path, ours: Path, theirs: Path) -> dict[str, Any]:
    """`compare` in a process of its own: the harness stays small."""
    words = [sys.executable, __file__, str(model), str(ours), str(theirs)]
    folder = str(Path(__file__).parents[1])
    done = subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=COMPARE_LIMIT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    return dict(json.loads(done.stdout))


def compare(model: Path, ours: Path, theirs: Path) -> dict[str, float]:
    """Of the changes that two runs made to a model."""
    import torch
    from safetensors.torch import load_file

    start, one, other = (load_file(folder / "model.safetensors") for folder in (model, ours, theirs))
    if not start.keys() == one.keys() == other.keys():
        raise ValueError("the saved models have different parameters")
    a, b = (
        torch.cat([(changed[name].double() - start[name].double()).flatten() for name in sorted(start)])
        for changed in (one, other)
    )
    return {
        "cosine": float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
        "norm_ratio": float(a.norm() / b.norm()),
        "norm": float(a.norm()),
    }


if __name__ == "__main__":
    print(json.dumps(compare(*map(Path, sys.argv[1:]))))
