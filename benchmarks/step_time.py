"""One training step from end to end, swift against TRL's GRPOTrainer: generate, reward, train, optimizer, log.

`python benchmarks/step_time.py` runs the reference work in three variants, prints a table, writes
benchmarks/results/step_time-<date>.json and fails when swift is slower than TRL or a gradient differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import record
from harness.contest import alternate, ask, seconds, set_threads
from harness.ratios import ratio_of_medians, spread
from harness.work import Work, prepare

HEADER = ["work", "swift s", "TRL s", "TRL/swift [95 %]", "processor s", "tok/s", "MiB", "cosine"]


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    set_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(work, pairs=options.pairs, warmup=options.warmup) for work in variants(options, folder)]
    print(record.table(HEADER, [cells(row) for row in rows]))
    for row in rows:
        print(f"{row['work']}: swift {span(row['swift']['seconds'])} s, TRL {span(row['trl']['seconds'])} s")
    print(f"recorded in {record.write('step_time', rows, options.results)}")
    return verdict(rows, enforce=not options.no_verdict)


def parse(words: list[str]) -> argparse.Namespace:
    """The options; without any, the reference work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="measured steps of each side, taken in turns")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side before")
    parser.add_argument("--size", default="tiny", help="model of swift.models.tiny: nano 0.04M, tiny 0.6M, small 24M")
    parser.add_argument("--completion_tokens", type=int, default=64)
    parser.add_argument("--prompt_chars", type=int, default=16, help="prompt length, one token per character")
    parser.add_argument("--threads", type=int, help="threads of either side; by default torch's own choice")
    parser.add_argument("--only", choices=["forced", "kl", "natural"], help="one of the three variants")
    parser.add_argument("--no_verdict", action="store_true", help="exit with 0 even when swift is slower")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    return parser.parse_args(words)


def variants(options: argparse.Namespace, folder: str) -> list[Work]:
    """Equal lengths without and with KL, and lengths as the model ends them."""
    forced = Work(
        folder=folder,
        size=options.size,
        completion_tokens=options.completion_tokens,
        prompt_chars=options.prompt_chars,
    )
    all_of_them = {"forced": forced, "kl": replace(forced, beta=0.04), "natural": replace(forced, forced=False)}
    return [work for name, work in all_of_them.items() if options.only in (None, name)]


def measure(work: Work, *, pairs: int, warmup: int) -> dict[str, Any]:
    """One row: both sides' steps in turns, and whether their gradients agree."""
    prepare(work)
    agreement = ask("both", "agreement", work)
    reports = alternate("step", work, pairs=pairs, warmup=warmup)
    sides = {side: summarise(reports[side]) for side in reports}
    per_token = {side: [r["seconds"] / r["tokens"] for r in reports[side]] for side in reports}
    # the sides sample different lengths unless these are forced: then seconds per token are what compares
    measured = {side: seconds(reports[side]) for side in reports} if work.forced else per_token
    ratio = ratio_of_medians(measured["trl"], measured["swift"])
    return {
        "work": work.name,
        "compared": "seconds per step" if work.forced else "seconds per completion token",
        "ratio": ratio.value,
        "ratio_95": [ratio.low, ratio.high],
        "agreement": {name: agreement[name] for name in ("cosine", "norm_ratio", "loss_swift", "loss_trl")},
        "void": agreement["cosine"] < agreement["required"],
        **sides,
    }


def summarise(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one side."""
    took, tokens = seconds(reports), seconds(reports, "tokens")
    return {
        "seconds": spread(took),
        "processor_s": spread(seconds(reports, "processor_s")),
        "all_seconds": [round(value, 4) for value in took],
        "tokens_per_s": sum(tokens) / sum(took),
        "peak_rss_mib": max(seconds(reports, "peak_rss_mib")),
        "workers_mib": max(seconds(reports, "workers_mib")),
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    swift, trl = row["swift"], row["trl"]
    low, high = row["ratio_95"]
    cosine = f"{row['agreement']['cosine']:.7f}" + (" VOID" if row["void"] else "")
    return [
        row["work"],
        f"{swift['seconds']['median']:.3f}",
        f"{trl['seconds']['median']:.3f}",
        f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]",
        f"{swift['processor_s']['median']:.2f} : {trl['processor_s']['median']:.2f}",
        f"{swift['tokens_per_s']:.0f} : {trl['tokens_per_s']:.0f}",
        f"{swift['peak_rss_mib']:.0f}+{swift['workers_mib']:.0f} : {trl['peak_rss_mib']:.0f}",
        cosine,
    ]


def span(values: dict[str, float]) -> str:
    """`median (min to max)`."""
    return f"{values['median']:.3f} ({values['min']:.3f} to {values['max']:.3f})"


def verdict(rows: list[dict[str, Any]], *, enforce: bool) -> int:
    """0 when every row counts and none shows swift slower."""
    failures = [f"{row['work']}: the gradients differ, the row is void" for row in rows if row["void"]]
    failures += [f"{row['work']}: swift is slower, TRL/swift {row['ratio']:.2f}" for row in rows if row["ratio"] < 1]
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures and enforce else 0


if __name__ == "__main__":
    sys.exit(main())
