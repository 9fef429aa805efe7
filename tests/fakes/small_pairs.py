"""Preferences about one-digit sums."""

import json
import random


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
