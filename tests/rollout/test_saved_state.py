"""What checkpoints hold of prompts, groups and rounds: exact, plain data only, and no code."""

import datetime
import decimal
import math

import msgspec
import numpy as np
import pytest
from trap import trap

from swift.errors import ConfigError
from swift.observability.completions_log import completion_rows
from swift.rollout import mailbox
from swift.rollout.round_result import RoundResult, ScoredRound
from swift.rollout.samples import TrainSample
from swift.rollout.saved_state import FORMAT, decode, encode, for_logs, require_plain
from swift.trainers.checkpoint import STATE, read_state, write_state
from swift.types import Completion, GroupScores, Prompt, RolloutGroup

COLUMNS = [
    {"solution": "1/3", "level": 3, "weight": 0.1, "tags": ["a", None], "deep": {"x": [True]}},
    {"when": datetime.date(2026, 11, 21), "at": datetime.datetime(2026, 11, 21, 3, 4, 5, 6)},
    {"zone": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "noon": datetime.time(12)},
    {"took": datetime.timedelta(3, 4, 5)},
    {"raw": b"\x00\xff", "price": decimal.Decimal("1.10"), "large": 2**70},
    {"pair": (1, (2, [3]))},
    {"by number": {1: "one", (2, 3): "two"}},
    {"lone surrogate": "\ud800"},
    {"@": ["tuple", [1]], "also": {"@": ["no tag", 1]}},
]  # fmt: skip


def through(value, kind):
    """A saved value after its way through the files."""
    return decode(encode(value), kind)


@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_come_back_as_they_were(columns):
    prompt = Prompt("id", [{"role": "user", "content": "?"}], [1, 2], columns)
    require_plain(prompt)
    again = through(prompt, Prompt)
    assert again == prompt
    assert [type(value) for value in again.columns.values()] == [type(value) for value in columns.values()]


def test_arrays_and_numbers_that_are_no_json_come_back_as_they_were():
    columns = {
        "grid": np.arange(6, dtype=np.int16).reshape(2, 3),
        "one": np.float32(0.1),
        "nan": math.nan,
        "inf": math.inf,
    }
    again = through(Prompt("id", [], [1], columns), Prompt).columns
    assert again["grid"].dtype == np.int16 and np.array_equal(again["grid"], columns["grid"])
    assert again["one"] == columns["one"] and again["one"].dtype == np.float32
    assert math.isnan(again["nan"]) and again["inf"] == math.inf


class Tool:
    """What a data set may hold that is no data."""


@pytest.mark.parametrize("value", [Tool(), Tool, {1, 2}, [1, {"deep": object()}]])
def test_a_column_that_is_no_plain_data_is_refused_by_name(value):
    with pytest.raises(ConfigError, match="column 'tool' of prompt id: a value of type"):
        require_plain(Prompt("id", [], [1], {"fine": 1, "tool": value}))


def test_groups_come_back_with_their_completions_and_scores():
    completion = Completion("p-0/0", [5], [-0.1234567890123], "stop", "five", [(2, 0, 1)], {"tries": 2})
    faulty = Completion("p-0/1", [5, 6], [math.nan, -0.5], "error")
    group = RolloutGroup(
        "p-0", 7, 0, Prompt("p", [], [1], {}), [completion, faulty], GroupScores([[1.0, None], [0.1, 2.0]], [None, "e"])
    )
    again = through(group, RolloutGroup)
    assert math.isnan(again.completions[1].logprobs.pop(0)) and faulty.logprobs.pop(0)
    assert again == group
    sent = mailbox.decode(encode(mailbox.Sampled(3, 1, 0, completion, True)))
    assert (sent.index, sent.engine, sent.sample, sent.last) == (3, 1, 0, True) and sent.completion == completion


def test_samples_come_back_to_the_last_bit():
    sample = TrainSample(
        0, np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.int32), np.array([-0.1], dtype=np.float32),
        np.array([True]), 0.1, [(0, 0, 1)], old_logprobs=np.array([-0.3], dtype=np.float32),
        token_advantages=np.array([0.1], dtype=np.float32),
    )  # fmt: skip
    again = through(sample, TrainSample)
    for name in ("prompt_ids", "token_ids", "sampler_logprobs", "trained", "old_logprobs", "token_advantages"):
        ours, theirs = getattr(again, name), getattr(sample, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name
    assert again.ref_logprobs is None and again.versions == [(0, 0, 1)] and again.advantage == 0.1


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
    result = RoundResult([], {"rewards/f/mean": math.nan}, dropped=[for_logs(group)], launched=1, num_dropped=1)
    again = through(result, RoundResult)

    def rows(groups):
        scored = ScoredRound("train", 3, groups, [0.0, None], [0.0, None], [None, None], 9, {}, [False, False])
        return completion_rows(scored, attempt=1, reward_names=["f", "g"])

    assert rows(again.dropped) == rows([group])
    assert (again.launched, again.num_dropped) == (1, 1)
    assert math.isnan(again.metrics["rewards/f/mean"])
    assert [for_logs(one) for one in again.dropped] == again.dropped


def test_the_tokens_of_dropped_groups_are_not_saved_and_cannot_be_taken_for_tokens():
    saved = RoundResult([], {}, dropped=[for_logs(dropped_group(5000))])
    assert len(encode(saved)) < 1000 + 2 * 5000, "a byte for each token"
    for completion in through(saved, RoundResult).dropped[0].completions:
        assert set(completion.token_ids) == {-1} and completion.logprobs == []


def test_a_pickle_in_a_checkpoint_is_not_executed(tmp_path):
    pickled = trap(tmp_path / "owned")
    prompt = Prompt("p", [], [1], {"solution": {"pickled": pickled}})
    write_state(tmp_path, prompt)
    assert read_state(tmp_path, Prompt).columns == {"solution": {"pickled": pickled}}
    forged = msgspec.msgpack.encode(Prompt("p", [], [1], {"solution": {"@": ["pickle", pickled]}}))
    with pytest.raises(ValueError, match="pickle"):
        decode(forged, Prompt)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "content",
    [
        encode([FORMAT, {"scheduler": {}, "unit": None, "ahead": []}]),
        encode([FORMAT + 1, Prompt("p", [], [1])]),
        encode([FORMAT, {"prompt_id": 3}]),
        encode([FORMAT, {"prompt_id": "p", "messages": [], "token_ids": ["<i8", b""], "columns": {}}]),
        encode([]),
        b'{"format": 2, "state": {}}',
        None,
    ],
)
def test_the_state_of_another_version_is_refused_in_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / STATE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"--resume_from_checkpoint: .*written by another version of swift") as caught:
        read_state(tmp_path, Prompt)
    assert len(caught.value.problems) == 1
