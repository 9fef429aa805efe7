"""The task of examples/train/chain.sh: of three letters, answer with the last. The rows, and the score of answers.

    python examples/train/chain/letters.py write FOLDER
    python examples/train/chain/letters.py compare BEFORE.jsonl AFTER.jsonl

The rows of sft.jsonl answer with any of the three letters; only the pairs of rm.jsonl tell which is right. Problems of
held_out.jsonl are in no other file. `compare` ends with exit code 1 unless the answers after are right more often.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from itertools import permutations
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijkl"


def write(folder: Path) -> None:
    """sft.jsonl, rm.jsonl, grpo.jsonl and held_out.jsonl."""
    draw = random.Random(0)
    problems = list(permutations(LETTERS, 3))
    draw.shuffle(problems)
    held_out, train = problems[:200], problems[200:]
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "held_out.jsonl", ({"query": " ".join(one), "solution": one[2]} for one in held_out))
    save(folder / "grpo.jsonl", ({"query": " ".join(one)} for one in train))
    save(folder / "sft.jsonl", ({"query": " ".join(one), "response": letter} for one in train for letter in one))
    save(
        folder / "rm.jsonl",
        ({"prompt": " ".join(one), "chosen": one[2], "rejected": other} for one in train for other in one[:2]),
    )


def save(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def share_right(path: Path) -> float:
    """Of the answers in a result file of `swift infer`, how many are the solution."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sum(row["response"].strip() == row["columns"]["solution"] for row in rows) / len(rows)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        before, after = share_right(Path(sys.argv[2])), share_right(Path(sys.argv[3]))
        print(f"right on held-out rows: {before:.2f} before, {after:.2f} after")
        sys.exit(after <= before)
