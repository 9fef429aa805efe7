"""Rows of plain text, as `swift pt` and `swift sft` read them."""

import base64

import pytest
import vlms
from row_files import jsonl, settings

from swift.data.images import digest_of
from swift.data.loading import load_rows
from swift.errors import ConfigError


@pytest.fixture
def rows(tmp_path):
    def load(*values, purpose="text", images=False, **changes):
        args = settings(jsonl(tmp_path / "rows.jsonl", values), **changes)
        return load_rows(args, "train", purpose=purpose, images=images)

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


PICTURE = vlms.image(0, 8, 8)
URL = "data:;base64," + base64.b64encode(PICTURE).decode()
SHOWN = {"type": "image", "image": digest_of(PICTURE)}


@pytest.mark.parametrize(
    ("row", "purpose"),
    [
        ({"text": "a\n<image>b", "images": [URL]}, "text"),
        ({"text": "a\n<image>b", "images": [URL]}, "chat"),
        ({**assistant("a", "<image>b"), "images": [URL]}, "text"),
        (assistant("a", [{"type": "image", "image": URL}, {"type": "text", "text": "b"}]), "text"),
    ],
    ids=["text", "text in sft", "tags", "parts"],
)
def test_images_stand_in_a_document_where_the_row_has_them(rows, row, purpose):
    (found,) = rows(row, purpose=purpose, images=True).examples
    content = [{"type": "text", "text": "a\n"}, SHOWN, {"type": "text", "text": "b"}]
    assert found.messages == [{"role": "assistant", "content": content}]


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
        (assistant([{"type": "text", "text": " "}], " "), {"images": True}, "messages is empty"),
        ({"text": "a"}, {"split": "train"}, "--split: train: no --dataset is one of a hub"),
    ],
)
def test_what_is_no_document_earns_one_line(rows, row, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        rows(row, **changes)
