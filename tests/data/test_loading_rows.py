"""Datasets as the command line gives them: counts, splits, strictness, the system prompt."""

import base64
import json
from collections import Counter
from pathlib import Path

import pytest
import vlms
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from refusals import problems_of
from row_files import jsonl, settings

from swift.data.image_store import images_in
from swift.data.images import encoded
from swift.data.loading import Example, load_rows, split_examples, write_examples
from swift.data.spec import parse_spec
from swift.data.stream import ExampleStream
from swift.data.system import resolve_system
from swift.errors import ConfigError
from swift.rewards.functions.gym import ReasoningGym


def prompts(*datasets, split="train", **changes):
    return load_rows(settings(*datasets, **changes), split, purpose="prompt")


def numbers(rows):
    return [int(row["messages"][-1]["content"]) for row in rows]


@pytest.fixture
def ten(tmp_path):
    return jsonl(tmp_path / "ten.jsonl", [{"query": str(n), "solution": n} for n in range(10)])


def test_all_rows_in_the_order_of_the_file(ten):
    rows = prompts(ten)
    assert numbers(rows) == list(range(10))
    assert list(rows)[3] == {"messages": [{"role": "user", "content": "3"}], "solution": 3}
    assert rows.report.lines() == ["prompt <- query; to rewards: solution"]


def test_n_rows_are_drawn_without_replacement_by_the_data_seed(ten):
    drawn = numbers(prompts(f"{ten}#6"))
    assert len(set(drawn)) == 6
    assert drawn == numbers(prompts(f"{ten}#6"))
    assert drawn != numbers(prompts(f"{ten}#6", data_seed=1))
    assert drawn != list(range(6))


def test_n_beyond_the_rows_gives_copies_and_a_remainder(ten):
    counts = Counter(numbers(prompts(f"{ten}#23")))
    assert sorted(counts.values()) == [2] * 7 + [3] * 3
    assert numbers(prompts(f"{ten}#4", dataset_shuffle=False)) == [0, 1, 2, 3]
    assert numbers(prompts(f"{ten}#12", dataset_shuffle=False)) == [*range(10), 0, 1]


@pytest.mark.parametrize(
    ("part", "taken"),
    [
        (":3", range(3)), ("7:", range(7, 10)), ("2:4", range(2, 4)), (":10%", range(1)), ("25%:50%", range(2, 5)),
        ("-2:", range(8, 10)), (":-80%", range(2)), ("4:11", None), ("5:5", None), (":0", None),
    ],
)  # fmt: skip
def test_a_part_of_a_dataset_has_the_rows_of_that_place(ten, part, taken):
    if taken is None:
        with pytest.raises(ConfigError, match=f"#{part}: rows .* of 10; name rows that there are"):
            prompts(f"{ten}#{part}")
    else:
        assert numbers(prompts(f"{ten}#{part}")) == list(taken)


@pytest.mark.parametrize("part", [":10%", "10%:", ":1%", "95%:", "33%:66%", "-20%:", ":7", "-3:"])
def test_a_part_is_what_it_is_in_datasets(part):
    from datasets import ReadInstruction

    for size in (200, 207, 1000):
        [theirs] = ReadInstruction.from_spec(f"train[{part}]").to_absolute({"train": size})
        ours = parse_spec(f"org/name#{part}").part(size)
        assert (ours.start, ours.stop) == (theirs.from_ or 0, size if theirs.to is None else theirs.to)


def test_n_counts_good_rows(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"query": str(n) if n % 2 else ""} for n in range(20)])
    assert sorted(numbers(prompts(f"{path}#10", max_skipped_fraction=0.5))) == list(range(1, 20, 2))
    assert len(prompts(f"{path}#15", max_skipped_fraction=0.5)) == 15


def test_several_datasets_follow_each_other(ten, tmp_path):
    other = jsonl(tmp_path / "other.jsonl", [{"question": "77", "answer": "x"}])
    rows = prompts(f"{ten}#2", other, dataset_shuffle=False)
    assert numbers(rows) == [0, 1, 77]
    assert rows.report.lines() == [
        f"{ten}: prompt <- query; to rewards: solution",
        f"{other}: prompt <- question; to rewards: answer",
    ]


def test_bad_rows_are_skipped_and_counted_with_file_and_line(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"query": "1"}, {"query": 2}, "[]", {"query": "4"}, {"other": 1}])
    rows = prompts(path, max_skipped_fraction=0.6)
    assert numbers(rows) == [1, 4]
    assert rows.report.num_skipped == 3
    assert rows.report.first_bad == [
        f"{path}:2: query must be text, not int",
        f"{path}:3: a row must be a JSON object, not a list",
        f"{path}:5: no query",
    ]
    assert "3 bad rows skipped" in rows.report.lines()[-1]
    assert f"{path}:2: query must be text" in rows.report.lines()[-1]


