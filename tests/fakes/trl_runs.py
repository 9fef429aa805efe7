"""Preferences about one-digit sums, and runs of trainers of TRL or transformers."""

import json
import random
from pathlib import Path

from swift.models import load_chat
from swift.trainers.distributed import Collectives
from swift.trainers.trl.frame import build_trainer
from swift.trainers.trl.method import method_of
from swift.trainers.trl.run import load_model, run


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


def argv_of(own, flags):
    """The words of a small run: `flags` in place of `own` settings, and these in place of what is usual."""
    usual = {
        "--tuner_type": "full", "--learning_rate": "3e-3", "--logging_steps": 1, "--gradient_checkpointing": "false",
        "--report_to": "none",
    }  # fmt: skip
    base = {flag: str(value).split() for flag, value in {**usual, **own}.items() if flag not in flags}
    return [*(word for flag, words in base.items() for word in (flag, *words)), *flags]


def trainer_of(resolved, folder):
    """The trainer of a run, before its first step."""
    method, args = method_of(resolved.mode), resolved.args
    template = load_chat(args, plain=method.plain)
    train, val, _ = method.encode(args, template)
    model, parts = load_model(args, method)
    more = {"collectives": Collectives(), "settings": {}, "parts": parts}
    return build_trainer(method, args, folder, model, template, train, val, [], **more)


def trained(resolved) -> Path:
    """Runs the method in this process; the run's folder."""
    assert run(resolved) == 0
    return newest_run(resolved.args.output_dir)


def newest_run(output_dir) -> Path:
    return max(Path(output_dir).glob("v*-*"), key=lambda path: int(path.name[1:].split("-")[0]))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_dir) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(run_dir / "logging.jsonl") if "loss" in row]


def logged(run_dir, key="loss"):
    """A metric by attempt and step."""
    return {(row["attempt"], row["step"]): row[key] for row in rows(run_dir / "logging.jsonl") if key in row}
