import json
from pathlib import Path

import pytest

from swift.arguments import parse
from swift.trainers.trl.run import run


def strided(argv) -> Path:
    """Runs the mode in this process; the run's folder."""
    resolved = parse("rlhf", argv, {})
    assert resolved.mode == "ebft_strided"
    assert run(resolved) == 0
    return newest_run(resolved.args.output_dir)


def newest_run(output_dir) -> Path:
    return max(Path(output_dir).glob("v*-*"), key=lambda path: int(path.name[1:].split("-")[0]))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_first(strided_argv):
    run_dir = strided(strided_argv())
    for row in rows(run_dir / "logging.jsonl"):
        print(row)
    assert 0
