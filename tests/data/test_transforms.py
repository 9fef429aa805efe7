"""Transforms of `--dataset_transform`: what becomes of a row, and which rows are refused."""

from typing import get_args, get_type_hints

import pytest
from row_files import jsonl, settings

from swift.arguments.ebft import EBFTArguments
from swift.arguments.ebft_strided import StridedArguments
from swift.arguments.sft import SFTArguments
from swift.data.loading import load_rows
from swift.data.prompts import Tokenizer
from swift.data.records import BadRow, RawRow
from swift.data.source import StreamingPrompts
from swift.data.transforms import DOCUMENTS, PROMPTS, transformed
from swift.errors import ConfigError
from swift.trainers.ebft.turns import remaining_turns


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CHAT = [
    turn("system", "s"),
    turn("user", "q1"),
    turn("assistant", "<think>t1</think> a1"),
    turn("user", "q2"),
    turn("assistant", "<think>t2</think>\na2"),
    turn("user", "bye"),
]
SPLIT = turn("assistant", "a1", reasoning_content="t1")
EXPECTED = {
    "alpaca": [
        {"messages": [turn("system", "s"), turn("user", "task", input="4"), turn("assistant", "program")]},
    ],
    "opencode": [{"messages": [turn("user", "task")], "ground_truth": "program"}],
    "chat_multiturn": [{"messages": CHAT[:2], "ground_truth": CHAT[2]["content"], "remaining_turns": CHAT[3:5]}],
    "chat_multiturn_last": [{"messages": CHAT[:4], "ground_truth": CHAT[4]["content"]}],
    "chat_multiturn_all": [
        {"messages": CHAT[:2], "ground_truth": CHAT[2]["content"]},
        {"messages": CHAT[:4], "ground_truth": CHAT[4]["content"]},
    ],
    "reasoning": [{"messages": CHAT[:4], "ground_truth": CHAT[4]["content"]}],
    "reasoning_split_thinking": [
        {"messages": [*CHAT[:2], SPLIT, CHAT[3]], "ground_truth": "<think>\nt2\n</think>\n\na2"}
    ],
    "reasoning_answer_only": [{"messages": CHAT[:4], "ground_truth": "a2"}],
    "strided": [{"messages": CHAT}],
    "strided_text": [{"text": "prose"}],
    "strided_structured": [{"prompt": "task", "completion": "program"}],
    "strided_chat": [{"messages": CHAT}],
    "strided_reasoning": [{"messages": [*CHAT[:2], CHAT[2] | {"loss": False}, *CHAT[3:5]]}],
}


def row(name):
    texts = {"opencode": ("input", "output"), "strided_structured": ("question", "answer")}
    if name == "alpaca":
        return {"instruction": "task", "input": "4", "output": "program", "system": "s", "other": 1}
    if name in texts:
        return dict(zip(texts[name], ("task", "program"), strict=True)) | {"other": 1}
    return {"text": "prose"} if name == "strided_text" else {"messages": CHAT, "other": 1}


def made(name, values, renames=None):
    return list(transformed([RawRow(values, "f:1")], name, renames or {}))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_becomes_what_its_transform_says_and_keeps_nothing_else(name):
    assert [record.values for record in made(name, row(name))] == EXPECTED[name]


def test_every_transform_has_its_choice_of_the_flag():
    assert EXPECTED.keys() == {*PROMPTS, *DOCUMENTS, "alpaca"}
    assert "alpaca" in get_args(get_args(get_type_hints(SFTArguments)["dataset_transform"])[0])
    assert set(get_args(get_type_hints(StridedArguments)["dataset_transform"])) == DOCUMENTS.keys()
    structured, none = get_args(get_type_hints(EBFTArguments)["dataset_transform"])
    assert set(get_args(structured)) == PROMPTS.keys() and none is type(None)


@pytest.mark.parametrize(
    "name", sorted(EXPECTED.keys() - {"alpaca", "strided_text", "strided_structured", "opencode", "strided"})
)
def test_a_chat_without_an_assistant_turn_is_refused(name):
    (bad,) = made(name, {"messages": [turn("user", "q")]})
    assert isinstance(bad, BadRow) and bad.reason == "no assistant turn"


@pytest.mark.parametrize("chat", [CHAT, CHAT[:3], CHAT[:4], CHAT[:5]])
def test_further_turns_are_those_that_samples_can_answer(chat):
    """A chat may end with the user."""
    (found,) = made("chat_multiturn", {"messages": chat})
    assert remaining_turns(found.values) == CHAT[3 : min(len(chat), 5)] * (len(chat) > 4)
    (bad,) = made("chat_multiturn", {"messages": [*CHAT[:3], *CHAT[2:]]})
    assert isinstance(bad, BadRow) and bad.reason == "two assistant turns in a row"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"text": "prose", "messages": None}, {"text": "prose"}),
        ({"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "c"}),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
         {"messages": [turn("user", "q"), turn("assistant", "a")]}),
    ],
)  # fmt: skip
def test_strided_goes_by_the_columns(values, expected):
    assert made("strided", values)[0].values == expected


def test_other_tags_of_thoughts_are_known():
    chat = [turn("user", "q"), turn("assistant", "<reasoning>t</reasoning>a")]
    (found,) = made("reasoning_answer_only", {"messages": chat})
    assert found.values["ground_truth"] == "a"


def test_a_thought_that_the_prompt_has_opened_is_one():
    chat = [turn("user", "q"), turn("assistant", "t</think>a")]
    (found,) = made("reasoning_answer_only", {"messages": chat})
    assert found.values["ground_truth"] == "a"
    (found,) = made("reasoning_split_thinking", {"messages": chat})
    assert found.values["ground_truth"] == "<think>\nt\n</think>\n\na"


def load(tmp_path, rows, name, **changes):
    args = settings(jsonl(tmp_path / "rows.jsonl", rows), **changes)
    args.dataset_transform = name
    return load_rows(args, "train", purpose="prompt")


def test_prompts_of_a_transform_are_read_like_any_others_and_bad_rows_counted(tmp_path):
    rows = [{"chat": CHAT}, {"chat": [turn("user", "q")]}, {"chat": CHAT}]
    found = load(tmp_path, rows, "chat_multiturn_all", columns={"chat": "messages"}, max_skipped_fraction=0.5)
    assert len(found) == 4 and found.report.num_skipped == 1
    assert "no assistant turn" in found.report.first_bad[0]
    first = found.examples[0]
    assert first.messages == CHAT[:2] and first.columns == {"ground_truth": CHAT[2]["content"]}


def test_a_transform_that_fits_no_row_and_a_wrong_name_of_a_column_stop_the_run(tmp_path):
    with pytest.raises(ConfigError, match="no usable row among 1"):
        load(tmp_path, [{"text": "x"}], "opencode")
    with pytest.raises(ConfigError, match="--columns"):
        load(tmp_path, [{"messages": CHAT}], "reasoning", columns={"chatt": "messages"})


def test_a_stream_is_transformed_as_it_is_read(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"input": f"q{i}", "output": f"a{i}"} for i in range(3)])
    args = settings(path, streaming=True, dataset_shuffle=False)
    args.dataset_transform = "opencode"
    prompts = StreamingPrompts(args, Tokenizer(lambda messages: [1]))
    assert [prompts.next().columns for _ in range(3)] == [{"ground_truth": f"a{i}"} for i in range(3)]
