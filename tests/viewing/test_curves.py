"""Curves are those of read_log, thinned out without losing an extreme; marks have their steps."""

import pytest
from run_folders import logged, read

from swift.observability.jsonl import read_log, series
from swift.viewing.curves import POINTS
from swift.viewing.difference import differences


def test_curves_are_those_of_the_rows_that_count(folder):
    folder.write(
        "logging.jsonl", *(logged(step) for step in range(1, 9)), {"eval_reward": 3.0, "step": 8, "attempt": 1}
    )
    folder.write("logging.jsonl", *(logged(step, attempt=2, reward=-step) for step in range(6, 11)))
    log = folder.run().log
    rows = read_log(folder.path / "logging.jsonl")
    for key in ("reward", "rewards/accuracy/mean", "eval_reward", "loss", "nothing"):
        assert log.series(key) == series(rows, key)
    assert log.series("reward", 5, 6) == ([5, 6], [0.5, -6.0])
    assert log.keys == ["reward", "rewards/accuracy/mean", "eval_reward"]


def test_a_growing_log_is_read_on_and_other_lines_are_counted(folder):
    folder.write("logging.jsonl", logged(1))
    run = folder.run()
    with (folder.path / "logging.jsonl").open("a") as file:
        file.write('nonsense\n{"step": null, "attempt": 1}\n{"step": 2, "attempt": 1, "reward": 7}\n{"step": 3')
    assert read(run).log.series("reward") == ([1, 2], [0.1, 7.0])
    assert run.about()["unreadable"] == 2 and run.about()["last_step"] == 2


def test_a_long_curve_keeps_its_extremes(folder):
    values = {step: float(step % 7) for step in range(1, 20_001)} | {12_345: 99.0, 777: -99.0}
    folder.write("logging.jsonl", *({"step": step, "attempt": 1, "reward": value} for step, value in values.items()))
    steps, found = folder.run().log.series("reward")
    assert len(steps) <= POINTS + 2 and steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 20_000)
    assert {-99.0, 99.0} < set(found)
    assert all(values[step] == value for step, value in zip(steps, found, strict=True))
    assert folder.run().log.series("reward", 12_000, 12_400)[0] == list(range(12_000, 12_401))


def test_restarts_checkpoints_and_alerts_are_marks(folder):
    folder.write("attempts.jsonl", {"attempt": 2, "changed": {"beta": [0, 0.1]}, "start_step": 4, "reason": None})
    folder.write("alerts.jsonl", {"attempt": 1, "step": 5, "rule": "kl", "value": 3.0, "sentence": "kl is 3"})
    for name in ("checkpoint-4", "checkpoint-last", ".tmp-checkpoint-8"):
        (folder.path / name).mkdir()
    assert folder.run().log.marks() == [
        {"kind": "restart", "step": 4, "text": "attempt 2: beta 0 -> 0.1"},
        {"kind": "checkpoint", "step": 4, "text": "saved"},
        {"kind": "alert", "step": 5, "text": "kl: kl is 3"},
    ]


@pytest.mark.parametrize(
    ("first", "second", "pieces"),
    [
        ("the same", "the same", [("equal", "the same")]),
        ("2 + 2 = 4.", "2 + 2 = 5.", [("equal", "2 + 2 = "), ("first", "4"), ("second", "5"), ("equal", ".")]),
        ("", "new", [("second", "new")]),
        ("a b", "a b c", [("equal", "a b"), ("second", " c")]),
    ],
)
def test_two_texts_differ_by_words(first, second, pieces):
    assert differences(first, second) == pieces


@pytest.mark.parametrize("words", [30, 3000])
def test_pieces_make_up_both_texts(words):
    first = "".join(f"{n * n % 7} {n}\n" for n in range(words))
    second = "".join(f"{n * n % 5} {n}\n" for n in range(words))
    pieces = differences(first, second)
    assert "".join(text for kind, text in pieces if kind != "second") == first
    assert "".join(text for kind, text in pieces if kind != "first") == second
