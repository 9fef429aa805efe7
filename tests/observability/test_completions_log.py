"""Every completion becomes a row; writing happens in the background and its failures surface."""

import os

import pytest

from swift.errors import ResourceError
from swift.observability import jsonl
from swift.observability.completions_log import CompletionsLog, completion_rows, sample_line
from swift.observability.jsonl import read_jsonl
from swift.rollout.round_result import ScoredRound
from swift.types import Completion, GroupScores, Prompt, RolloutGroup


def group():
    prompt = Prompt("p1", [{"role": "user", "content": "2 + 2?"}], [1, 2, 3], {"solution": "4"})
    completions = [
        Completion("g/0", [5, 6], [-0.1, -0.2], "stop", "4", [(3, 0, 2)]),
        Completion("g/1", [7], [-0.3], "length", "5"),
    ]
    scores = GroupScores([[1.0, 0.5], [None, None]], [None, "timeout: slow"])
    return RolloutGroup("g", 0, 0, prompt, completions, scores)


def rows(*, rewards=(1.5, None), excluded=(None, None), used=(True, True)):
    scored = ScoredRound("train", 9, [group()], rewards, [0.7, None], excluded, 4, {}, used)
    return completion_rows(scored, attempt=2, reward_names=["accuracy", "format"])


def test_a_sample_is_one_line_without_control_characters():
    row = {"step": 3, "prompt": "[user]\nWhat?", "completion": "\x1b[2J\x9b" + "é" * 500, "reward": 0.5}
    row["rewards"] = {"accuracy": 0.5}
    line = sample_line(row)
    assert line.isprintable()
    assert len(line) < 300
    assert line.endswith("reward 0.500")
    assert sample_line(row | {"reward": None}).endswith("reward none")
    two = sample_line(row | {"rewards": {"accuracy": 1.0, "format": None}})
    assert two.endswith("reward 0.500 (accuracy 1.000, format none)")


def test_a_row_holds_the_documented_fields():
    first, second = rows()
    assert first == {
        "attempt": 2,
        "step": 9,
        "split": "train",
        "weight_version": 3,
        "prompt_id": "p1",
        "group_id": "g",
        "index": 0,
        "prompt": "[user]\n2 + 2?",
        "completion": "4",
        "turns": None,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "finish_reason": "stop",
        "rewards": {"accuracy": 1.0, "format": 0.5},
        "reward": 1.5,
        "advantage": 0.7,
        "used": True,
        "excluded": None,
        "columns": {"solution": "4"},
    }
    assert (second["weight_version"], second["used"], second["excluded"]) == (4, False, "timeout: slow")


def test_redrawn_and_filtered_completions_are_not_used():
    assert [row["used"] for row in rows(used=[False, True])] == [False, False]
    assert [row["excluded"] for row in rows(excluded=["overlong", "overlong"])] == ["overlong", "timeout: slow"]


def test_a_wrong_number_of_rewards_is_a_defect():
    with pytest.raises(ValueError, match=r"longer|shorter"):
        rows(rewards=[1.0])


def test_flush_means_the_rows_are_in_the_file(tmp_path):
    log = CompletionsLog(tmp_path / "c.jsonl")
    log.write([])
    log.flush()
    assert list(tmp_path.iterdir()) == [], "no rows, no file"
    for number in range(200):
        log.write([{"n": number}])
    log.flush()
    assert [row["n"] for row in read_jsonl(tmp_path / "c.jsonl")] == list(range(200))
    log.write([{"n": 200}])
    log.close()
    log.close()
    assert len(list(read_jsonl(tmp_path / "c.jsonl"))) == 201


@pytest.mark.parametrize("finish", ["flush", "close"])
def test_a_full_disk_surfaces_and_nobody_waits_for_ever(tmp_path, monkeypatch, finish):
    def full(descriptor, data):
        raise OSError(28, os.strerror(28))

    log = CompletionsLog(tmp_path / "c.jsonl", queue_batches=2)
    monkeypatch.setattr(jsonl.os, "write", full)
    with pytest.raises(ResourceError, match="no space left"):
        for number in range(50):
            log.write([{"n": number}])
        getattr(log, finish)()
