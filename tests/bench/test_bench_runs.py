"""`swift bench` from end to end on the smallest work, and ms-swift's side against a package that only looks like it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift.bench import run as bench
from swift.bench import swift_side, trl_side
from swift.bench.contest import Contender
from swift.bench.work import Work, prepare

SIDE_FIGURES = {"seconds", "all_seconds", "peak_mib", "workers_mib", "processor_s"}

FAKE_COMMAND = """
import sys
from pathlib import Path
from transformers.trainer_callback import CallbackHandler
from types import SimpleNamespace
assert "--num_generations" in sys.argv
(turns,) = [one for one in CallbackHandler([], *[None] * 4).callbacks if type(one).__name__ == "Turns"]
control = SimpleNamespace(should_training_stop=False)
turns.on_train_begin(None, None, control)
while not control.should_training_stop:
    turns.on_log(None, None, control, logs={"learning_rate": 0.1, "completions/mean_length": 2.0})
"""


def rows_of(results):
    (path,) = results.glob("bench-*.json")
    assert os.uname().nodename not in path.read_text()
    return {row["row"]: row for row in json.loads(path.read_text())["rows"]}


class OneTurn:
    """A gate at which every task takes one turn."""

    def serve(self, work):
        self.report = work()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def work(tmp_path_factory, request):
    """In 16 bits as rows for a GPU are."""
    as_on_gpu = {"dtype": request.param, "recompute": request.param == "bfloat16"}
    folder = str(tmp_path_factory.mktemp("bench"))
    work = Work(folder=folder, size="nano", completion_tokens=8, lengths="tail", **as_on_gpu)
    prepare(work)
    return work


@pytest.mark.slow
@pytest.mark.parametrize("side", [swift_side, trl_side], ids=["swift", "trl"])
def test_isolates_do_the_work_that_is_counted(side, work):
    gate = OneTurn()
    side.train(work, gate)
    assert gate.report["tokens"] == sum(work.limits)
    side.generate(work, gate)
    assert gate.report["completion_tokens"] == sum(work.limits)
    assert gate.report["prefill_s"] > 0 and gate.report["whole_s"] > 0


@pytest.mark.slow
def test_a_row_is_measured_on_equal_gradients_and_recorded(tmp_path):
    words = ["--work", "small-tail", "--size", "nano", "--completion_tokens", "8", "--pairs", "1", "--warmup", "1"]
    command = [sys.executable, "-m", "swift", "bench", *words, "--threads", "1", "--profile_steps", "true"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows_of(tmp_path).values()
    assert row["agreement"]["cosine"] > 0.9999 and not row["void"]
    assert row["agreement"]["norm_ratio"] == pytest.approx(1.0, rel=1e-4)
    assert row["sides"]["swift"].keys() >= SIDE_FIGURES and row["sides"]["trl"].keys() >= SIDE_FIGURES
    assert 0 < row["floor_share"] < 1 and row["flops"] > 0
    ratio = row["ratios"]["trl"]["seconds"]
    assert ratio["low"] <= ratio["value"] <= ratio["high"]
    phases = row["profile"]["phases"]
    assert sum(phase["share"] for phase in phases.values()) == pytest.approx(1.0)
    assert all(phases[name]["seconds"] > 0 for name in ("prefill", "decode", "forward", "backward", "optimizer", "log"))
    assert row["profile"]["operators"]
    (page,) = tmp_path.glob("bench-*.md")
    assert page.read_text().count("\n| ") == 2


def test_a_void_row_a_lost_row_and_a_fallen_ratio_fail_the_command(capsys):
    good = {"row": "tiny", "figure": "seconds", "void": False, "ratios": {"trl": {"seconds": {"value": 2.0}}}}
    args = type("Settings", (), {"record_baseline": False, "baseline": None})
    assert bench.verdict([good], [], None, args) == 0
    assert bench.verdict([good], [], {"tiny": 2.3}, args) == 0
    assert bench.verdict([good], [], {"tiny": 2.4}, args) == 1
    assert bench.verdict([good], ["small: ended"], None, args) == 1
    assert bench.verdict([{**good, "void": True, "agreement": {"cosine": 0.5, "norm_ratio": 1.0}}], [], None, args) == 1
    said = capsys.readouterr().err
    assert "17% below" in said and "small: ended" in said and "the row is void" in said


@pytest.mark.slow
def test_ms_swift_takes_turns_in_its_own_interpreter(tmp_path, monkeypatch):
    package = tmp_path / "swift" / "cli"
    package.mkdir(parents=True)
    (package / "rlhf.py").write_text(FAKE_COMMAND)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))  # where this package is found, and must not be
    side = Contender("ms-swift", "step", Work(folder=str(tmp_path)), str(interpreter))
    try:
        assert side.receive() == {"ready": True}
        for _ in range(2):
            report = side.turn()
            assert report["tokens"] == 128 and report["seconds"] >= 0 and report["peak_mib"] > 0
    finally:
        side.close()
    assert side._process.returncode == 0
