import datetime
import json

import pytest

from swift.observability.completions_log import completion_rows
from swift.rollout.collect import RoundResult
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


def dropped_group(tokens):
    long = list(range(tokens))
    completions = [
        Completion(f"p-0/{n}", long, [-0.1234567890123] * tokens, "length", f"text {n}", [(2, 0, 3), (3, 3, tokens)])
        for n in range(2)
    ]
    prompt = Prompt("p", [{"role": "user", "content": "?"}], [1, 2, 3], {"pair": (1, 2)})
    return RolloutGroup("p-0", 7, 0, prompt, completions, GroupScores([[0.0, None], [0.0, 1.5]], [None, "timeout: f"]))


def test_dropped_groups_are_logged_after_a_resume_as_before():
    group = dropped_group(5)
    result = RoundResult([], {}, dropped=[group], launched=1, num_dropped=1)
    again = RoundResult.from_json(json.loads(json.dumps(result.to_json())))
    settings = {
        "attempt": 1, "step": 3, "split": "train", "weight_version": 9, "reward_names": ["f", "g"],
        "rewards": [0.0, None], "advantages": [0.0, None], "used": [False, False],
    }  # fmt: skip
    assert completion_rows(again.dropped, **settings) == completion_rows([group], **settings)
    assert (again.launched, again.num_dropped) == (1, 1)
    twice = RoundResult.from_json(json.loads(json.dumps(again.to_json())))
    assert twice.dropped == again.dropped


def test_the_tokens_of_dropped_groups_are_not_saved_and_cannot_be_taken_for_tokens():
    state = RoundResult([], {}, dropped=[dropped_group(5000)]).to_json()
    assert len(json.dumps(state)) < 1000
    for completion in RoundResult.from_json(state).dropped[0].completions:
        assert set(completion.token_ids) == {-1} and completion.logprobs == []
