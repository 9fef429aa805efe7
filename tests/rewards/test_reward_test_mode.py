"""`swift reward-test`: what it measures, prints and returns."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from swift.arguments.modes import RewardTestArguments
from swift.cli.main import main
from swift.errors import ConfigError
from swift.rewards import reward_test
from swift.rewards.selfcheck import adversarial_texts, truth_of
from swift.types import Prompt


def prompts(*golds, column="solution"):
    return [
        Prompt(f"p{index}", [{"role": "user", "content": f"question {index}"}], [], {column: gold})
        for index, gold in enumerate(golds)
    ]


def test_every_adversarial_kind_has_its_text():
    texts = adversarial_texts("what?", "4", "5")
    assert len(texts) == 13
    assert texts["echoed question"] == "what?"
    assert len(texts["100,000 characters"]) >= 99_990
    assert "another row's truth" not in adversarial_texts("what?", "4", None)


def test_accuracy_pays_for_gold_and_not_for_tricks(arguments):
    report = reward_test.examine(arguments(reward_funcs=["accuracy"], min_gold=1.0), prompts("4", "Paris"))
    (accuracy,) = report.functions
    assert (accuracy.rows, accuracy.gold_mean, accuracy.gold_max, accuracy.gold_share) == (2, 1.0, 1.0, 1.0)
    assert accuracy.adversarial_max == 0.0
    assert (accuracy.failures, accuracy.timeouts, report.exit_code) == (0, 0, 0)
    assert any("ground truth unparsed" in line and "p1" in line for line in accuracy.suspicious)
    assert any("whitespace-separated words" in note for note in report.notes)


BAD = """
import os, time
def crashes(completions, **kwargs):
    if "reward: 1.0" in completions:
        os._exit(1)
    return [1.0] * len(completions)
def hangs(completions, **kwargs):
    while "reward: 1.0" in completions:
        pass
    return [None] * len(completions)
def short(completions, **kwargs):
    return []
def gullible(completions, **kwargs):
    return [float(len(text)) for text in completions]
for function in (crashes, hangs, short, gullible):
    orms[function.__name__] = function
