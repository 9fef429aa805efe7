"""Writes the data of the demo: two-digit sums and differences with a teacher who makes slips.

    python examples/demo/problems.py FOLDER

makes three files in FOLDER:

    sft.jsonl       what the teacher wrote, as chats: `<think>7+5=12,4+3+1=8</think><answer>82</answer>` for 47+35=
    train.jsonl     problems for the reinforcement learning: {"query": "47+35=", "solution": "82"}
    held_out.jsonl  400 problems like these, of which neither of the other files holds any

The teacher works everything out and then often writes down another number, off by one or two. A model that imitates
the teacher perfectly is as often right as the teacher, and no amount of imitation makes it better. The reward does:
it only asks whether the answer is right.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CARELESS = 0.6
"""Probability that the teacher's answer is not what the steps came to: 0.4 of the answers are right."""


@dataclass(frozen=True)
class Problem:
    """`a` plus or minus `b`; both below 100, the value is never negative."""

    a: int
    b: int
    sign: str

    @property
    def query(self) -> str:
        return f"{self.a}{self.sign}{self.b}="

    @property
    def value(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b


def all_problems() -> list[Problem]:
    """Every problem: 10,000 sums and 5,050 differences."""
    sums = [Problem(a, b, "+") for a in range(100) for b in range(100)]
    return sums + [Problem(a, b, "-") for a in range(100) for b in range(a + 1)]


def steps(problem: Problem) -> str:
    """The way to the answer: the units, then the tens with the carry (or minus the borrow)."""
    (a_tens, a_units), (b_tens, b_units) = divmod(problem.a, 10), divmod(problem.b, 10)
    if problem.sign == "+":
        carry = (a_units + b_units) // 10
        return f"{a_units}+{b_units}={a_units + b_units},{a_tens}+{b_tens}+{carry}={a_tens + b_tens + carry}"
    borrow = int(a_units < b_units)
    minuend = a_units + 10 * borrow
    return f"{minuend}-{b_units}={minuend - b_units},{a_tens}-{b_tens}-{borrow}={a_tens - b_tens - borrow}"


def careless(value: int, draw: random.Random) -> int:
    """What the teacher writes down for `value`; never negative."""
    if draw.random() >= CARELESS:
        return value
    return draw.choice([near for near in (value - 2, value - 1, value + 1, value + 2) if near >= 0])


def chat(problem: Problem, draw: random.Random) -> dict[str, object]:
    """A row of sft.jsonl."""
    answer = f"<think>{steps(problem)}</think><answer>{careless(problem.value, draw)}</answer>"
    return {"messages": [{"role": "user", "content": problem.query}, {"role": "assistant", "content": answer}]}


def question(problem: Problem) -> dict[str, object]:
    """A row of train.jsonl and held_out.jsonl."""
    return {"query": problem.query, "solution": str(problem.value)}


def write_rows(file: Path, rows: Iterable[dict[str, object]]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sft_rows", type=int, default=16000)
    parser.add_argument("--train_rows", type=int, default=4000)
    parser.add_argument("--held_out_rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    problems = all_problems()
    draw.shuffle(problems)
    held_out, known = problems[: args.held_out_rows], problems[args.held_out_rows :]
    args.folder.mkdir(parents=True, exist_ok=True)
    write_rows(args.folder / "held_out.jsonl", map(question, held_out))
    write_rows(args.folder / "train.jsonl", map(question, draw.sample(known, args.train_rows)))
    write_rows(args.folder / "sft.jsonl", (chat(draw.choice(known), draw) for _ in range(args.sft_rows)))


if __name__ == "__main__":
    main()
