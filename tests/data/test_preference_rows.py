"""Preference data: which columns are prompt and answers, and what is no usable row."""

import json

import pytest
from refusals import problems_of

from swift.data.loading import PLANS
from swift.data.records import RowError

USER, OTHER = {"role": "user", "content": "q"}, {"role": "user", "content": "more?"}
SYSTEM = {"role": "system", "content": "s"}


def says(text):
    return {"role": "assistant", "content": text}


def plan(columns, purpose="pair", renames=None):
    return PLANS[purpose](list(columns), renames or {}, flag="--dataset", name="d.jsonl")


def read(row, purpose="pair", system=None):
    return plan(row, purpose).read(row, system)


PAIR = ([USER], [says("good")], [[says("bad")]])
FORMATS = {
    "texts": ({"prompt": "q", "chosen": "good", "rejected": "bad"}, PAIR),
    "answers of the prompt's partner": ({"query": "q", "response": "good", "rejected_response": "bad"}, PAIR),
    "chosen_response": ({"query": "q", "chosen_response": "good", "rejected_response": "bad"}, PAIR),
    "a text that begins like a list": (
        {"prompt": "q", "chosen": "[1, 2]", "rejected": "[{"},
        ([USER], [says("[1, 2]")], [[says("[{")]]),
    ),
    "messages": ({"messages": [USER, says("good")], "rejected_response": "bad"}, PAIR),
    "messages and rejected_messages": (
        {"messages": [USER, says("good")], "rejected_messages": [USER, says("bad")]},
        PAIR,
    ),
    "answers as turns": ({"prompt": [USER], "chosen": [says("good")], "rejected": [says("bad")]}, PAIR),
    "turns as JSON text": (
        {"prompt": "q", "chosen": json.dumps([says("good")]), "rejected": json.dumps([says("bad")])},
        PAIR,
    ),
    "whole chats": ({"chosen": [USER, says("good")], "rejected": [USER, says("bad")]}, PAIR),
    "whole chats beside their prompt": (
        {"prompt": "q", "chosen": [USER, says("good")], "rejected": [USER, says("bad")]},
        PAIR,
    ),
    "columns of UltraFeedback": (
        {
            "prompt": "q",
            "chosen": [USER, says("good")],
            "rejected": [USER, says("bad")],
            "messages": [USER, says("good")],
        },
        PAIR,
    ),
    "whole chats of several turns": (
        {
            "chosen": [SYSTEM, USER, says("same"), OTHER, says("good")],
            "rejected": [SYSTEM, USER, says("same"), OTHER, says("bad")],
        },
        ([SYSTEM, USER, says("same"), OTHER], [says("good")], [[says("bad")]]),
    ),
    "answers that go apart early": (
        {
            "messages": [USER, says("good"), OTHER, says("end")],
            "rejected_messages": [USER, says("bad"), OTHER, says("end")],
        },
        ([USER], [says("good"), OTHER, says("end")], [[says("bad"), OTHER, says("end")]]),
    ),
    "texts with an implicit prompt": (
        {"chosen": "Q: 1+1? A: 2", "rejected": "Q: 1+1? A: 3"},
        ([{"role": "user", "content": "Q: 1+1? A: "}], [says("2")], [[says("3")]]),
    ),
    "several rejected": (
        {"prompt": "q", "chosen": "good", "rejected": ["bad", "worse"]},
        ([USER], [says("good")], [[says("bad")], [says("worse")]]),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_of_a_pair_gives_prompt_and_answers(name):
    row, (prompt, chosen, rejected) = FORMATS[name]
    messages, columns = read(row)
    assert (messages, columns["chosen"], columns["rejected"]) == (prompt, chosen, rejected)


def test_the_line_says_what_was_taken_and_other_columns_stay():
    chosen = plan(["messages", "rejected_response", "margin", "source"])
    assert chosen.line == (
        "prompt <- messages; chosen <- final turn of messages; rejected <- rejected_response; "
        "other columns: margin, source"
    )
    row = {"messages": [USER, says("good")], "rejected_response": "bad", "margin": 2, "source": "x"}
    assert {name: chosen.read(row, None)[1][name] for name in ("margin", "source")} == {"margin": 2.0, "source": "x"}


def test_system_of_row_and_flag_come_first_and_tools_go_along():
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", "tools": '[{"type": "function"}]'}
    messages, columns = read(row, system="s")
    assert messages == [SYSTEM, USER] and columns["tools"] == [{"type": "function"}]
    assert read({**row, "system": "own"}, system="s")[0][0]["content"] == "own"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": [USER, says("a")], "label": True}, [USER]),
        ({"prompt": "q", "completion": "a", "label": 1}, [USER]),
        ({"prompt": [USER, says("x"), OTHER], "completion": [says("a")], "label": True}, [USER, says("x"), OTHER]),
    ],
)
def test_a_label_makes_rows_of_single_answers(row, prompt):
    messages, columns = read(row, "label")
    assert (messages, columns["completion"], columns["label"]) == (prompt, [says("a")], True)


def test_pairs_serve_where_labels_do():
    messages, columns = read({"prompt": "q", "chosen": "good", "rejected": "bad"}, "label")
    assert messages == [USER] and columns["rejected"] == [[says("bad")]]


@pytest.mark.parametrize(
    ("row", "purpose", "reason"),
    [
        ({"prompt": "q", "chosen": "same", "rejected": "same"}, "pair", "rejected 1 is the chosen answer"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "pair", "no chosen"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "pair", "no rejected"),
        ({"prompt": "q", "chosen": "a", "rejected": []}, "pair", "no rejected"),
        ({"prompt": "q", "chosen": "a", "rejected": ["b", 3]}, "pair", "rejected must be text, not int"),
        ({"chosen": "a b", "rejected": "c d"}, "pair", "no prompt: chosen and rejected begin with nothing in common"),
        ({"chosen": [USER, says("a")], "rejected": "b"}, "pair", "no prompt before the answers"),
        ({"prompt": "q", "chosen": [says("a"), USER], "rejected": "b"}, "pair", "chosen has no final assistant turn"),
        ({"messages": [USER], "rejected_response": "b"}, "pair", "messages has no final assistant turn"),
        ({"prompt": [USER, says("x")], "chosen": "a", "rejected": "b"}, "pair", "the prompt ends with an assistant"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "big"},
            "pair",
            "margin must be a number, not 'big'",
        ),
        ({"prompt": "q", "completion": "a", "label": "good"}, "label", "label must be true or false, not 'good'"),
        ({"prompt": "q", "completion": "a", "label": None}, "label", "no label"),
    ],
)
def test_a_row_that_is_no_preference_is_refused_with_its_reason(row, purpose, reason):
    with pytest.raises(RowError, match=reason):
        read(row, purpose)


@pytest.mark.parametrize(
    ("columns", "purpose", "fragments"),
    [
        (["prompt", "chosen"], "pair", ["none is a rejected answer", "--columns"]),
        (["prompt", "better", "rejected"], "pair", ["none is the chosen answer", """'{"better": "chosen"}'"""]),
        (["prompt", "chosen", "rejected", "rejected_response"], "pair", ["each could be the rejected answer"]),
        (["text", "rejected", "chosen_response"], "pair", ["none is a prompt"]),
        (["prompt", "completion"], "label", ["none is a rejected answer"]),
    ],
)
def test_columns_that_do_not_fit_are_refused_with_the_line_that_renames(columns, purpose, fragments):
    (line,) = problems_of(plan, columns, purpose)
    assert all(fragment in line for fragment in fragments), line
