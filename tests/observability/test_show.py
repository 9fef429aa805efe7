"""Completions as text: of the step asked for, the best and the worst, nothing of an attempt that was repeated."""

import json

import pytest

from swift.arguments import parse
from swift.errors import ConfigError
from swift.observability.jsonl import JsonlWriter
from swift.observability.show import run


def row(step, reward, text="text", *, attempt=1, split="train", **more):
    return {
        "attempt": attempt, "step": step, "split": split, "prompt": "[user]\nWhat?", "completion": text, "turns": None,
        "rewards": {"accuracy": reward}, "reward": reward, "advantage": 0.0, "completion_tokens": 3,
        "finish_reason": "stop", "excluded": None, "columns": {"solution": "4"}, **more,
    }  # fmt: skip


@pytest.fixture
def show(tmp_path, capsys):
    """Writes rows into a run's folder, and returns what `swift show` prints about it."""

    def shown(rows, *flags):
        folder = tmp_path / "v0-20260101-000000"
        if not folder.exists():
            folder.mkdir()
            JsonlWriter(folder / "completions.jsonl").write(*rows)
        assert run(parse("show", ["--run", str(tmp_path), *flags], {})) == 0
        return capsys.readouterr().out

    return shown


def test_the_best_and_the_worst_of_the_last_step_are_shown(show):
    rows = [row(1, 9.0, "earlier"), *(row(2, reward, f"text {reward}") for reward in (0.5, 0.0, 1.0, 0.25))]
    out = show(rows, "--num_completions", "1").splitlines()
    assert out[1] == "step 2: 4 completions, reward 0.438, from 0.000 to 1.000"
    assert out[3:9] == [
        "=== best: reward 1.000 (accuracy 1.000), advantage 0.000, 3 tokens, stop",
        "[user]",
        "What?",
        "[completion]",
        "text 1.0",
        "solution: 4",
    ]
    assert out[14] == "text 0.0" and len(out) == 16


def test_another_step_and_evaluations_can_be_shown(show):
    rows = [row(1, 0.0, "first"), row(1, 0.0, "evaluated", split="eval"), row(2, 0.0, "second")]
    assert "first" in show(rows, "--step", "1") and "evaluated" in show(rows, "--split", "eval")
    with pytest.raises(ConfigError, match="no completion of step 3 for --split train"):
        show(rows, "--step", "3")


def test_of_a_step_that_was_repeated_the_last_attempt_counts(show):
    rows = [row(5, 1.0, "lost"), row(4, 1.0, "before"), row(5, 0.0, "kept", attempt=2)]
    assert "kept" in show(rows) and "lost" not in show(rows)


def test_completions_without_reward_and_several_turns_are_shown(show):
    turns = [{"role": "assistant", "content": "call\x1b[2J"}, {"role": "tool", "content": "7"}]
    out = show([row(1, None, turns=turns, excluded="timeout: accuracy")])
    assert "best: reward none (accuracy none)" in out and "timeout: accuracy" in out
    assert "[assistant]\ncall\\x1b[2J\n[tool]\n7\n" in out
    assert json.loads(show([], "--json", "true")) == {
        "best": [row(1, None, turns=turns, excluded="timeout: accuracy")],
        "worst": [],
    }


def test_a_file_of_another_program_is_refused(tmp_path):
    (tmp_path / "completions.jsonl").write_text('{"step": 1, "attempt": 1}\n')
    with pytest.raises(ConfigError, match="no line of swift's"):
        run(parse("show", ["--run", str(tmp_path)], {}))
