"""The benchmark of the algorithm options: its commands are what swift accepts, its page is what was measured."""

import importlib
import json
from pathlib import Path

import pytest

from swift.arguments import parse

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "algorithms_measured.md"


@pytest.fixture
def algorithms(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import algorithms

    return algorithms


def run(seed, **figures):
    zeros = dict.fromkeys(
        ("reward", "held_out_accuracy", "dropped_tokens", "steps_without_signal", "metric_value"), 0.0
    )
    return {"seed": seed, **zeros, **figures}


def test_every_option_is_a_command_that_swift_accepts_and_has(algorithms, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    data = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for file in data:
        file.write_text('{"query": "1+1=", "solution": "2", "carries": 0}\n')
    for option in algorithms.OPTIONS:
        words = algorithms.command(option, tmp_path, data, tmp_path / "out", 40, 0)
        assert words[1:4] == ["-m", "swift", "rlhf"]
        assert parse("rlhf", words[4:], {}).mode == "rlhf", option.name


def test_an_option_replaces_a_flag_of_the_base_and_is_not_given_twice(algorithms, tmp_path):
    option = algorithms.Option("kl", "--beta 0.04", "kl")
    words = algorithms.command(option, tmp_path, (tmp_path, tmp_path), tmp_path, 40, 0)
    assert words.count("--beta") == 1 and words[words.index("--beta") + 1] == "0.04"


def test_a_run_is_read_from_its_logs(algorithms, tmp_path):
    steps = [
        {"step": n, "reward": float(n), "kl": 0.1 * n, "health/steps_without_signal": n // 10} for n in range(1, 21)
    ]
    rows = [*steps, {"step": 20, "eval_reward": 1.5, "eval_rewards/accuracy/mean": 0.625}]
    (tmp_path / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampled = [("train", 20, True), ("train", 22, False), ("eval", 30, False)]
    (tmp_path / "completions.jsonl").write_text(
        "".join(
            json.dumps({"split": s, "completion_tokens": n, "used": u, "columns": {"carries": n % 4}}) + "\n"
            for s, n, u in sampled
        )
    )
    figures = algorithms.read(algorithms.Option("kl", "", "kl", "last"), tmp_path)
    assert figures["reward"] == 15.5 and figures["held_out_accuracy"] == 0.625
    assert (figures["dropped_tokens"], figures["sampled_tokens"]) == (22, 42)
    assert figures["steps_without_signal"] == 2 and figures["metric_value"] == pytest.approx(2.0)
    assert algorithms.read(algorithms.Option("curriculum", "", "carries"), tmp_path)["metric_value"] == 1.0


def test_a_metric_that_is_missing_fails_the_row(algorithms, tmp_path):
    (tmp_path / "logging.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    (tmp_path / "completions.jsonl").write_text("")
    with pytest.raises(RuntimeError, match=r"sapo: its log has no ratio/max"):
        algorithms.read(algorithms.Option("sapo", "", "ratio/max"), tmp_path)


def test_a_table_shows_means_and_extremes_over_the_seeds(algorithms):
    runs = [run(0, reward=1.25, held_out_accuracy=0.5), run(1, reward=1.75, held_out_accuracy=0.625)]
    row = {"option": "sapo", "flags": "--loss_type sapo", "metric": "ratio/max", "how": "max", "runs": runs}
    assert algorithms.cells(row)[:4] == [
        "sapo", "`--loss_type sapo`", "1.500 (1.250 to 1.750)", "0.562 (0.500 to 0.625)",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["algorithms", "dynamic_sampling"])
def test_the_page_holds_the_tables_of_the_results_it_names(algorithms, name):
    from harness import page

    module = importlib.import_module(name)
    inside = page.content(PAGE, name)
    rows = json.loads((ROOT / inside.split("`")[1]).read_text(encoding="utf-8"))["rows"]
    assert inside.strip().splitlines()[2:] == module.markdown(rows).splitlines()
    options = [option.name for option in algorithms.OPTIONS]
    assert name != "algorithms" or [row["option"] for row in rows] == options


def test_a_table_is_written_between_the_marks_and_nothing_else_changes(algorithms, tmp_path):
    from harness import page

    file = tmp_path / "page.md"
    start, end = page.marks("x")
    file.write_text(f"before\n{start}\nold\n{end}\nafter\n")
    page.write(file, "x", "| new |", "x.json")
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and "| new |" in text
    with pytest.raises(ValueError, match="no place for a table"):
        page.write(file, "y", "| new |", "y.json")