"""


def bad_report(plugin, arguments, name, **values):
    args = arguments(reward_funcs=[name], external_plugins=[plugin(BAD)], reward_timeout=0.5, **values)
    return reward_test.examine(args, prompts("4"))


@pytest.mark.parametrize(
    ("name", "failures", "timeouts", "word"),
    [("crashes", 1, 0, "crash"), ("hangs", 0, 1, "timeout"), ("short", 15, 0, "contract")],
)
def test_broken_functions_end_with_exit_code_5(plugin, arguments, name, failures, timeouts, word):
    report = bad_report(plugin, arguments, name)
    (function,) = report.functions
    assert (function.failures, function.timeouts) == (failures, timeouts)
    assert report.exit_code == 5
    assert word in report.problems[0]
    assert "prompt_id p0" in report.problems[0]


def test_a_gullible_function_is_suspicious_and_fails_min_gold(plugin, arguments):
    assert bad_report(plugin, arguments, "gullible").exit_code == 0
    report = bad_report(plugin, arguments, "gullible", min_gold=0.5)
    assert report.exit_code == 5
    assert "100,000 characters" in report.functions[0].suspicious[0]
    assert "--min_gold" in report.problems[0]


def test_constant_output_is_suspicious(arguments):
    report = reward_test.examine(arguments(reward_funcs=["react_format"]), prompts("4"))
    assert report.functions[0].suspicious == ["constant output: 0.0 for every text"]


def run_mode(monkeypatch, arguments, rows, capsys, **values):
    monkeypatch.setattr(reward_test, "load_prompts", lambda args: rows)
    code = reward_test.run(SimpleNamespace(args=arguments(**values)))
    return code, capsys.readouterr().out


def test_the_report_is_a_table(monkeypatch, arguments, capsys):
    code, out = run_mode(monkeypatch, arguments, prompts("4"), capsys, reward_funcs=["accuracy", "format"])
    header, accuracy, form, *_ = out.splitlines()
    assert code == 0
    for title in ("truth mean", "truth max", "adversarial max", "None", "failures", "time-outs", "p50 ms", "p99 ms"):
        assert title in header
    assert accuracy.split()[:5] == ["accuracy", "1", "1.000", "1.000", "0.000"]
    assert form.split()[0] == "format"


def test_an_old_run_is_scored_again_without_a_dataset_too(capsys, tmp_path):
    lines = [
        {"prompt_id": "p0", "completion": r"\boxed{4}", "columns": {"solution": "4"}},
        {"prompt_id": "gone", "prompt": "q", "completion": r"\boxed{5}", "columns": {"solution": "6"}},
    ]
    path = tmp_path / "completions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    args = RewardTestArguments(reward_funcs=["accuracy"], completions=str(path), json=True)
    assert reward_test.run(SimpleNamespace(args=args)) == 0
    assert json.loads(capsys.readouterr().out)["functions"][0]["given_mean"] == 0.5
    assert reward_test.read_completions(str(path), prompts("7"))[0][0].columns == {"solution": "7"}  # that of its row


def test_the_mode_reads_rows_and_completions_from_files(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1?", "solution": str(n + 1)}) + "\n" for n in range(30)))
    args = RewardTestArguments(
        json=True, dataset=[str(path)], reward_funcs=["accuracy", "format"], rows=3, min_gold=1.0
    )
    assert reward_test.run(SimpleNamespace(args=args)) == 0
    report = json.loads(capsys.readouterr().out)
    assert [item["rows"] for item in report["functions"]] == [3, 3]
    assert [item["gold_mean"] for item in report["functions"]] == [1.0, 1.0]


def test_an_unknown_gold_column_shows_the_nearest(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "result": "2"}) + "\n")
    with pytest.raises(ConfigError, match=r"reslut.*nearest: result"):
        reward_test.load_prompts(RewardTestArguments(dataset=[str(path)], gold_column="reslut"))


@pytest.mark.parametrize("content", ["{", '{"text": "x"}', "[1]"])
def test_a_wrong_completions_file_names_file_and_line(tmp_path, content):
    path = tmp_path / "completions.jsonl"
    path.write_text('{"completion": "x"}\n' + content)
    with pytest.raises(ConfigError, match=r"completions.jsonl:2"):
        reward_test.read_completions(str(path), [])


def test_the_gold_column_decides_else_solution_else_answer():
    (row,) = prompts("")
    row.columns.update(answer="7", key="8")
    assert truth_of(row, None) == "7"
    assert truth_of(row, "key") == "8"
    row.columns["solution"] = "9"
    assert truth_of(row, "solution") == "9"


def test_missing_columns_are_a_configuration_error(arguments):
    with pytest.raises(ConfigError, match="--columns"):
        reward_test.examine(arguments(reward_funcs=["accuracy"]), prompts("4", column="answer"))


def test_lengths_are_tokens_when_a_tokenizer_is_given(arguments, tmp_path):
    from swift.models.tiny import build_tiny

    folder = str(build_tiny(tmp_path / "tiny", size="nano"))
    args = arguments(reward_funcs=["soft_overlong"], tokenizer=folder, soft_max_length=8, soft_cache_length=4)
    report = reward_test.examine(args, prompts("123456"))
    assert report.functions[0].gold_max == -0.5  # six digits are six tokens of this tokenizer
    assert report.notes == [f"lengths are tokens of {folder}"]


@pytest.mark.parametrize("text", [r"\x1b]0;mine\x07", r"\ud800"])
def test_what_a_terminal_must_not_get_of_a_function_is_written_out(plugin, tmp_path, capsys, text):
    source = f"def loud(completions, **kwargs):\n    raise ValueError('{text}')\norms['loud'] = loud\n"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "solution": "1"}\n')
    words = ["--reward_funcs", "loud", "--external_plugins", plugin(source), "--dataset", str(tmp_path / "rows.jsonl")]
    assert main(["reward-test", *words]) == 5
    out = capsys.readouterr().out
    assert f"ValueError: {text}" in out and "\x1b" not in out and out.encode()
