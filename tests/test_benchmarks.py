"""The benchmark scripts run from end to end on the smallest work, and what they write can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SIDE_FIGURES = {"seconds", "all_seconds", "tokens_per_s", "peak_rss_mib", "workers_mib", "processor_s"}


@pytest.fixture
def harness(monkeypatch):
    """The scripts' own imports, as if one of them were running."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def run_script(name, results, *words):
    """Run a benchmark on the nano model; its one JSON file."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--size", "nano", "--completion_tokens", "8"]
    command += ["--threads", "1", "--results", str(results), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = results.glob(f"{name}-*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def assert_states_the_machine(content):
    assert content["versions"]["trl"] and content["versions"]["torch"] and content["versions"]["transformers"]
    assert content["machine"]["logical_cores"] >= 1 and content["machine"]["torch_threads"] >= 1
    assert os.uname().nodename not in json.dumps(content)


def test_equal_measurements_have_ratio_one_and_a_certain_interval(harness):
    from harness.ratios import ratio_of_medians

    ratio = ratio_of_medians([2.0] * 5, [2.0] * 5)
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_load_that_hits_both_sides_of_a_pair_cancels_in_the_ratio(harness):
    from harness.ratios import ratio_of_medians

    load = [1.0, 9.0, 2.0, 5.0, 3.0]
    ratio = ratio_of_medians([3.0 * x for x in load], load)
    assert ratio.low == pytest.approx(3.0) and ratio.high == pytest.approx(3.0)


def test_unpaired_measurements_are_refused(harness):
    from harness.ratios import ratio_of_medians

    with pytest.raises(ValueError, match="not pairs"):
        ratio_of_medians([1.0, 2.0], [1.0])


def test_spread_is_median_and_extremes(harness):
    from harness.ratios import spread

    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_a_second_record_of_a_day_does_not_overwrite_the_first(harness, tmp_path):
    from harness import record

    first, second = record.write("x", [{"a": 1}], tmp_path), record.write("x", [{"a": 2}], tmp_path)
    assert first != second and json.loads(first.read_text())["rows"] == [{"a": 1}]


def test_frozen_rollouts_come_in_groups_and_are_the_same_every_time(harness):
    from harness.rollouts import frozen
    from harness.work import Work

    work = Work(folder="unused", num_completions=8, num_generations=4, completion_tokens=6)
    first, second = frozen(work, lengths="mixed"), frozen(work, lengths="mixed")
    assert [one.group for one in first] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(first, second, strict=True))
    assert all(1 <= one.token_ids.size <= 6 for one in first)


def test_a_slower_swift_fails_and_so_does_a_void_row(harness, capsys):
    import step_time

    good = {"work": "w", "ratio": 1.2, "void": False}
    assert step_time.verdict([good], enforce=True) == 0
    assert step_time.verdict([good, {**good, "ratio": 0.99}], enforce=True) == 1
    assert step_time.verdict([{**good, "void": True}], enforce=True) == 1
    assert step_time.verdict([{**good, "void": True}], enforce=False) == 0
    assert "gradients differ" in capsys.readouterr().err


def test_the_forced_models_end_token_cannot_be_sampled(harness, tmp_path):
    from harness.work import Work, prepare
    from transformers import AutoConfig, AutoTokenizer

    work = Work(folder=str(tmp_path), size="nano")
    prepare(work)
    end = AutoTokenizer.from_pretrained(work.model).eos_token_id
    assert end >= AutoConfig.from_pretrained(work.model).vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["kl", "natural"])
def test_step_time_compares_both_trainers_on_equal_gradients(tmp_path, variant):
    content = run_script(
        "step_time", tmp_path, "--only", variant, "--pairs", "2", "--warmup", "1", "--no_verdict"
    )  # fmt: skip
    assert_states_the_machine(content)
    (row,) = content["rows"]
    assert row["agreement"]["cosine"] > 0.9999 and not row["void"]
    assert row["agreement"]["norm_ratio"] == pytest.approx(1.0, rel=1e-4)
    assert row["agreement"]["loss_swift"] == pytest.approx(row["agreement"]["loss_trl"], abs=1e-5)
    assert row["ratio_95"][0] <= row["ratio"] <= row["ratio_95"][1]
    for side in ("swift", "trl"):
        assert row[side].keys() >= SIDE_FIGURES
        assert len(row[side]["all_seconds"]) == 2 and row[side]["tokens_per_s"] > 0


@pytest.mark.slow
def test_isolates_measure_every_phase(tmp_path):
    content = run_script("isolates", tmp_path, "--pairs", "2", "--warmup", "1", "--starts", "1")
    assert_states_the_machine(content)
    assert [row["phase"] for row in content["rows"]] == [
        "train", "train", "train, processor", "generate", "prefill", "decode", "start", "start, processor",
    ]  # fmt: skip
    assert all(row[side]["min"] > 0 for row in content["rows"] for side in ("swift", "trl"))
