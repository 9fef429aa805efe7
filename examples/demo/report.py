"""Before and after: the answers to the held-out problems, scored with the reward functions of the run.

    python examples/demo/report.py BEFORE.jsonl AFTER.jsonl [--curve FILE] [--at_most 0.45 --at_least 0.75]

BEFORE and AFTER are result files of `swift infer` over the same rows. With the two bounds the program ends with
exit code 1 when the accuracy before is above the first or the accuracy after is below the second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.rewards.orm import Format, MathAccuracy

NUM_SAMPLES = 3


@dataclass(frozen=True)
class Scored:
    """Answers and what they are worth; lengths in tokens."""

    answers: list[dict[str, Any]]
    right: list[float]
    formed: list[float]

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.right)

    @property
    def format(self) -> float:
        return statistics.fmean(self.formed)

    @property
    def mean_length(self) -> float:
        return statistics.fmean(answer["completion_tokens"] for answer in self.answers)


def score(file: Path) -> Scored:
    """The answers of one file; every row needs the column `solution`."""
    answers = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [answer["response"] for answer in answers]
    right = MathAccuracy()(texts, [answer["columns"]["solution"] for answer in answers])
    return Scored(answers, right, Format()(texts))


def table(before: Scored, after: Scored) -> list[str]:
    """The lines of the comparison."""
    lines = [f"{len(before.answers)} held-out problems, one sample each   before    after"]
    for name, values in (
        ("accuracy", (f"{before.accuracy:.3f}", f"{after.accuracy:.3f}")),
        ("format", (f"{before.format:.3f}", f"{after.format:.3f}")),
        ("mean length in tokens", (f"{before.mean_length:.1f}", f"{after.mean_length:.1f}")),
    ):
        lines.append(f"  {name:<38}" + "".join(f"{value:>9}" for value in values))
    return lines


def samples(title: str, scored: Scored) -> list[str]:
    """What the model wrote for the first rows, whatever came of it."""
    lines = [title]
    for answer, right in list(zip(scored.answers, scored.right, strict=True))[:NUM_SAMPLES]:
        mark = "right" if right else "wrong"
        lines.append(f"  {answer['messages'][-1]['content'].strip()} {answer['response'].strip()}  ({mark})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--curve", type=Path, help="the plot to point to")
    parser.add_argument("--at_most", type=float, help="fail if the accuracy before is above")
    parser.add_argument("--at_least", type=float, help="fail if the accuracy after is below")
    args = parser.parse_args()
    before, after = score(args.before), score(args.after)
    for line in [*table(before, after), *samples("before", before), *samples("after", after)]:
        print(line)
    if args.curve is not None:
        print(f"reward curve: {args.curve.resolve(strict=True)}")
    sys.stdout.flush()
    if args.at_most is not None and before.accuracy > args.at_most:
        print(f"demo: FAILED: accuracy before is {before.accuracy:.3f}, above {args.at_most}", file=sys.stderr)
        return 1
    if args.at_least is not None and after.accuracy < args.at_least:
        print(f"demo: FAILED: accuracy after is {after.accuracy:.3f}, below {args.at_least}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