@pytest.mark.parametrize(
    ("num_bad", "share", "stops"), [(2, 0.2, False), (3, 0.2, True), (1, 0.0, True), (9, 0.9, False)]
)
def test_too_many_bad_rows_stop(tmp_path, num_bad, share, stops):
    path = jsonl(tmp_path / "a.jsonl", [{"query": ""}] * num_bad + [{"query": "1"}] * (10 - num_bad))
    if not stops:
        assert len(prompts(path, max_skipped_fraction=share)) == 10 - num_bad
        return
    problems = problems_of(prompts, path, max_skipped_fraction=share)
    assert f"{path}: {num_bad} of 10 rows bad" in problems[0]
    assert problems[1] == f"{path}:1: query is empty"


def test_strict_lists_the_first_few_and_stops(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"query": "1"}] + [{"query": ""}] * 8)
    problems = problems_of(prompts, path, strict=True)
    assert problems[0] == f"{path}:2: query is empty"
    assert len(problems) == 6
    assert "8 bad rows: the first 5 are listed" in problems[-1]


def test_of_rows_with_the_same_content_the_first_is_used(tmp_path):
    one = jsonl(tmp_path / "a.jsonl", [{"query": "1", "n": 1}, {"query": "1", "n": 2}, {"query": "1", "n": 1}])
    rows = prompts(
        one, jsonl(tmp_path / "b.jsonl", [{"query": "1", "n": 2}, {"query": "2", "n": 2}]), drop_duplicates=True
    )
    assert [(number, row["n"]) for number, row in zip(numbers(rows), rows, strict=True)] == [(1, 1), (1, 2), (2, 2)]
    assert "2 duplicates left out (--drop_duplicates)" in rows.report.lines()


@pytest.mark.parametrize("strict", [False, True])
def test_a_file_that_does_not_parse_is_never_skipped_over(tmp_path, strict):
    path = jsonl(tmp_path / "a.jsonl", ['{"query": "q"}'] * 16 + ['{"query": '])
    (problem,) = problems_of(prompts, path, strict=strict)
    assert problem.startswith(f"{path}:17: broken JSON")


def test_a_dataset_without_a_usable_row_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no usable row among 1"):
        prompts(jsonl(tmp_path / "a.jsonl", [{"query": ""}]))
    with pytest.raises(ConfigError, match="no rows: the dataset is empty"):
        prompts(jsonl(tmp_path / "b.jsonl", []))
    with pytest.raises(ConfigError, match="--dataset: none"):
        prompts()


def test_problems_of_all_datasets_are_listed_together(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "query": "y"}])
    b = jsonl(tmp_path / "b.jsonl", [{"text": "x"}])
    problems = problems_of(prompts, a, b)
    assert [str(path) in problem for path, problem in zip([a, b], problems, strict=True)] == [True, True]


def test_a_column_of_nulls_is_no_candidate(tmp_path):
    rows = prompts(jsonl(tmp_path / "a.jsonl", [{"prompt": None, "query": "1", "system": None}]))
    assert list(rows) == [{"messages": [{"role": "user", "content": "1"}], "prompt": None}]


def test_columns_names_must_exist_in_some_dataset(ten, tmp_path):
    other = jsonl(tmp_path / "other.jsonl", [{"question": "q", "answer": "a"}])
    rows = prompts(ten, other, columns={"answer": "solution"})
    assert list(rows)[10]["solution"] == "a"
    with pytest.raises(ConfigError, match="no dataset has a column 'anwser'; nearest: answer"):
        prompts(other, columns={"anwser": "solution"})


def test_evaluation_data_may_use_the_new_names_already(ten, tmp_path):
    train = jsonl(tmp_path / "t.jsonl", [{"query": "1", "answer": 1}])
    rows = prompts(train, val_dataset=[str(ten)], columns={"answer": "solution"}, split="val")
    assert set(next(iter(rows))) == {"messages", "solution"}


@pytest.mark.parametrize("format", ["json", "csv", "parquet", "folder"])
def test_every_format_gives_the_same_prompts(tmp_path, format):
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = [{"question": f"What is {n}, half?", "answer": str(n / 2)} for n in range(5)]
    path = tmp_path / f"data.{format}"
    if format == "json":
        path.write_text(json.dumps(values))
    elif format == "csv":
        path.write_text("question,answer\n" + "".join(f'"{v["question"]}",{v["answer"]}\n' for v in values))
    elif format == "parquet":
        pq.write_table(pa.Table.from_pylist(values), path)
    else:
        path.mkdir()
        jsonl(path / "1.jsonl", values[:2])
        (path / "2.json").write_text(json.dumps(values[2:]))
    found = prompts(path)
    assert [row["messages"][0]["content"] for row in found] == [v["question"] for v in values]
    assert [row["answer"] for row in found] == [v["answer"] for v in values]


