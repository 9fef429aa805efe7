"""What `--dataset` may say."""

import pytest
from refusals import problems_of

from swift.data.hub import choose_split
from swift.data.spec import DatasetSpec, parse_spec, parse_specs
from swift.errors import ConfigError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"query": "q"}\n')
    return tmp_path


def problem(text, **kwargs):
    (line,) = problems_of(parse_spec, text, **kwargs)
    return line


@pytest.mark.parametrize(
    ("text", "hub", "target", "subsets", "count"),
    [
        ("AI-MO/NuminaMath-TIR#5000", "ms", "AI-MO/NuminaMath-TIR", (), 5000),
        ("hf::openai/gsm8k:main", "hf", "openai/gsm8k", ("main",), None),
        ("ms::org/name:a/b#7", "ms", "org/name", ("a", "b"), 7),
        ("squad", "ms", "squad", (), None),
    ],
)
def test_hub_ids(here, text, hub, target, subsets, count):
    spec = parse_spec(text)
    assert (spec.kind, spec.hub, spec.target, spec.subsets, spec.count) == ("hub", hub, target, subsets, count)


def test_use_hf_decides_only_where_no_prefix_does(here):
    assert parse_spec("org/name", use_hf=True).hub == "hf"
    assert parse_spec("ms::org/name", use_hf=True).hub == "ms"


def test_local_file_with_a_count(here):
    spec = parse_spec("data/train.jsonl#3")
    assert (spec.kind, spec.target, spec.count, spec.name) == ("local", "data/train.jsonl", 3, "data/train.jsonl")


@pytest.mark.parametrize("name", ["a#5", "b:c", "d#x.jsonl", "reasoning_gym:leg_counting"])
def test_an_existing_path_wins_over_the_grammar(here, name):
    (here / name).write_text("")
    spec = parse_spec(name)
    assert (spec.kind, spec.target, spec.count, spec.subsets) == ("local", name, None, ())


def test_an_existing_path_with_a_hash_may_have_a_count_too(here):
    (here / "a#5.jsonl").write_text("")
    spec = parse_spec("a#5.jsonl#9")
    assert (spec.target, spec.count) == ("a#5.jsonl", 9)


def test_subsets_of_a_folder_are_its_folders(here):
    for part in ("one", "two"):
        (here / "set" / part).mkdir(parents=True)
    assert parse_spec("set:one/two#4").subsets == ("one", "two")
    assert "nearest: set/two" in problem("set:twoo")
    assert "is a file and has no subsets" in problem("data/train.jsonl:one")


@pytest.mark.parametrize("text", ["x#abc", "x#", "x#0", "x#-1", "x#1.5", "data/train.jsonl#many", "hf::a/b#²"])
def test_a_bad_count_is_named(here, text):
    assert "bad row count" in problem(text)
    assert text in problem(text)


def test_a_missing_file_names_the_nearest_in_its_folder(here):
    assert problem("data/trian.jsonl") == (
        "--dataset: data/trian.jsonl: no such file or folder; nearest: data/train.jsonl"
    )


def test_a_missing_folder_names_the_nearest_folder(here):
    assert "the folder dta does not exist; nearest: data" in problem("dta/train.jsonl")


def test_a_path_is_never_looked_up_on_a_hub(here):
    for text in ("./nothing", "/nothing", "a/b/c", "x.csv", "some words"):
        assert "no such file or folder" in problem(text)


def test_all_problems_are_listed_together(here):
    lines = problems_of(parse_specs, ["x#abc", "data/train.jsonl", "y.csv", ""], flag="--val_dataset")
    assert [line.split(": ")[:2] for line in lines] == [["--val_dataset", name] for name in ("x#abc", "y.csv", "''")]


def test_procedural_options(here):
    spec = parse_spec('reasoning_gym:chain_sum#12?seed=7&min_terms=3&operators=["+"]&level=easy')
    assert (spec.kind, spec.target, spec.count) == ("procedural", "chain_sum", 12)
    assert spec.options == {"seed": 7, "min_terms": 3, "operators": ["+"], "level": "easy"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reasoning_gym:", "no task named"),
        ("reasoning_gym:chain_sum?seed", "not key=value"),
        ("reasoning_gym:chain_sum?seed=1&seed=2", "given twice"),
        ("reasoning_gym:chain_sum#x", "bad row count"),
    ],
)
def test_bad_procedural_specs(here, text, says):
    assert says in problem(text)


def test_the_split_of_a_hub_dataset():
    spec = DatasetSpec("x", "hub", "x")
    assert choose_split(["test", "train"], "train", spec) == "train"
    assert choose_split(["train", "test", "validation"], "val", spec) == "validation"
    assert choose_split(["train"], "val", spec) == "train"
    assert choose_split(["only"], "train", spec) == "only"
    with pytest.raises(ConfigError, match="no train split; the dataset has a, b; choose one: --split a"):
        choose_split(["a", "b"], "train", spec)
