"""completions.jsonl in columns: the rows that count, where they are, and which contain a text."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_folders import completion, read

from swift.observability.jsonl import read_log
from swift.viewing import index, tail
from swift.viewing.filters import Filter, groups, statistics
from swift.viewing.index import Texts


@pytest.fixture(params=[8 << 20, 700])
def block_bytes(request, monkeypatch):
    """Blocks that hold everything, and such that a line fits barely."""
    monkeypatch.setattr(tail, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(index, "SEARCH_BYTES", request.param)


def rows_of(table, wanted):
    return [table.read(row) for row in np.flatnonzero(wanted)]


def test_the_rows_that_count_are_those_of_read_log(folder, block_bytes):
    folder.completions(*(completion(step, index=index) for step in (1, 2, 3) for index in (0, 1)))
    folder.completions(*(completion(step, index=index, attempt=2, reward=9.0) for step in (2, 3) for index in (0, 1)))
    table = folder.run().index.table
    assert len(table) == 10
    assert rows_of(table, table.current) == read_log(folder.path / "completions.jsonl")


def test_what_is_appended_is_read_and_a_torn_line_waits(folder, block_bytes):
    folder.completions(completion(1))
    run = folder.run()
    before = run.index.table
    line = json.dumps(completion(2)) + "\n"
    with (folder.path / "completions.jsonl").open("a") as file:
        file.write(line[:40])
        file.flush()
        assert len(read(run).index.table) == 1
        file.write(line[40:])
    assert read(run).index.table.read(1) == completion(2)
    assert len(before) == 1


def test_a_file_that_was_replaced_is_read_anew(folder):
    folder.completions(completion(1), completion(2))
    run = folder.run()
    (folder.path / "completions.jsonl").unlink()
    folder.completions(completion(7))
    table = read(run).index.table
    assert table.columns["step"].tolist() == [7] and len(table.groups) == 1
    (folder.path / "completions.jsonl").unlink()
    assert len(read(run).index.table) == 0


def test_lines_that_are_no_completions_are_counted(folder):
    (folder.path / "completions.jsonl").write_bytes(
        b"no json\n{}\n\xff\xfe\n\n[1]\n" + json.dumps(completion(1)).encode() + b"\n"
    )
    run = folder.run()
    assert len(run.index.table) == 1 and run.about()["unreadable"] == 4


def test_a_reward_function_of_some_rows_is_nothing_in_the_others(folder, block_bytes):
    folder.completions(completion(1), completion(2, rewards={"late": 3.0}), completion(3, rewards={"accuracy": None}))
    rewards = folder.run().index.table.rewards
    assert {name: [None if np.isnan(v) else v for v in values] for name, values in rewards.items()} == {
        "accuracy": [0.0, None, None],
        "format": [0.5, None, None],
        "late": [None, 3.0, None],
    }


TEXT = st.text(alphabet=st.sampled_from('ab\\"\nnu0{}:,é😀\x01 promtcel'), max_size=12)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5), needle=TEXT.filter(bool))
def test_a_text_is_found_where_it_is_and_nowhere_else(folder, prompts, needle):
    (folder.path / "completions.jsonl").unlink(missing_ok=True)
    rows = [
        completion(
            1, prompt=a, completion=b, turns=[{"role": "tool", "content": c}] if c else None, columns={"x": needle}
        )
        for a, b, c in prompts
    ]
    folder.completions(*rows)
    table = folder.run().index.table
    found = table.containing(needle, np.ones(len(table), bool))
    assert found.tolist() == [Texts(row["prompt"], row["completion"], row["turns"]).have(needle) for row in rows]


@pytest.mark.parametrize("word", ["completion", "prompt", "turns", "null", "role", "n", "42", "prompt_tokens", "0001"])
def test_names_of_keys_and_other_columns_are_no_texts(folder, block_bytes, word):
    folder.completions(
        completion(1, prompt="?", completion="-\n\x01", turns=[{"role": "user", "content": "x"}]),
        completion(1, index=1, prompt="?", completion=f"a {word} b"),
    )
    assert folder.run().index.table.containing(word, np.ones(2, bool)).tolist() == [False, True]


def test_a_lone_surrogate_is_read_and_so_is_what_stands_beside_it(folder):
    folder.completions(completion(1, completion="é\ud800"), completion(2))
    table = folder.run().index.table
    assert table.containing("é", np.ones(2, bool)).tolist() == [True, False]
    assert table.read(0)["completion"] == "é\ud800"


ROWS = [
    *(completion(1, index=i) for i in range(4)),
    *(completion(2, group=1, index=i, finish_reason="length", reward=0.0) for i in range(2)),
    completion(
        2, group=2, reward=None, advantage=None, excluded="timeout: slow", rewards={"accuracy": None, "format": 1.0}
    ),
    completion(2, group=2, index=1, reward=2.0),
    completion(3, split="eval"),
]
CASES = {
    "all": ({}, lambda row: True),
    "steps": ({"first_step": 2, "last_step": 2}, lambda row: row["step"] == 2),
    "split": ({"split": "eval"}, lambda row: row["split"] == "eval"),
    "prompt": ({"prompt_id": "p1"}, lambda row: row["prompt_id"] == "p1"),
    "no such prompt": ({"prompt_id": "p9"}, lambda row: False),
    "reward": ({"least": 0.5, "most": 2.0}, lambda row: row["reward"] is not None and 0.5 <= row["reward"] <= 2),
    "reward of a function": ({"function": "format", "least": 0.75}, lambda row: row["rewards"]["format"] >= 0.75),
    "not excluded": ({"excluded": "no"}, lambda row: row["excluded"] is None),
    "excluded": ({"excluded": "yes"}, lambda row: row["excluded"] is not None),
    "excluded for a reason": ({"excluded": "timeout: slow"}, lambda row: row["excluded"] == "timeout: slow"),
    "finish reason": ({"finish_reason": "length"}, lambda row: row["finish_reason"] == "length"),
    "text": ({"text": "answer 1", "last_step": 1}, lambda row: row["step"] == 1 and row["index"] == 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_filter_means_what_it_says(folder, name):
    conditions, expected = CASES[name]
    folder.completions(*ROWS)
    table = folder.run().index.table
    assert rows_of(table, Filter(**conditions).rows(table)) == [row for row in ROWS if expected(row)]


def test_groups_are_told_as_a_whole_by_their_spread(folder):
    folder.completions(*ROWS)
    table = folder.run().index.table
    found = groups(table, Filter(excluded="yes").rows(table), "", "spread", True)
    assert {name: values.tolist() for name, values in found.items()} == {
        "first": [6], "step": [2], "size": [2], "excluded": [1], "mean": [2.0], "least": [2.0], "greatest": [2.0],
        "spread": [0.0], "length": [4.5], "matches": [1],
    }  # fmt: skip
    every = groups(table, Filter().rows(table), "", "spread", True)
    assert every["first"].tolist() == [0, 4, 6, 8]
    assert every["spread"][0] == pytest.approx(np.std([0.5, 1.5, 2.5, 3.5]))
    assert groups(table, Filter().rows(table), "", "reward", False)["first"].tolist() == [4, 8, 0, 6]
    by_function = groups(table, Filter().rows(table), "accuracy", "reward", True)
    assert by_function["mean"].tolist() == [1.5, 1.0, 0.5, 0.0]


def test_a_group_without_any_reward_comes_last_and_has_none(folder):
    folder.completions(completion(1, reward=None, rewards={}), completion(2))
    table = folder.run().index.table
    for descending in (True, False):
        found = groups(table, Filter().rows(table), "", "reward", descending)
        assert found["step"].tolist() == [2, 1] and np.isnan(found["least"][1])


def test_statistics_are_those_of_the_rows_that_count(folder):
    folder.completions(completion(1, reward=5.0), completion(1, attempt=2, reward=1.0))
    table = folder.run().index.table
    found = groups(table, Filter().rows(table), "", "spread", True)
    assert found["size"].tolist() == [1] and found["mean"].tolist() == [1.0]
    assert len(statistics(table, "")["size"]) == 2
    assert table.rows_of(1, "train", "p0-1") == [1]
