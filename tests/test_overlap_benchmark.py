"""The overlap benchmark: its arithmetic by hand, and one small run of it from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def overlap(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import overlap

    return overlap


def steps(overlap, step_s, *, train_s=3.0, sampled=()):
    return overlap.Steps(step_s, generate_s=4.0, reward_s=1.0, sync_s=0.5, train_s=train_s, sampled=list(sampled))


def test_efficiency_is_the_hidden_share_of_what_can_be_hidden(overlap):
    sync = steps(overlap, 8.5)  # 4 + 1 + 3 + 0.5
    for async_s, efficiency in [(8.5, 0.0), (5.0, 1.0), (6.75, 0.5)]:
        pair = overlap.Pair(sync, steps(overlap, async_s))
        assert pair.bound_s == 5.0
        assert pair.efficiency == pytest.approx(efficiency)


def test_where_training_takes_longer_it_is_the_bound(overlap):
    assert overlap.Pair(steps(overlap, 12.5, train_s=7.0), steps(overlap, 8.0)).bound_s == 7.0


def test_the_first_steps_and_the_last_do_not_count_and_a_disturbed_one_hardly(overlap, tmp_path):
    rows = [
        {"step": step, "step_time": 3.0, "time/generate": 1.0, "time/reward": 0.5, "time/sync": 0.25, "time/train": 1.0}
        for step in range(1, 9)
    ]
    for row in (*rows[:2], rows[4], rows[-1]):
        row["step_time"] = 99.0
    completion = {"group_id": "p-0", "index": 1, "completion": "one\u2028line"}
    for name, content in (("logging", rows), ("completions", [completion])):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    read = overlap.read(tmp_path, last_step=8)
    assert (read.step_s, read.generate_s, read.reward_s, read.sync_s, read.train_s) == (3.0, 1.0, 0.5, 0.25, 1.25)
    assert read.sampled == [("p-0", 1, "one\u2028line")]


def test_too_little_overlap_fails_and_so_do_runs_that_did_different_work(overlap, capsys):
    options = SimpleNamespace(backend="b", size="tiny", groups=2, completion_tokens=8, reward_ms=[0, 1], steps=4)
    good = overlap.Pair(steps(overlap, 8.5), steps(overlap, 5.4))
    assert overlap.verdict(overlap.summarise([good], options), enforce=True) == 0
    slow = overlap.Pair(steps(overlap, 8.5), steps(overlap, 5.6))
    assert overlap.verdict(overlap.summarise([good, slow, slow], options), enforce=True) == 1
    other = overlap.Pair(steps(overlap, 8.5), steps(overlap, 5.0, sampled=[("p-0", 0, "x")]))
    assert overlap.verdict(overlap.summarise([other], options), enforce=True) == 1
    assert overlap.verdict(overlap.summarise([other], options), enforce=False) == 0
    assert "did not sample the same" in capsys.readouterr().err


@pytest.mark.slow
def test_both_kinds_of_run_sample_the_same_and_every_figure_is_there(tmp_path):
    words = ["--pairs", "1", "--steps", "5", "--size", "nano", "--groups", "2", "--completion_tokens", "12"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "overlap.py"), *words, "--no_verdict", "--results", str(tmp_path)],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("overlap-*.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    (row,) = content["rows"]
    assert row["same_samples"]
    assert all(
        row[name]["median"] > 0 for name in ("t_sync", "t_async", "t_generate", "t_reward", "t_train", "t_weights")
    )
    assert content["machine"]["logical_cores"] >= 1
