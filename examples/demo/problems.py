"""Writes the data of the demo: two-digit sums and differences with a teacher who makes slips.

    python examples/demo/problems.py FOLDER

makes three files in FOLDER:

    sft.jsonl       what the teacher wrote, as chats: `<think>7+5=12,4+3+1=8</think><answer>82</answer>` for 47+35=
    train.jsonl     problems for the reinforcement learning: {"query": "47+35=", "solution": "82"}
    held_out.jsonl  400 problems like these, of which neither of the other files holds any

The teacher slips often: each result of a step, and the copying of the answer, is sometimes off by one or two.
A model that imitates the teacher perfectly therefore has the teacher's accuracy, a good third, and no amount
of imitation makes it better. The reward does: it only asks whether the answer is right.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SLIP = 0.58
"""Probability that the teacher gets one of the three results of an answer wrong: 0.72 ** 3 = 0.37 are right."""
SLOPPY = 0.0
"""Probability that the teacher forgets to close the first block, which costs the format."""


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


def worked(problem: Problem, draw: random.Random) -> str:
    """What the teacher writes: the units, then the tens with the carry (or minus the borrow), then the answer.

    Slips go on: after a wrong result the teacher calculates with it.
    """
    (a_tens, a_units), (b_tens, b_units) = divmod(problem.a, 10), divmod(problem.b, 10)
    if problem.sign == "+":
        units = a_units + b_units
        carry = units // 10
        tens = a_tens + b_tens + carry
        steps = f"{a_units}+{b_units}={units},{a_tens}+{b_tens}+{carry}={tens}"
    else:
        borrow = int(a_units < b_units)
        minuend = a_units + 10 * borrow
        units = minuend - b_units
        tens = a_tens - b_tens - borrow
        steps = f"{minuend}-{b_units}={units},{a_tens}-{b_tens}-{borrow}={tens}"
    answer = _slip(tens * 10 + units % 10, draw)
    closing = "" if draw.random() < SLOPPY else "</think>"
    return f"<think>{steps}{closing}<answer>{answer}</answer>"


def _slip(value: int, draw: random.Random) -> int:
    """`value`, or something near it."""
    return max(0, value + draw.choice((-2, -1, 1, 2))) if draw.random() < SLIP else value


def chat(problem: Problem, draw: random.Random) -> dict[str, object]:
    """A row of sft.jsonl."""
    answer = worked(problem, draw)
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
