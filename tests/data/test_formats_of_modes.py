"""A chat in any of its formats is the same prompt and answer for every mode."""

import json

import pytest
from row_files import jsonl, settings

from swift.data.loading import load_rows

TURNS = [
    {"role": "user", "content": "a\nb"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]
ANSWER = {"role": "assistant", "content": "e"}
ROLES = {"user": "human", "assistant": "gpt"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
FORMATS = {
    "messages": ({"messages": [*TURNS, ANSWER]}, TURNS),
    "messages and tools": ({"messages": [*TURNS, ANSWER], "tools": json.dumps(TOOLS)}, TURNS),
    "sharegpt": (
        {"conversations": [{"from": ROLES[one["role"]], "value": one["content"]} for one in [*TURNS, ANSWER]]}, TURNS
    ),
    "query, response, history": ({"query": "d", "response": "e", "history": [["a\nb", "c"]]}, TURNS),
    "instruction, input, output": ({"instruction": "a", "input": "b", "output": "e"}, TURNS[:1]),
    "prompt, completion": ({"prompt": TURNS, "completion": "e"}, TURNS),
    "prompt, completion as turns": ({"prompt": TURNS, "completion": [ANSWER]}, TURNS),
}  # fmt: skip
ONLY_PROMPT = ("response", "output", "completion")
"""Columns that are no part of a prompt."""


def read(tmp_path, row, purpose):
    (example,) = load_rows(settings(jsonl(tmp_path / "rows.jsonl", [row])), "train", purpose=purpose).examples
    return example


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("purpose", ["prompt", "chat", "judged", "label", "pair", "steps"])
def test_a_format_means_the_same_in_every_mode(tmp_path, name, purpose):
    row, prompt = FORMATS[name]
    more = {
        "label": {"label": True},
        "pair": {"rejected_response": "f"},
        "steps": {"completions": ["e"], "labels": [True]},
    }
    if purpose == "steps":
        row = {column: value for column, value in row.items() if column not in ONLY_PROMPT}
    example = read(tmp_path, {**row, **more.get(purpose, {})}, purpose)
    wanted = [*prompt, ANSWER] if purpose in ("chat", "judged") else prompt
    assert [{key: turn[key] for key in ("role", "content")} for turn in example.messages] == wanted
    if "tools" in row:
        assert example.columns["tools"] == TOOLS
