"""`--profile_steps` writes a trace and a table of the steps that it names, rollouts included."""

import gzip
import json
from types import SimpleNamespace

import pytest
from cli_runs import log_rows
from torch.autograd import DeviceType
from trl_runs import argv_of, sums, trained, written

from swift.arguments import parse
from swift.trainers.profile import gap_lines, gaps_of

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
    assert "gaps, in which no operation runs: between phases " in table
    assert "profile: steps 2 to 3, " in capsys.readouterr().out


def test_rollouts_are_in_the_trace_and_change_nothing(cli):
    plain = cli.finish("plain", max_steps=3)
    profiled = cli.finish("profiled", max_steps=3, profile_steps="1:9")
    assert {"phase: generate", "phase: train", "aten::mm"} <= events(profiled)
    table = (profiled / "profile" / "rank-0.txt").read_text()
    assert table.startswith("steps 1 to 3: "), "the run ends before"
    gaps = table.partition("gaps, in which no operation runs: ")[2].splitlines()
    assert "generate " in gaps[0] and "train " in gaps[0] and len(gaps) == 17
    assert [row["loss"] for row in log_rows(profiled)] == [row["loss"] for row in log_rows(plain)]


def event(name, start, end, device=DeviceType.CPU, *, annotated=False):
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotated)


def test_gaps_are_where_no_operation_of_the_device_runs():
    events = [
        event("phase: train", 0, 900, annotated=True), event("phase: inner", 200, 400, annotated=True),
        event("Optimizer.step", 0, 900, annotated=True),
        event("outer", 0, 100), event("within", 10, 50), event("longer", 60, 120),
        event("second", 320, 330), event("third", 830, 850), event("fourth", 1000, 1010),
        event("kernel", 0, 40, DeviceType.CUDA), event("next", 90, 100, DeviceType.CUDA),
        event("phase: train", 0, 700, DeviceType.CUDA, annotated=True),
    ]  # fmt: skip
    assert list(gaps_of(events, DeviceType.CPU)) == [
        (120, 320, "inner", "longer", "second"),
        (330, 830, "train", "second", "third"),
        (850, 1000, "", "third", "fourth"),
    ]
    assert list(gaps_of(events, DeviceType.CUDA)) == [(40, 90, "train", "kernel", "next")]
    whole, _, longest, *others = gap_lines(events, DeviceType.CPU)
    assert whole.endswith(": train 0.0005 s, inner 0.0002 s, between phases 0.00015 s")
    assert longest.split() == ["0.50", "0.000", "train", "second", "third"] and len(others) == 2
    assert next(gap_lines([], DeviceType.CPU)).endswith(": none")
