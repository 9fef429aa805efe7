"""swift against TRL, and ms-swift, through the commands that their users run.

    python benchmarks/run.py                                        # the rows that a CPU can do, five turns each
    python benchmarks/run.py --rows small small-prompt --turns 5 --out FILE
    python benchmarks/run.py --ms_swift_python /opt/ms-swift/bin/python --rows tiny small start
    python benchmarks/run.py --compare                              # exit code 1 below 85 % of the recorded ratios
    python benchmarks/run.py --record                               # into benchmarks/results, and benchmarks/README.md

Each turn of a side is a run of its command; sides alternate. A row is void, and the command fails, when the gradients
of swift and TRL differ on the same completions.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import record, tables
from harness.agreement import agreement
from harness.sides import ms_swift_version
from harness.turns import alternate, figures
from harness.works import ROWS, Row, Work, prepare

COMPARED = {"step": "seconds", "start": "start_s", "peak": "peak_mib"}


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    more = {"ms_swift": ms_swift_version(options.ms_swift_python)} if options.ms_swift_python else {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary).resolve()
        for name in options.rows:
            row = replace(ROWS[name], size=options.size) if options.size else ROWS[name]
            if reason := obstacle(row):
                print(f"{name}: left out: {reason}", flush=True)
                continue
            rows.append(one_row(name, prepare(row, folder), options))
            print(tables.aligned(tables.HEADER, [tables.cells(rows[-1])]), flush=True)
            record.write(options.out, rows, **more)  # a run that is cut short leaves what it measured
    return verdict(rows, options, more)


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cpu = [name for name, row in ROWS.items() if row.device == "cpu"]
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=on_cpu, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--turns", type=int, default=5, help="runs of each side")
    parser.add_argument("--peers", nargs="*", default=["trl", "ms-swift"], choices=["trl", "ms-swift"])
    parser.add_argument("--ms_swift_python", help="interpreter of an environment that has ms-swift")
    parser.add_argument("--threads", type=int, help="of each side; torch's own choice otherwise")
    parser.add_argument("--folder", type=Path, help="keeps models and data for the next time")
    parser.add_argument("--out", type=Path, default=Path("output/bench/run.json"), help="file of the results")
    parser.add_argument("--compare", action="store_true", help="fail below 85 %% of the recorded ratios")
    parser.add_argument("--record", action="store_true", help="put the rows into benchmarks/results and the docs")
    parser.add_argument("--no_agreement", action="store_true", help="do not compare gradients")
    parser.add_argument("--size", choices=["nano", "tiny", "small"], help="of every row's model, to try the rows out")
    return parser.parse_args(words)


def obstacle(row: Row) -> str | None:
    """Why a row cannot be measured here."""
    if "--use_vllm" in row.flags and find_spec("vllm") is None:
        return "vLLM is not installed"
    if row.device == "cuda":
        import torch

        return None if torch.cuda.is_available() else "there is no CUDA device"
    return None


def sides_of(row: Row, options: argparse.Namespace) -> list[str]:
    """Who takes part."""
    able = {"trl": find_spec("trl") is not None, "ms-swift": options.ms_swift_python is not None}
    return ["swift", *(peer for peer in row.peers if able[peer] and peer in options.peers), *row.variants]


def one_row(name: str, work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row; all that its line and its JSON say."""
    row, sides = work.row, sides_of(work.row, options)
    result: dict[str, Any] = {"row": name, "title": row.title, "compared": row.compared, "per_token": row.per_token}
    result["void"] = False
    if row.checks_gradients and "trl" in sides and not options.no_agreement:
        result["agreement"] = agreement(work)
        result["void"] = not result["agreement"]["agrees"]
    found = alternate(work, sides, options.turns, options.ms_swift_python)
    result["sides"] = {side: figures(runs, per_token=row.per_token) for side, runs in found.items()}
    result["ratios"] = {side: ratios(result["sides"]["swift"], result["sides"][side]) for side in sides[1:]}
    return result


def ratios(swift: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The other side over swift: above 1 where swift is better."""
    names = {**COMPARED, "processor": "processor_s"}
    return {name: record.ratio(other[key], swift[key]) for name, key in names.items() if key in swift and key in other}


def verdict(rows: Sequence[dict[str, Any]], options: argparse.Namespace, more: dict[str, Any]) -> int:
    """Print the table, record, compare; the exit code."""
    if not rows:
        print("no row was measured", file=sys.stderr)
        return 1
    print(tables.aligned(tables.HEADER, [tables.cells(row) for row in rows]))
    print(f"written to {options.out}")
    failures = [f"{row['row']}: the gradients of swift and TRL differ" for row in rows if row["void"]]
    if options.compare:
        recorded, measured = record.recorded_ratios(), record.ratios_of(rows)
        failures += record.regressions(recorded, measured)
        for name in measured.keys() - recorded.keys():
            print(f"{name}: no ratio is recorded, so it was not compared")
    if options.record and not failures:
        import page

        print(f"recorded in {record.merge(record.results_file('run'), rows, **more)}")
        page.main()
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
