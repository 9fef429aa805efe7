"""The tables of the reward specification, number by number."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest

import swift.plugin
import swift.plugin.orm
import swift.rewards
import swift.rewards.orm
from swift.errors import ConfigError
from swift.rewards.functions import accuracy as scoring
from swift.rewards.functions.text import answer_block, last_boxed, normalise
from swift.rewards.orm import (
    CosineReward,
    Format,
    FormatStrict,
    MathAccuracy,
    ReActFormat,
    ReasoningGym,
    RepetitionPenalty,
    SoftOverlong,
)


def test_both_vocabularies_give_the_same_objects():
    for name in ("ORM", "AsyncORM", "orms"):
        assert getattr(swift.plugin, name) is getattr(swift.rewards, name)
    for name in ("MathAccuracy", "Format", "CosineReward", "RepetitionPenalty", "SoftOverlong"):
        assert getattr(swift.plugin.orm, name) is getattr(swift.rewards.orm, name)


@pytest.mark.parametrize(
    ("solution", "completion", "score"),
    [
        ("42", r"\boxed{42}", 1),
        ("42", "<answer>42</answer>", 1),
        ("42", "42", 0),
        ("42", "$42$", 0),
        ("42", "The answer is 42.", 0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        ("42", r"\boxed{41} \boxed{42}", 0),
        ("42", "<answer>42</answer> x <answer>7</answer>", 0),
        ("7", "<answer>42</answer> x <answer>7</answer>", 1),
        ("7", "<answer>42</answer> x <answer>7</answer> y <answer>8", 1),
        ("<answer>6</answer>, no: <answer>7</answer>", "<answer>7</answer>", 1),
        (r"\boxed{42}", r"\boxed{42", 0),
        ("C", r"\boxed{C}", 1),
        ("C", "<answer>c.</answer>", 1),
        ("(1,2)", r"\boxed{(1, 2)}", 1),
        ("", r"\boxed{42}", 0),
        (None, "", 0),
        ("42", r"\boxed{9^{9^{9^{9}}}}", 0),
        ("<think>6*7</think><answer>42</answer>", r"\boxed{42}", 1),
        (42, r"\boxed{42}", 1),
        ("Paris", "it is Paris", 0),
        ("Paris", r"\boxed{\text{paris}}", 1),
    ],
)
def test_accuracy(solution, completion, score):
    assert MathAccuracy()([completion], [solution]) == [float(score)]


def test_accuracy_counts_ground_truths_without_a_parse_and_without_text():
    accuracy = MathAccuracy()
    accuracy(["a", "b", "c", "d"], ["42", "Paris", "", None])
    assert accuracy.counters == {"gold_unparsed": 1, "gold_missing": 2}


@pytest.mark.parametrize(
    ("solution", "completion", "answer"),
    [
        ("42", r"so \boxed{41}", "41"),
        ("42", "<answer> 7 </answer>", "7"),
        ("42", "The answer is 42.", None),
        ("Paris", "it is <answer>Rome</answer>", "Rome"),
        ("Paris", "it is Rome", None),
        ("", r"\boxed{41}", None),
    ],
)
def test_accuracy_keeps_what_it_has_read(solution, completion, answer):
    accuracy, cosine = MathAccuracy(), CosineReward()
    accuracy([completion], [solution])
    cosine([completion], [solution])
    assert accuracy.extracted == cosine.extracted == [answer]


@pytest.mark.parametrize(
    "tower", [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{9^{99999999}}", r"\boxed{10^{10^{10}}+1}", r"\boxed{99999999!}"]
)
def test_astronomic_powers_are_scored_at_once(tower):
    accuracy = MathAccuracy()
    began = time.monotonic()
    assert accuracy([tower], ["42"]) == [0.0]
    assert time.monotonic() - began < 5


def test_large_but_ordinary_powers_are_still_compared():
    assert MathAccuracy()([r"\boxed{1024}", r"\boxed{2^{11}}"], ["2^{10}".join("$$")] * 2) == [1.0, 0.0]


def test_correctness_is_computed_once_for_accuracy_and_cosine(monkeypatch):
    calls = []
    original = scoring._equivalent
    monkeypatch.setattr(scoring, "_equivalent", lambda *args: calls.append(args) or original(*args))
    texts, gold = [rf"\boxed{{{1000 + index}}}" for index in range(4)], ["1001"] * 4
    assert MathAccuracy()(texts, gold) == [0.0, 1.0, 0.0, 0.0]
    CosineReward(max_completion_length=100)(texts, gold)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        ("<think>a</think>\n \n<answer>b</answer> \n", 1, 1),
        ("<think>a\nb</think><answer>c\nd</answer>", 1, 1),
        ("<think></think><answer></answer>", 1, 0),
        ("<think> </think><answer>1</answer>", 1, 0),
        ("<think>a<think>b</think><answer>c</answer>", 1, 0),
        ("<think>a</think><answer>b<answer>c</answer>", 1, 0),
        (" <think>a</think><answer>b</answer>", 0, 0),
        ("so <think>a</think><answer>b</answer>", 0, 0),
        ("<think>a</think> and <answer>b</answer>", 0, 0),
        ("<think>a</think><answer>b</answer> done", 0, 0),
        ("<think>a</think><answer>b", 0, 0),
        ("<answer>b</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_format_and_its_strict_form(text, loose, strict):
    assert Format()([text]) == [float(loose)]
    assert FormatStrict()([text]) == [float(strict)]


def test_an_opening_tag_written_by_the_prompt_counts():
    text = "a</think><answer>b</answer>"
    for function in (Format(), FormatStrict()):
        assert function([text, text], prompt_opens_think=[True, False]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think>\nAction: search\nAction Input: {}", 1),
        ("<think>a</think>Action:Action Input:", 1),
        ("<think>a</think> Action: search", 0),
        ("Action: search Action Input: x", 0),
        (" <think>a</think> Action: x Action Input: y", 0),
    ],
)
def test_react_format(text, score):
    assert ReActFormat()([text]) == [float(score)]


CALL = 'Action: search\nAction Input: {"city": "Ulm", "days": 2}'


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ('<think>a</think> Action: search Action Input: {"days": 2, "city": "Ulm"}', CALL, 1),
        (f"{CALL}\nObservation:", f"thought {CALL}", 1),
        ('Action: search Action Input: {"city": "Ulm"}', CALL, 0),
        ('Action: find Action Input: {"city": "Ulm", "days": 2}', CALL, 0),
        ("Action: search Action Input: Ulm", CALL, 0),
        ("Action: say Action Input: Ulm", "Action: say Action Input: Ulm ", 1),
        ("no call", CALL, 0),
        ("no call", "none is needed", 1),
    ],
)
def test_toolbench(text, truth, score):
    assert swift.rewards.orms["toolbench"]()([text], [truth]) == [float(score)]


LENGTHS = [0, 25, 50, 75, 100, 200]


def of_lengths(*counts):
    return [list(range(count)) for count in counts]


@pytest.mark.parametrize(
    ("answer", "values"),
    [("1", [1.0, 0.9268, 0.75, 0.5732, 0.5, 0.5]), ("2", [-0.5, -0.4268, -0.25, -0.0732, 0, 0])],
)
def test_cosine_of_a_right_and_of_a_wrong_answer(answer, values):
    for cosine in (CosineReward(max_completion_length=100), CosineReward(cosine_max_len=100)):
        found = cosine([rf"\boxed{{{answer}}}"] * 6, ["1"] * 6, of_lengths(*LENGTHS))
        assert found == pytest.approx(values, abs=5e-5)


def test_soft_overlong():
    found = SoftOverlong(soft_max_length=100, soft_cache_length=20)([""] * 9, of_lengths(*LENGTHS, 80, 85, 90))
    assert found == [0, 0, 0, 0, -1, -1, 0, -0.25, -0.5]


def test_soft_overlong_takes_the_longest_completion_as_default_and_words_without_tokens():
    assert SoftOverlong(soft_cache_length=2, max_completion_length=4)(["a b c", "a"]) == [-0.5, 0.0]


@pytest.mark.parametrize("cache", [None, 0, 100, 101, -5])
def test_soft_overlong_refuses_an_impossible_ramp_and_shows_both_values(cache):
    with pytest.raises(ConfigError, match=rf"{str(cache).lower()}.*100"):
        SoftOverlong(soft_max_length=100, soft_cache_length=cache)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a b c a b c", -0.25),
        ("la la la la la la", -0.75),
        ("A a A a A a", -0.75),
        ("a b", 0.0),
        ("", 0.0),
        ("好好好好好好", -0.75),
        ("はい はい", -0.0),
    ],
)
def test_repetition(text, value):
    assert RepetitionPenalty()([text]) == [pytest.approx(value)]


def test_repetition_counts_chinese_characters_as_words_beside_latin_ones():
    from swift.rewards.functions.repetition import words

    assert words("Hello 世界abc ok") == ["hello", "世", "界", "abc", "ok"]


def test_repetition_parameters():
    assert RepetitionPenalty(repetition_n_grams=1, repetition_max_penalty=-2.0)(["a a a a"]) == [-1.5]


def test_reasoning_gym_uses_the_scorer_of_the_rows_task():
    import reasoning_gym

    row = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    gold = row["answer"]
    texts = [f"<think>hm</think><answer> {gold} </answer>", f" {gold}\n", "<answer>no</answer>"]
    scores = ReasoningGym()(texts, [gold] * 3, [row["metadata"]] * 3)
    assert scores[:2] == [1.0, 1.0]
    assert scores[2] < 0.5


@pytest.mark.parametrize("task", ["rearc", "arc_agi"])
def test_reasoning_gym_pays_in_full_for_the_right_answer_of_a_row_that_was_json(task):
    import reasoning_gym

    row = json.loads(json.dumps(reasoning_gym.create_dataset(task, size=1, seed=3)[0]))
    texts = [f"<answer>{row['answer']}</answer>", "<answer>0 0\n0 0</answer>"]
    assert ReasoningGym()(texts, [row["answer"]] * 2, [row["metadata"]] * 2) == [1.0, 0.05]


def test_reasoning_gym_does_not_apply_to_other_rows():
    assert ReasoningGym()(["1", "1", "1"], ["1"] * 3, [None, {}, "no json"]) == [None, None, None]


def test_answers_are_found_in_texts():
    assert answer_block("<answer>1</answer><answer>2</answer><answer>3") == "2"
    assert answer_block("<answer>1 <answer>2</answer>") == "2"
    assert answer_block("<answer>1") is None
    assert last_boxed(r"\boxed{1} \boxed{\frac{1}{2}} \boxed{3") == r"\frac{1}{2}"
    assert last_boxed("nothing") is None


@pytest.mark.parametrize(
    "text", ["Paris", " pa ris. ", r"\boxed{Paris}", r"$\text{Paris}$.", r"\(paris\)", r"\[ PARIS \]", "Ｐａｒｉｓ"]
)
def test_string_forms_of_one_answer_are_equal(text):
    assert normalise(text) == "paris"


def test_normalising_keeps_what_only_looks_enclosed():
    assert normalise(r"\text{a} or \text{b}") == r"\text{a}or\text{b}"
    assert normalise("$1$ and $2$") == "$1$and$2$"


def test_scores_are_remembered_without_their_texts():
    texts = [f"{number:032768d} is <answer>{number:032768d}</answer>" for number in range(300)]
    tracemalloc.start()
    try:
        assert not any(scoring.grade(f"{text} ", "Paris")[0] for text in texts)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20  # of 20 MB
    finally:
        tracemalloc.stop()
