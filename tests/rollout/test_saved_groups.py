import datetime
import json

import pytest

from swift.rollout.saved_groups import group_from_json, group_to_json, prompt_from_json, prompt_to_json
from swift.types import Completion, GroupScores, Prompt, RolloutGroup

COLUMNS = [
    {"solution": "1/3", "level": 3, "weight": 0.1, "tags": ["a", None], "deep": {"x": [True]}},
    {"when": datetime.date(2026, 11, 21)},
    {"raw": b"\x00\xff"},
    {"pair": (1, 2)},
    {"by number": {1: "one"}},
    {"lone surrogate": "\ud800"},
    {"pickled": "not a pickle"},
]


@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_come_back_as_they_were(columns):
    prompt = Prompt("id", [{"role": "user", "content": "?"}], [1, 2], columns)
    saved = json.loads(json.dumps(prompt_to_json(prompt)))
    again = prompt_from_json(saved)
    assert again == prompt
    assert [type(value) for value in again.columns.values()] == [type(value) for value in columns.values()]


def test_groups_come_back_with_their_completions_and_scores():
    completion = Completion("p-0/0", [5], [-0.1234567890123], "stop", "five", [(2, 0, 1)])
    group = RolloutGroup("p-0", 7, 0, Prompt("p", [], [1], {}), [completion], GroupScores([[1.0, None]], [None]))
    assert group_from_json(json.loads(json.dumps(group_to_json(group)))) == group
