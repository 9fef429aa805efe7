"""Writes two-digit sums and differences, worked digit by digit, as chats with a `solution` column.

A row's answer is `<think>7+5=12,4+3+1=8</think><answer>82</answer>` for 47+35=: units first, then tens with the
carry (or minus the borrow), so each written number depends on few others. That is what a tiny model learns in a
minute; without the steps it needs far longer.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any


def worked_sum(a: int, b: int) -> tuple[str, int]:
    """The steps and the value of a + b, for numbers below 100."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    return f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}+{units // 10}={tens}", a + b


def worked_difference(a: int, b: int) -> tuple[str, int]:
    """The steps and the value of a - b, for b <= a < 100."""
    borrow = int(a % 10 < b % 10)
    minuend = a % 10 + 10 * borrow
    tens = a // 10 - b // 10 - borrow
    return f"{minuend}-{b % 10}={minuend - b % 10},{a // 10}-{b // 10}-{borrow}={tens}", a - b


def row(draw: random.Random) -> dict[str, Any]:
    """One random problem as a chat."""
    a, b = draw.randint(0, 99), draw.randint(0, 99)
    if draw.random() < 0.5:
        question, (steps, value) = f"{a}+{b}=", worked_sum(a, b)
    else:
        a, b = max(a, b), min(a, b)
        question, (steps, value) = f"{a}-{b}=", worked_difference(a, b)
    answer = f"<think>{steps}</think><answer>{value}</answer>"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "solution": str(value)}


def prompt_and_reference(chat: dict[str, Any]) -> dict[str, Any]:
    """The same row with its answer in the column `ground_truth`, as EBFT reads it."""
    question, answer = chat["messages"]
    return {"prompt": question["content"], "ground_truth": answer["content"], "solution": chat["solution"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=13440)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--references", action="store_true", help="write prompt and ground_truth instead of chats")
    parser.add_argument("--direct", action="store_true", help="answer without steps")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with args.file.open("w", encoding="utf-8") as lines:
        for _ in range(args.rows):
            one = row(draw)
            if args.direct:
                one["messages"][1]["content"] = f"<answer>{one['solution']}</answer>"
            lines.write(json.dumps(prompt_and_reference(one) if args.references else one) + "\n")


if __name__ == "__main__":
    main()
