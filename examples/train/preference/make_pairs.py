"""Preferences with a rule behind them: the right sum of two small numbers, and a wrong one.

python make_pairs.py pairs.jsonl             three quarters of all pairs, to train on
python make_pairs.py val.jsonl --held_out    the other quarter
python make_pairs.py kto.jsonl --labels      single answers, each with a label, for KTO
python make_pairs.py prm.jsonl --steps       answers of several sums, each with a label, for process reward models
python make_pairs.py gkd.jsonl --chats       right answers only, for supervised tuning and distillation
"""

import argparse
import json
import random
from pathlib import Path


def pairs(largest: int = 4, seed: int = 0) -> list[dict]:
    """Every sum of two numbers up to `largest` with every wrong answer, in a random order."""
    numbers = range(largest + 1)
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}
        for a in numbers
        for b in numbers
        for wrong in range(2 * largest + 1)
        if wrong != a + b
    ]
    random.Random(seed).shuffle(rows)
    return rows


def part(rows: list[dict], held_out: bool) -> list[dict]:
    """The rows to train on, or the others."""
    bound = len(rows) * 3 // 4
    return rows[bound:] if held_out else rows[:bound]


def labelled(rows: list[dict]) -> list[dict]:
    """One answer per pair, good and bad in turns."""
    kinds = (("chosen", True), ("rejected", False))
    return [
        {"prompt": row["prompt"], "completion": row[kinds[number % 2][0]], "label": kinds[number % 2][1]}
        for number, row in enumerate(rows)
    ]


def stepwise(count: int = 1024, seed: int = 0) -> list[dict]:
    """Answers of one to three sums, of which about half are right."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        sums = [(draw.randint(0, 2), draw.randint(0, 2), draw.random() < 0.5) for _ in range(draw.randint(1, 3))]
        steps = [f"{a}+{b}={a + b if right else a + b + 1}" for a, b, right in sums]
        rows.append({"prompt": "add", "completions": steps, "labels": [right for *_, right in sums]})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--held_out", action="store_true")
    parser.add_argument("--labels", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--chats", action="store_true")
    options = parser.parse_args()
    rows = part(pairs(), options.held_out)
    if options.labels:
        rows = labelled(rows)
    elif options.chats:
        rows = [{"query": row["prompt"], "response": row["chosen"]} for row in rows]
    elif options.steps:
        rows = stepwise(64, seed=1) if options.held_out else stepwise()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text("".join(json.dumps(row) + "\n" for row in rows))
