"""Preferences about one-digit sums, and runs that learn from them."""

import json
import random
from pathlib import Path

from swift.trainers.trl.run import run


def sums(count, seed=0):
    """Pairs about one-digit sums: the right answer is chosen, a wrong one is rejected."""
    draw = random.Random(seed)
    for _ in range(count):
        a, b = draw.randint(0, 4), draw.randint(0, 4)
        wrong = draw.choice([n for n in range(9) if n != a + b])
        yield {
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "chosen": [{"role": "assistant", "content": str(a + b)}],
            "rejected": [{"role": "assistant", "content": str(wrong)}],
        }


def verdicts(count, seed=0):
    """The same as single answers, each with its label; good and bad ones take turns."""
    for number, pair in enumerate(sums(count, seed)):
        good = number % 2 == 0
        yield {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(resolved) -> Path:
    """Runs the method in this process; the run's folder."""
    assert run(resolved) == 0
    folders = Path(resolved.args.output_dir).glob("v*-*")
    return max(folders, key=lambda path: int(path.name[1:].split("-")[0]))


def logged(run_dir, key="loss"):
    rows = [json.loads(line) for line in (run_dir / "logging.jsonl").read_text().splitlines()]
    return {(row["attempt"], row["step"]): row[key] for row in rows if key in row}