def test_a_split_is_deterministic_disjoint_and_complete(ten):
    train = prompts(ten, split_dataset_ratio=0.3)
    val = prompts(ten, split_dataset_ratio=0.3, split="val")
    assert len(val) == 3
    assert sorted(numbers(train) + numbers(val)) == list(range(10))
    assert numbers(val) == numbers(prompts(ten, split_dataset_ratio=0.3, split="val"))
    assert numbers(val) != numbers(prompts(ten, split_dataset_ratio=0.3, split="val", data_seed=7))
    assert "split: 7 rows to train on, 3 to evaluate (--split_dataset_ratio)" in train.report.lines()


def test_a_split_gives_at_least_one_row_to_each_side(ten, tmp_path):
    assert len(prompts(ten, split_dataset_ratio=0.001, split="val")) == 1
    assert len(prompts(ten, split_dataset_ratio=0.999)) == 1
    one = jsonl(tmp_path / "one.jsonl", [{"query": "1"}])
    with pytest.raises(ConfigError, match="1 different row cannot be split"):
        prompts(f"{one}#5", split_dataset_ratio=0.5)


@limits(max_examples=50)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 9))
def test_copies_of_a_row_stay_on_one_side(contents, ratio, seed):
    examples = [Example([{"role": "user", "content": str(n)}], {}, f"f:{i}") for i, n in enumerate(contents)]
    if len(set(contents)) < 2:
        return
    train, val = split_examples(examples, ratio, seed)
    assert train
    assert val
    assert not {e.digest for e in train} & {e.digest for e in val}
    assert sorted(e.origin for e in train + val) == sorted(e.origin for e in examples)


def test_val_dataset_wins_over_the_split(ten, tmp_path):
    val = jsonl(tmp_path / "val.jsonl", [{"query": "99"}])
    assert numbers(prompts(ten, val_dataset=[str(val)], split_dataset_ratio=0.5, split="val")) == [99]
    assert len(prompts(ten, val_dataset=[str(val)], split_dataset_ratio=0.5)) == 10
    assert len(prompts(ten, split="val")) == 0


def test_written_rows_load_as_the_same_rows(tmp_path):
    hard = [
        {
            "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "é 漢"}],
            "query": "x",
            "n": [1, {"a": None}],
        },
        {"messages": [{"role": "user", "content": "b\u2028"}], "half": "\ud800"},
    ]
    rows = prompts(jsonl(tmp_path / "a.jsonl", hard), system="flag")
    write_examples(rows.examples, tmp_path / "val_dataset.jsonl")
    again = prompts(tmp_path / "val_dataset.jsonl")
    assert list(again) == list(rows)
    assert [e.digest for e in again.examples] == [e.digest for e in rows.examples]


def test_written_rows_bring_their_images(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(vlms.image(0))
    url = f"data:image/png;base64,{base64.b64encode(vlms.image(1)).decode()}"
    lines = [
        {"messages": [{"role": "user", "content": "<image>, <image>?"}], "images": ["a.png", url], "n": 1},
        {"messages": [{"role": "user", "content": "none"}], "images": [], "n": 2},
    ]

    def loaded(file):
        return load_rows(settings(file), "train", purpose="prompt", images=True)

    rows = loaded(jsonl(tmp_path / "data" / "a.jsonl", lines))
    write_examples(rows.examples, tmp_path / "val_dataset.jsonl")
    (tmp_path / "data" / "a.png").unlink()
    again = loaded(tmp_path / "val_dataset.jsonl")
    assert list(again) == list(rows)
    assert [e.digest for e in again.examples] == [e.digest for e in rows.examples]
    found = [encoded(image) for image in images_in(again.examples[0].messages)]
    assert found == [vlms.image(0), vlms.image(1)]


def test_evaluation_rows_are_loaded_where_training_rows_are_streamed(ten):
    assert numbers(prompts("train.jsonl", streaming=True, val_dataset=[str(ten)], split="val")) == list(range(10))


# ---- reasoning_gym


def test_procedural_rows_carry_what_the_scorer_needs_through_json():
    rows = prompts("reasoning_gym:leg_counting#5?seed=3&max_animals=4")
    assert len(rows) == 5
    for row in json.loads(json.dumps(list(rows))):
        assert set(row) == {"messages", "answer", "metadata"}
        right, wrong = ReasoningGym()([row["answer"], "no idea"], [row["answer"]] * 2, [row["metadata"]] * 2)
        assert right == 1.0
        assert wrong < 1.0


def test_procedural_defaults_are_500_rows_of_the_data_seed():
    assert len(prompts("reasoning_gym:chain_sum")) == 500
    small = "reasoning_gym:chain_sum#4"
    assert list(prompts(small)) == list(prompts(f"{small}?seed=42"))
    assert list(prompts(small, data_seed=1)) == list(prompts(f"{small}?seed=1"))
    assert list(prompts(small)) != list(prompts(f"{small}?seed=1"))
    assert list(prompts(small))[:2] == list(prompts("reasoning_gym:chain_sum#2"))


def test_procedural_evaluation_with_the_training_seed_is_noted():
    rows = prompts("reasoning_gym:chain_sum#2", val_dataset=["reasoning_gym:chain_sum#2"], split="val")
    assert any("?seed=" in line for line in rows.report.lines())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("chainsum", "unknown reasoning_gym task 'chainsum'; nearest: chain_sum"),
        ("chain_sum?min_term=2", "chain_sum has no setting 'min_term'; nearest: min_terms"),
        ("chain_sum?size=5", "written #n"),
        ("chain_sum?seed=x", "seed 'x' is not a whole number"),
        ("chain_sum?min_terms=0", "chain_sum refuses its settings: min_terms must be positive"),
        ("composite", "composite refuses its settings"),
    ],
)
def test_wrong_procedural_settings(spec, says):
    (line,) = problems_of(prompts, f"reasoning_gym:{spec}")
    assert says in line


