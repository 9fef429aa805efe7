"""Easy rows before hard ones, and several datasets in given shares: deterministic, resumable, refused when wrong."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import problems_of
from row_files import jsonl, settings

from swift.data.columns import as_number
from swift.data.curriculum import stages
from swift.data.interleave import interleave
from swift.data.loading import load_rows
from swift.data.prompts import Tokenizer
from swift.data.sampler import RowOrder
from swift.data.source import open_prompts
from swift.errors import ConfigError


def source(*datasets, **changes):
    tokenizer = Tokenizer(lambda messages: [len(messages[-1]["content"])])
    return open_prompts(settings(*datasets, **changes), tokenizer)


def draw(prompts, count, column="level"):
    return [prompts.next().columns[column] for _ in range(count)]


@pytest.fixture
def levels(tmp_path):
    """12 rows, three of each level 1 to 4, in a bad order."""
    rows = [{"query": f"q{n}", "level": (n * 7 + 3) % 4 + 1, "n": n} for n in range(12)]
    return jsonl(tmp_path / "levels.jsonl", rows)


# --- curriculum ---------------------------------------------------------------------------------------------


def test_stages_are_the_ranks_of_the_numbers_or_bins_of_them():
    assert stages([3, 1, 2, 2]).tolist() == [3, 0, 1, 1]
    assert stages([3, 1, 2, 2], descending=True).tolist() == [0, 3, 1, 1]
    assert stages([3, 1, 2, 2], bins=2).tolist() == [1, 0, 0, 0]
    assert stages([10, 20, 30, 40], bins=2).tolist() == [0, 0, 1, 1]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 6), st.booleans())
def test_bins_keep_the_order_and_never_part_equal_numbers(numbers, bins, descending):
    found = stages(numbers, descending=descending, bins=bins).tolist()
    for (a, stage_a), (b, stage_b) in itertools.combinations(zip(numbers, found, strict=True), 2):
        assert stage_a == stage_b if a == b else (stage_a <= stage_b) == ((a < b) != descending) or stage_a == stage_b
    assert min(found) >= 0
    assert max(found) < bins


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 99), st.booleans(), st.integers(0, 50))
def test_a_curriculum_visits_every_row_once_per_epoch_and_resumes(numbers, seed, shuffle, taken):
    size, order = len(numbers), stages(numbers)
    stream = RowOrder(size, seed=seed, shuffle=shuffle, stages=order)
    rows = [stream.draw() for _ in range(2 * size)]
    for epoch in (rows[:size], rows[size:]):
        assert sorted(epoch) == list(range(size))
        assert [numbers[row] for row in epoch] == sorted(numbers)
    again = RowOrder(size, seed=seed, shuffle=shuffle, stages=order)
    for _ in range(taken):
        again.draw()
    resumed = RowOrder(size, seed=seed, shuffle=shuffle, stages=order)
    resumed.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert [resumed.draw() for _ in range(size)] == [again.draw() for _ in range(size)]


def test_easy_rows_come_first_in_every_epoch_and_are_mixed_inside_a_stage(levels):
    prompts = source(levels, curriculum_column="level")
    first, second = draw(prompts, 12, "n"), draw(prompts, 12, "n")
    level_of = {n: (n * 7 + 3) % 4 + 1 for n in range(12)}
    assert [level_of[n] for n in first] == [level_of[n] for n in second] == sorted(level_of.values())
    assert first != second


def test_without_shuffling_a_stage_keeps_the_order_of_the_file(levels):
    prompts = source(levels, curriculum_column="level", curriculum_order="descending", dataset_shuffle=False)
    drawn = draw(prompts, 12, "n")
    assert [(n * 7 + 3) % 4 + 1 for n in drawn] == [4] * 3 + [3] * 3 + [2] * 3 + [1] * 3
    assert drawn[:3] == sorted(drawn[:3])


def test_a_position_in_another_curriculum_is_refused(levels):
    state = source(levels, curriculum_column="level").state_dict()
    for changes in ({}, {"curriculum_column": "level", "curriculum_bins": 2}):
        with pytest.raises(ConfigError, match="stages of --curriculum_column"):
            source(levels, **changes).load_state_dict(state)


def test_numbers_may_be_texts_as_in_csv_files_and_nothing_else(tmp_path):
    (tmp_path / "a.csv").write_text("query,level\nx,10\ny,9.5\n")
    assert draw(source(tmp_path / "a.csv", curriculum_column="level"), 2) == ["9.5", "10"]
    assert [as_number(one) for one in (True, None, "hard", float("nan"), "inf", [1], "2", 3)] == [None] * 6 + [2.0, 3.0]


def test_rows_without_a_number_are_named(tmp_path):
    rows = [{"query": "a", "level": 1}, {"query": "b", "level": "hard"}, *({"query": f"{n}"} for n in range(5))]
    path = jsonl(tmp_path / "a.jsonl", rows)
    problems = problems_of(source, path, curriculum_column="level")
    assert problems[:2] == [
        f"--curriculum_column: level: {path}:2: 'hard' is no number; give every row one",
        f"--curriculum_column: level: {path}:3: 'no value' is no number; give every row one",
    ]
    assert problems[5:] == ["--curriculum_column: level: 6 rows without a number: the first 5 are listed"]


def test_a_column_that_is_not_there_is_an_error_with_the_nearest(levels):
    with pytest.raises(ConfigError, match="levle: no dataset has this column; nearest: level"):
        source(levels, curriculum_column="levle")


# --- mixtures -----------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(1, 20), min_size=2, max_size=4)


@given(sizes, st.integers(0, 99))
def test_a_mixture_ends_with_the_first_dataset_that_is_through(numbers, seed):
    shares = [1 / len(numbers)] * len(numbers)
    places = interleave(numbers, shares, seed=seed, strategy="first_exhausted")
    assert len(set(places)) == len(places)
    counts = Counter(index for index, _ in places)
    last = places[-1][0]
    assert counts[last] == numbers[last]
    assert all(counts[index] < size for index, size in enumerate(numbers) if index != last)


@given(sizes, st.integers(0, 99))
def test_a_mixture_that_ends_with_all_uses_every_row(numbers, seed):
    shares = [1 / len(numbers)] * len(numbers)
    places = interleave(numbers, shares, seed=seed, strategy="all_exhausted")
    assert set(places) == {(index, row) for index, size in enumerate(numbers) for row in range(size)}
    assert places.count(places[-1]) == 1  # the end is the first moment at which all are through


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
def test_a_mixture_is_that_of_the_datasets_library_in_length_and_shares(strategy):
    """Same rule, other draws: 3000 and 1000 rows at 0.75 and 0.25 are through at nearly the same time."""
    places = interleave([3000, 1000], [0.75, 0.25], seed=3, strategy=strategy)
    assert len(places) == pytest.approx(4000, rel=0.1)
    assert sum(index == 0 for index, _ in places) / len(places) == pytest.approx(0.75, abs=0.03)


def test_shares_that_would_never_end_are_refused():
    with pytest.raises(ConfigError, match=r"--interleave_prob: 0\.999999999 1e-09: with --stopping_strategy all_exh"):
        interleave([10, 10], [0.999999999, 1e-9], seed=0, strategy="all_exhausted")


@pytest.fixture
def two(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [{"query": f"a{n}", "level": "a", "n": n} for n in range(40)])
    b = jsonl(tmp_path / "b.jsonl", [{"query": f"b{n}", "level": "b", "n": n} for n in range(10)])
    return a, b


def test_the_rows_of_a_run_come_in_the_shares_and_the_plan_says_how_many(two):
    prompts = source(*two, interleave_prob=[0.5, 0.5])
    counts = Counter(draw(prompts, prompts.size))
    assert counts["b"] == 10
    assert 3 <= counts["a"] <= 25
    assert f"{counts['a']} of {two[0]} (40 rows), 10 of {two[1]} (10 rows)" in "\n".join(prompts.report.lines())


def test_all_exhausted_repeats_the_short_dataset(two):
    prompts = source(*two, interleave_prob=[0.5, 0.5], stopping_strategy="all_exhausted")
    counts = Counter(draw(prompts, prompts.size, "n"))
    assert set(range(40)) <= set(counts)
    assert prompts.size > 50


def test_supervised_rows_are_mixed_too_and_the_same_on_every_process(two):
    wanted = settings(*two, interleave_prob=[0.8, 0.2], columns={"level": "response"})
    first, second = (list(load_rows(wanted, "train")) for _ in range(2))
    assert first == second
    assert len(first) not in (0, 50)


def test_evaluation_rows_are_never_mixed(two):
    wanted = settings(*two, val_dataset=[str(one) for one in two], interleave_prob=[0.5, 0.5])
    assert len(load_rows(wanted, "val", purpose="prompt")) == 50


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
def test_a_streamed_mixture_is_that_of_its_seed_and_epoch_and_resumes(two, strategy):
    def open_():
        return source(
            *two, streaming=True, shuffle_buffer_size=4, interleave_prob=[0.5, 0.5],
            stopping_strategy=strategy,
        )  # fmt: skip

    prompts = open_()
    epochs = [[], []]
    while (columns := prompts.next().columns) and (epoch := prompts.state_dict()["epoch"]) < 2:
        epochs[epoch].append(columns)
    assert epochs[0] != epochs[1]
    for rows in epochs:
        names = Counter(row["level"] for row in rows)
        assert (names["b"] == 10 and names["a"] < 40) if strategy == "first_exhausted" else len(rows) > 50
    resumed = open_()
    other = open_()
    for _ in range(33):
        other.next()
    resumed.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert [resumed.next() for _ in range(80)] == [other.next() for _ in range(80)]


def test_a_streamed_mixture_of_another_kind_is_refused_at_resume(two):
    common = {"streaming": True}
    state = source(*two, interleave_prob=[0.5, 0.5], **common).state_dict()
    with pytest.raises(ConfigError, match=r"--interleave_prob: 0.5 0.5 first_exhausted in the checkpoint"):
        source(*two, interleave_prob=[0.4, 0.6], **common).load_state_dict(state)
