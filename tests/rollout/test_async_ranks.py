"""Two training processes with rounds ahead: what fails on one ends both alike, soon, and with the same line."""

import json
from pathlib import Path

import pytest
import rank_of_small_runs
from preloaded import run_ranks
from rank_of_small_runs import STEPS
from small_runs import NumberedPrompts, OneRank

pytestmark = pytest.mark.slow

LIMIT_S = 240
SOON_S = 10
"""A failure that does not reach a rank leaves it in a collective for a minute."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Scenario -> what happened on rank 0 and on rank 1."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("rank_of_small_runs.py")
    run_ranks([script, folder, "{rank}"], folder, limit_s=LIMIT_S)
    both = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    return {name: [one[name] for one in both] for name in both[0]}


@pytest.mark.parametrize("scenario", rank_of_small_runs.SUCCESSFUL)
def test_two_ranks_sample_and_train_what_one_does(ranks, scenario):
    single = scenario(0, OneRank()).train(STEPS)
    single.close()
    expected = [[step.step, step.tokens, step.value] for step in single.steps]
    for rank in ranks[scenario.__name__]:
        assert rank["error"] is None, rank["line"]
        assert rank["steps"] == expected
        assert {name: rank[name] for name in ("replayed", "again", "ages", "mixed")} == rank_of_small_runs.story(single)


def test_on_two_ranks_groups_are_replayed_and_prompts_tried_again(ranks):
    assert ranks["replaying"][0]["replayed"] > 0 == ranks["shared"][0]["replayed"]
    first_epoch = len(NumberedPrompts().prompts)
    assert min(ranks["trying_again"][0]["again"]) < first_epoch <= min(ranks["shared"][0]["again"])


def test_an_interval_and_a_depth_bound_the_age_on_two_ranks(ranks):
    depth, interval, updates = 2, 3, 2
    for rank in ranks["every_third_step"]:
        assert interval - 1 < max(rank["ages"]) <= depth * updates + interval - 1 + updates - 1


def test_weights_change_in_flight_on_two_ranks_and_both_train_on_the_same_tokens(ranks):
    first, second = ranks["in_flight"]
    assert first["error"] is second["error"] is None, first["line"] + second["line"]
    assert first["steps"] == second["steps"] and len(first["steps"]) == STEPS
    assert first["mixed"] == second["mixed"] > 0, "no completion saw two versions"
    assert max(first["ages"]) <= 2


@pytest.mark.parametrize(
    ("scenario", "error", "line", "steps"),
    [
        ("owner_dies", "EngineDead", "it died, as it was told to", 2),
        ("other_dies", "EngineDead", "it died, as it was told to", 2),
        ("other_dies_at_once", "EngineDead", "it died, as it was told to", 0),
        ("other_breaks_down", "EngineError", "TiedDown: tied to this process", None),
        ("rewards_break", "RewardError", "failed on every sample", 3),
        ("update_lost_twice", "SyncFailed", "lost on the way, as told", 2),
        ("owner_cannot_pause", "EngineDead", "does not answer", 1),
    ],
)
def test_a_failure_on_one_rank_ends_both(ranks, scenario, error, line, steps):
    first, second = ranks[scenario]
    for rank in (first, second):
        assert rank["error"] == error and line in rank["line"]
        assert rank["seconds"] < SOON_S
        assert not rank["thread_left"]
        assert len(rank["steps"]) == (len(first["steps"]) if steps is None else steps)
    assert first["line"] == second["line"]


def test_an_update_that_is_lost_on_one_rank_is_repeated_on_an_engine_made_anew(ranks):
    healthy, repaired = ranks["update_lost_once"]
    assert healthy["error"] is repaired["error"] is None
    assert "rebuild" in repaired["events"] and "rebuild" not in healthy["events"]
    assert [rank["steps"] for rank in (healthy, repaired)] == [rank["steps"] for rank in ranks["shared"]]
