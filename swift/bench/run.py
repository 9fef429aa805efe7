"""`swift bench`: the rows that are asked for, one after the other; a table, a JSON file, and whether anything failed.

A row that cannot be measured (an engine that is not installed, a side that ends) is named with its reason, and the
others go on. The exit code is 1 when a row failed or is void, or when a ratio fell below the recorded one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.bench import record, regression, table
from swift.bench.contest import set_threads
from swift.bench.measure import Bench, ratios_of
from swift.bench.ms_swift import version_in
from swift.bench.works import ROWS
from swift.errors import ConfigError, join_problems

if TYPE_CHECKING:
    from swift.arguments.bench import BenchSettings


def run(resolved: Any) -> int:
    """Measure, print, record, compare; the exit code.

    Args:
        resolved: the settings of the mode, checked.

    Raises:
        ConfigError: a baseline or an interpreter that cannot be used.
    """
    args: BenchSettings = resolved.args
    recorded = _recorded(args)
    versions = _check_interpreters(args)
    set_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as folder:
        if args.scaling:
            from swift.bench.scaling import run as scale

            return scale(args, folder)
        rows, failed = measure_rows(args, folder)
    print(table.plain(rows, args.rivals))
    path = record.write("bench", rows, Path(args.results), peers=versions)
    path.with_suffix(".md").write_text(table.markdown(rows, args.rivals), encoding="utf-8")
    print(f"recorded in {path} and {path.with_suffix('.md').name}")
    if resolved.args.json:
        print(json.dumps(rows))
    return verdict(rows, failed, recorded, args)


def measure_rows(args: BenchSettings, folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows that could be measured, and a line for each that could not."""
    changes = {name: getattr(args, name) for name in ("size", "completion_tokens", "vocab_size")}
    bench = Bench(
        folder=folder,
        peers=args.rivals,
        ms_swift_python=args.ms_swift_python,
        pairs=args.pairs,
        warmup=args.warmup,
        profile=args.profile_steps,
        changes={name: value for name, value in changes.items() if value is not None},
    )
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in args.work or ROWS:
        if (obstacle := ROWS[name].obstacle) is not None:
            print(f"{name}: not measured: {obstacle}", file=sys.stderr)
            if args.work:  # it was asked for by name
                failed.append(f"{name}: {obstacle}")
            continue
        print(f"{name}: {ROWS[name].title} ...", file=sys.stderr)
        try:
            rows.append(bench.row(name, ROWS[name]))
        except RuntimeError as error:  # a side ended: the row is lost, the others need not be
            failed.append(f"{name}: {error}")
            print(failed[-1], file=sys.stderr)
        else:
            print(table.line(rows[-1], args.rivals), file=sys.stderr)
    return rows, failed


def verdict(
    rows: list[dict[str, Any]], failed: list[str], recorded: dict[str, float] | None, args: BenchSettings
) -> int:
    """Say what failed, write or compare the baseline; 0 when everything holds."""
    problems = [f"{line.splitlines()[0]}" for line in failed]
    problems += [
        f"{row['row']}: gradients differ (cosine {row['agreement']['cosine']:.6f}, ratio of norms "
        f"{row['agreement']['norm_ratio']:.4f}): the row is void"
        for row in rows
        if row["void"]
    ]
    ratios = ratios_of(rows)
    if args.record_baseline:
        family = regression.processor_family()
        regression.record(Path(str(args.baseline)), ratios, family)
        print(f"{len(ratios)} ratios of {family} written to {args.baseline}")
    elif recorded is not None:
        problems += regression.regressions(recorded, ratios)
        for name in regression.unrecorded(recorded, ratios):
            print(f"{name}: {ratios[name]:.2f}: no ratio is recorded; --record_baseline true writes it")
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    return 1 if problems else 0


def _recorded(args: BenchSettings) -> dict[str, float] | None:
    if args.baseline is None or args.record_baseline:
        return None
    try:
        return regression.expected(regression.read(Path(args.baseline)), regression.processor_family())
    except ValueError as error:
        raise ConfigError(f"--baseline: {args.baseline}: {error}; write it with --record_baseline true") from error


def _check_interpreters(args: BenchSettings) -> dict[str, str]:
    """Versions of the peers that are not in this environment."""
    problems: list[str] = []
    versions: dict[str, str] = {}
    if "trl" in args.rivals and find_spec("trl") is None:
        problems.append("--peers: trl: not installed here; pip install trl, or --peers without it")
    if args.ms_swift_python is not None:
        try:
            versions["ms-swift"] = version_in(args.ms_swift_python)
        except ValueError as error:
            problems.append(f"--ms_swift_python: {args.ms_swift_python}: {error}; name one that has ms-swift")
    join_problems(problems)
    return versions
