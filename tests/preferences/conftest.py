import json
import random

import pytest

from swift.arguments import parse


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


@pytest.fixture
def settings(nano_folders, tmp_path):
    """Resolved settings of a small run of a method on 32 pairs, as a function of the flags that differ."""

    def resolved(method, *flags, rows=None):
        data = written(tmp_path / "pairs.jsonl", rows or (verdicts(32) if method == "kto" else sums(32)))
        base = {
            "--model": str(nano_folders["qwen2"]),
            "--dataset": str(data),
            "--tuner_type": "full",
            "--output_dir": str(tmp_path / "out"),
            "--learning_rate": "3e-3",
            "--per_device_train_batch_size": "4",
            "--max_steps": "4",
            "--logging_steps": "1",
            "--gradient_checkpointing": "false",
            "--report_to": "none",
        }
        words = [word for flag, value in base.items() if flag not in flags[::2] for word in (flag, value)]
        return parse("rlhf", ["--rlhf_type", method, *words, *flags], {})

    return resolved
