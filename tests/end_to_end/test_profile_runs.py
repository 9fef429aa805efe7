"""`--profile_steps` writes a trace and a table of the steps that it names, rollouts included."""

import gzip
import json

import pytest
from cli_runs import log_rows
from trl_runs import argv_of, sums, trained, written

from swift.arguments import parse

pytestmark = pytest.mark.slow


def events(run_dir):
    with gzip.open(run_dir / "profile" / "rank-0.json.gz") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_a_trainer_of_trl_is_profiled(nano_folders, tmp_path, capsys):
    own = {
        "--rlhf_type": "dpo", "--model": nano_folders["qwen2"], "--dataset": written(tmp_path / "rows.jsonl", sums(32)),
        "--output_dir": tmp_path / "out", "--max_steps": 4,
    }  # fmt: skip
    run_dir = trained(parse("rlhf", argv_of(own, "--profile_steps 2:3"), {}))
    assert "aten::mm" in events(run_dir)
    table = (run_dir / "profile" / "rank-0.txt").read_text()
    assert table.startswith("steps 2 to 3: ") and "Self CPU" in table
    assert "profile: steps 2 to 3, " in capsys.readouterr().out


def test_rollouts_are_in_the_trace_and_change_nothing(cli):
    plain = cli.finish("plain", max_steps=3)
    profiled = cli.finish("profiled", max_steps=3, profile_steps="1:9")
    assert {"phase: generate", "phase: train", "aten::mm"} <= events(profiled)
    assert (profiled / "profile" / "rank-0.txt").read_text().startswith("steps 1 to 3: "), "the run ends before"
    assert [row["loss"] for row in log_rows(profiled)] == [row["loss"] for row in log_rows(plain)]
