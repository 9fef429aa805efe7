"""A chat in any of its formats is the same prompt and answer for every mode."""

import csv
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
    "request of NeMo Gym": ({"responses_create_params": {"input": TURNS}, "response": "e"}, TURNS),
    "request as text": ({"responses_create_params": json.dumps({"input": TURNS}), "response": "e"}, TURNS),
    "prompt as text of turns": ({"prompt": json.dumps(TURNS), "completion": json.dumps([ANSWER])}, TURNS),
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


CELLS = {
    "label": ({"query": "q", "response": "true", "label": "TRUE"}, {"label": True}),
    "label as a number": ({"query": "q", "response": "1.0", "label": "0"}, {"label": False}),
    "margin": ({"query": "q", "chosen": "1", "rejected": "[0]", "margin": "0.5"}, {"margin": 0.5}),
    "steps": (
        {"query": "q", "completions": '["a", "b"]', "labels": '[true, "0"]'},
        {"completions": ["a", "b"], "labels": [True, False]},
    ),
    "ground truths": (
        {"query": "1", "solution": "007", "answer": "1.0", "sure": "true", "list": "[1]"},
        {"solution": "007", "answer": "1.0", "sure": "true", "list": "[1]"},
    ),
}  # fmt: skip
"""Cells, and the columns that they become."""
PURPOSES = {"label": "label", "label as a number": "label", "margin": "pair", "steps": "steps"}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_cell_is_what_its_column_needs_and_else_the_text_of_the_file(tmp_path, name, delimiter):
    row, columns = CELLS[name]
    path = tmp_path / ("rows.csv" if delimiter == "," else "rows.tsv")
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, row, delimiter=delimiter)
        table.writeheader()
        table.writerow(row)
    (example,) = load_rows(settings(path), "train", purpose=PURPOSES.get(name, "prompt")).examples
    assert {column: example.columns[column] for column in columns} == columns
