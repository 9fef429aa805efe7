"""Sample completions in the trackers."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
from processes import wait_for

from swift.observability.trackers import SHOWN_ROWS, CompletionTrackers, as_markdown, short_failures

ROWS = [
    {
        "step": 3,
        "prompt": f"p{i}",
        "completion": "a|b\nc",
        "rewards": {"accuracy": 1.0, "a|\x1b[2J": None},
        "reward": 0.5,
        "advantage": None,
        "other": 1,
    }
    for i in range(SHOWN_ROWS + 2)
]


def test_a_completion_stays_in_its_cell():
    table = as_markdown([{"step": 3, "prompt": "p", "completion": "a|b\nc", "reward": 0.5, "advantage": None}])
    assert table.splitlines()[2] == "| 3 | p | a\\|b<br>c | 0.5 | None |"


def test_tensorboard_gets_the_first_rows_as_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = CompletionTrackers(["tensorboard", "none"], tmp_path)
    trackers.show(3, ROWS)
    trackers.close()
    events = EventAccumulator(str(tmp_path)).Reload().Tensors("completions/text_summary")
    text = events[0].tensor_proto.string_val[0].decode()
    assert events[0].step == 3
    assert text.count("<br>") == SHOWN_ROWS


def test_each_reward_function_has_a_column_and_long_texts_are_cut(tmp_path, monkeypatch):
    shown = []
    trackers = CompletionTrackers(["tensorboard"], tmp_path)
    monkeypatch.setattr(trackers, "_to_tensorboard", lambda step, table: shown.append(as_markdown(table)))
    trackers.show(3, [{**ROWS[0], "prompt": "x" * 10**6}])
    head, _, row = shown[0].splitlines()
    assert head == "| step | prompt | completion | rewards/accuracy | rewards/a\\|\\x1b[2J | reward | advantage |"
    assert row.endswith("| a\\|b<br>c | 1 | None | 0.5 | None |") and len(row) < 5000


def test_one_completion_of_each_prompt_is_shown_where_that_is_asked_for(tmp_path, monkeypatch):
    shown = []
    trackers = CompletionTrackers(["tensorboard"], tmp_path, unique_prompts=True)
    monkeypatch.setattr(trackers, "_to_tensorboard", lambda step, table: shown.append(table))
    trackers.show(3, [{**ROWS[0], "prompt": prompt, "reward": n} for n, prompt in enumerate("aaabbca")])
    assert [(row["prompt"], row["reward"]) for row in shown[0]] == [("a", 0), ("b", 3), ("c", 5)]


def test_mlflow_gets_a_file_per_step_and_trackio_a_markdown_text_in_their_runs_only(tmp_path, monkeypatch):
    sent, running = [], [None]
    mlflow = SimpleNamespace(
        active_run=lambda: running[0],
        flush_async_logging=lambda: sent.append("flushed"),
        log_text=lambda text, file: sent.append((file, text)),
    )
    trackio = SimpleNamespace(
        context_vars=SimpleNamespace(current_run=SimpleNamespace(get=lambda: running[0])),
        Markdown=lambda text: ("markdown", text),
        log=sent.append,
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    trackers = CompletionTrackers(["mlflow", "trackio"], tmp_path)
    trackers.show(3, ROWS[:1])
    assert sent == []
    running[0] = "run"
    trackers.show(3, ROWS[:1])
    table = sent[1][1]
    assert table.endswith("| 3 | p0 | a\\|b<br>c | 1 | None | 0.5 | None |")
    assert sent == ["flushed", ("completions/step-3.md", table), {"completions": ("markdown", table)}]


def test_without_trackers_nothing_is_written(tmp_path):
    trackers = CompletionTrackers([], tmp_path)
    trackers.show(3, ROWS)
    trackers.close()
    assert not list(tmp_path.iterdir())


def test_a_thread_of_tensorboard_that_cannot_write_says_so_in_a_line(tmp_path, caplog, capfd):
    trackers = CompletionTrackers(["tensorboard"], tmp_path / "runs")
    with short_failures():
        trackers.show(1, ROWS)
        while (tmp_path / "runs").exists():  # the thread may be about to make its file
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        with pytest.raises(FileNotFoundError):
            trackers.show(2, ROWS)
            trackers.close()
        assert wait_for(lambda: caplog.records), "the thread ends a moment after its failure is known"
    assert [record.message.partition(": ")[0] for record in caplog.records] == ["tensorboard"]
    assert "Traceback" not in capfd.readouterr().err
