"""What the comparison of modes calls a failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def modes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "modes", raising=False)
    import modes

    return modes


def row(mode, after=None, gap=1e-6, run="demo"):
    made = {"mode": mode, "run": run, "logp_abs_diff_max": gap}
    return made if after is None else made | {"accuracy_after": after}


def test_a_mode_must_come_within_three_points_of_the_transformers_engine(modes):
    assert modes.verdict([row("transformers", 0.89), row("colocate", 0.865), row("server", 0.915)]) == []
    said = modes.verdict([row("transformers", 0.89), row("dedicated", 0.855), row("server", 0.93)])
    assert [text.split(":")[0] for text in said] == ["dedicated", "server"]
    assert "0.855" in said[0] and "0.890" in said[0]


def test_only_the_run_from_random_weights_bounds_the_difference_of_log_probs(modes):
    assert modes.verdict([row("colocate", 0.9, gap=4e-5)]) == []
    assert modes.verdict([row("colocate", gap=1e-5, run="random weights")]) == []
    (said,) = modes.verdict([row("colocate", gap=1.1e-5, run="random weights")])
    assert "1.1e-05" in said


def test_the_figures_are_the_extremes_and_means_of_the_log(modes, tmp_path):
    key = "mismatch/logp_abs_diff"
    rows = [{"step": 1, "reward": 0.5, f"{key}_max": 3e-6, key: 1e-7, "off_policy/max": 0.0}, {"eval_reward": 1.0}]
    rows.append({"step": 2, "reward": 0.75, f"{key}_max": 2e-6, key: 3e-7, "off_policy/max": 1.0})
    import json

    (tmp_path / "logging.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert modes.figures(tmp_path) == {
        "steps": 2, "reward_first": 0.5, "reward_last": 0.75, "logp_abs_diff_max": 3e-6,
        "logp_abs_diff_mean": pytest.approx(2e-7), "off_policy_max": 1.0,
    }  # fmt: skip