# ---- --system


def test_system_is_text_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("From a file.\n")
    Path("plain").write_text("No suffix.")
    assert resolve_system("mine.txt") == ("From a file.", [])
    assert resolve_system("plain") == ("No suffix.", [])
    assert resolve_system("You are kind.") == ("You are kind.", [])
    assert resolve_system("Read\nnotes.txt") == ("Read\nnotes.txt", [])
    assert resolve_system("word " * 5000)[0].startswith("word word")
    assert resolve_system(None) == resolve_system("  ") == (None, [])


@pytest.mark.parametrize(
    "value", ["examples/train/grpo/prompt.txt", "prompt.txt", "/old/ms/examples/train/grpo/prompt.txt"]
)
def test_a_missing_system_file_is_found_among_the_shipped_examples(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    text, notes = resolve_system(value)
    assert "<think>" in text
    assert "<answer>" in text
    assert len(notes) == 1
    assert value in notes[0]


def test_system_files_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("bytes.txt").write_bytes(b"\xff\xfe\xff")
    for value, says in [
        ("emtpy.md", "no such file, nor among the shipped examples"),
        ("examples/train/prompt.txt", "no such file, nor among"),
        ("empty.txt", "is empty"),
        ("bytes.txt", "not UTF-8"),
    ]:
        with pytest.raises(ConfigError, match=says):
            resolve_system(value)


ABOUT = [
    {"query": "{{NAME}}?", "response": "{{NAME}} of {{AUTHOR}}", "tag": "zh"},
    {"messages": None, "query": "q", "response": "by {{AUTHOR}}", "tag": "en"},
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (["小黄", "Huang"], ["小黄 of A", "by A"]),
        (["One"], ["One of A", "by A"]),
        (["{{NAME}}"], ["{{NAME}} of A", "by A"]),
    ],
)
def test_rows_about_the_model_get_its_names(tmp_path, streaming, names, texts):
    args = settings(jsonl(tmp_path / "about.jsonl", ABOUT), model_name=names, model_author=["A"], dataset_shuffle=False)
    if streaming:
        stream = ExampleStream(args, lambda row: row, purpose="chat")
        found = [stream.next(), stream.next()]
    else:
        found = load_rows(args, "train", purpose="chat").examples
    assert [row.messages[-1]["content"] for row in found] == texts
    assert found[0].messages[0]["content"] == f"{names[0]}?"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"model_name": ["N"]}, "--model_author: missing: {{AUTHOR}} stands in "),
        ({"model_author": ["A"]}, "--model_name: missing: {{NAME}} stands in "),
    ],
)
def test_a_placeholder_without_a_name_is_refused(tmp_path, given, line):
    with pytest.raises(ConfigError) as caught:
        load_rows(settings(jsonl(tmp_path / "about.jsonl", ABOUT), **given), "train", purpose="chat")
    assert str(caught.value).startswith(line) and "about.jsonl:1" in str(caught.value)


def test_a_name_that_no_row_has_a_place_for_is_noted(tmp_path):
    rows = jsonl(tmp_path / "about.jsonl", ABOUT)
    named = load_rows(settings(rows, model_name=["N"], model_author=["A"]), "train", purpose="chat")
    assert not named.report.notes
    other = settings(jsonl(tmp_path / "other.jsonl", [{"query": "q", "response": "r"}]), model_name=["N"])
    assert load_rows(other, "train", purpose="chat").report.notes == [
        "note: --model_name: no effect, for no row has {{NAME}}"
    ]
