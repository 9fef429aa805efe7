"""Preferences with a rule behind them: the right sum of two small numbers, and a wrong one.

python make_pairs.py pairs.jsonl             three quarters of all pairs, to train on
python make_pairs.py val.jsonl --held_out    the other quarter
python make_pairs.py kto.jsonl --labels      single answers, each with a label, for KTO
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--held_out", action="store_true")
    parser.add_argument("--labels", action="store_true")
    options = parser.parse_args()
    chosen = part(pairs(), options.held_out)
    rows = labelled(chosen) if options.labels else chosen
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text("".join(json.dumps(row) + "\n" for row in rows))
