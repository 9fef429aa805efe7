"""Rows survive kills: torn lines are cut off, floats come back, the highest attempt counts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.errors import ConfigError
from swift.observability.jsonl import JsonlWriter, encode_row, read_jsonl, read_log, repair, series


def write(path, *rows):
    writer = JsonlWriter(path)
    writer.write(*rows)
    writer.close()


def test_rows_come_back_in_order(tmp_path):
    write(tmp_path / "a.jsonl", {"a": 1}, {"b": "ü\n"})
    write(tmp_path / "a.jsonl", {"c": None})
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [{"a": 1}, {"b": "ü\n"}, {"c": None}]


def test_nothing_exists_before_the_first_row(tmp_path):
    writer = JsonlWriter(tmp_path / "a.jsonl")
    writer.close()
    assert list(tmp_path.iterdir()) == []


@given(cut=st.integers(1, 20))
def test_a_torn_last_line_is_cut_off_before_more_is_appended(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "a.jsonl"
    write(path, {"step": 1}, {"step": 2, "text": "x" * 20})
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_jsonl(path)) == [{"step": 1}]
    write(path, {"step": 3})
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 3}]


def test_a_long_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, {"step": 1})
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"text": "' + b"x" * 200_000)
    assert repair(path) == 200_010
    assert path.stat().st_size == size


def test_zeros_left_by_a_power_loss_are_cut_off_and_nothing_else(tmp_path):
    path = tmp_path / "a.jsonl"
    path.touch()
    assert repair(path) == 0
    write(path, {"step": 1})
    assert repair(path) == 0
    with path.open("ab") as file:
        file.write(b"\0" * 50 + b"\n")
    assert repair(path) == 51
    assert list(read_jsonl(path)) == [{"step": 1}]


def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\nnot json\n{"a": 2}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: .*not JSON"):
        list(read_jsonl(path))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_to_the_same_bits(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("floats") / "a.jsonl"
    write(path, {"value": value})
    (row,) = read_jsonl(path)
    assert math.copysign(1.0, row["value"]) == math.copysign(1.0, value)
    assert row["value"] == value


def test_values_that_json_lacks_are_written_as_what_they_stand_for():
    row = {"nan": math.nan, "list": [math.inf, 1.5], "np": np.float32(0.5), "set": {2, 1}, "nan32": np.float32("nan")}
    assert encode_row(row) == b'{"nan": null, "list": [null, 1.5], "np": 0.5, "set": [1, 2], "nan32": null}\n'


def test_a_lone_surrogate_can_be_written(tmp_path):
    write(tmp_path / "a.jsonl", {"text": "\ud800"})
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [{"text": "\ud800"}]


def test_for_a_repeated_step_the_highest_attempt_counts(tmp_path):
    rows = [
        {"attempt": 1, "step": 1, "loss": 0.1},
        {"attempt": 1, "step": 2, "loss": 0.2},
        {"attempt": 1, "step": 2, "eval_reward": 0.3},
        {"attempt": 2, "step": 2, "loss": 0.4},
        {"attempt": 2, "step": 3, "loss": 0.5},
    ]
    write(tmp_path / "a.jsonl", *rows)
    assert read_log(tmp_path / "a.jsonl") == [rows[0], rows[3], rows[4]]
    assert series(read_log(tmp_path / "a.jsonl"), "loss") == ([1, 2, 3], [0.1, 0.4, 0.5])
