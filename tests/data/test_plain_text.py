"""Rows of plain text, as `swift pt` and `swift sft` read them."""

import pytest
from row_files import jsonl, settings

from swift.data.loading import load_rows
from swift.errors import ConfigError


@pytest.fixture
def rows(tmp_path):
    def load(*values, purpose="text", **changes):
        return load_rows(settings(jsonl(tmp_path / "rows.jsonl", values), **changes), "train", purpose=purpose)

    return load


def assistant(*texts):
    return {"messages": [{"role": "assistant", "content": text} for text in texts]}


@pytest.mark.parametrize(
    ("row", "purpose", "line", "text"),
    [
        ({"text": "a b", "source": "s"}, "text", "text <- text; other columns: source", "a b"),
        ({"text": "a b", "completions": 1}, "chat", "text <- text; other columns: completions", "a b"),
        ({"text": "a b", "history": "h"}, "text", "text <- text; other columns: history", "a b"),
        (assistant("a"), "text", "text <- messages; other columns: none", "a"),
        (assistant("a", "b"), "text", "text <- messages; other columns: none", "a\nb"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "text", "text <- conversations; other columns: none", "a"),
    ],
)
def test_a_document_is_one_assistant_turn(rows, row, purpose, line, text):
    found = rows(row, purpose=purpose)
    assert found.report.lines() == [line]
    assert found.examples[0].messages == [{"role": "assistant", "content": text}]
    assert not found.examples[0].is_chat


def test_text_beside_a_prompt_is_a_column_like_others(rows):
    found = rows({"query": "q", "response": "r", "text": "t"}, purpose="chat")
    assert found.report.lines() == ["prompt <- query; response <- response; other columns: text"]


@pytest.mark.parametrize(
    ("row", "changes", "problem"),
    [
        ({"content": "a"}, {}, r"none is text, .*--columns '{\"content\": \"text\"}'"),
        ({"text": "a"}, {"system": "s"}, "plain text has no system prompt; leave --system out"),
        ({"text": "a", "system": "s"}, {}, "text has a system turn"),
        ({"text": 3}, {}, "text must be text, not int"),
        ({"text": " "}, {}, "text is empty"),
        ({"messages": [{"role": "user", "content": "q"}]}, {}, "messages has a user turn; .*use swift sft"),
        ({"text": "a"}, {"split": "train"}, "--split: train: no --dataset is one of a hub"),
    ],
)
def test_what_is_no_document_earns_one_line(rows, row, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        rows(row, **changes)
