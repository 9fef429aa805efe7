"""The formula for the age of a token, and that whole runs keep to it: reached, and never exceeded."""

import math
from types import SimpleNamespace

import pytest
from scripted_engine import ScriptedEngine
from small_runs import SmallRun

from swift.rollout.arithmetic import deepest_prefetch, most_stale
from swift.trainers.grpo.prepare import _prefetch_depth


@pytest.mark.parametrize(
    ("depth", "updates", "interval", "age"),
    [(0, 1, 1, 0), (1, 1, 1, 1), (2, 1, 1, 2), (0, 4, 1, 3), (1, 2, 5, 7), (0, 1, 5, 4), (3, 2, 4, 10)],
)
def test_the_bound_by_hand(depth, updates, interval, age):
    assert most_stale(depth, updates=updates, interval=interval) == age


def test_max_staleness_lowers_the_depth_as_far_as_needed_and_no_further():
    deep = {limit: deepest_prefetch(4, updates=2, interval=3, max_staleness=limit) for limit in range(13)}
    assert deep == {
        0: None, 1: None, 2: None, 3: 0, 4: 0, 5: 1, 6: 1, 7: 2, 8: 2, 9: 3, 10: 3, 11: 4, 12: 4,
    }  # fmt: skip
    assert deepest_prefetch(4, updates=2, interval=3, max_staleness=None) == 4


@pytest.mark.parametrize(
    ("source", "limit", "age"), [("engine", None, 1), ("atropos", None, math.inf), ("atropos", 7, math.inf)]
)
def test_groups_of_environments_may_be_of_any_age(source, limit, age):
    """They wait at the API for as long as they like; `--max_staleness` only holds new ones back."""
    args = SimpleNamespace(
        rollout_source=source, max_staleness=limit, async_generate=True, prefetch_depth=1, dynamic_sample=False,
        replay_buffer_size=0, vllm_mode="server", vllm_sync_interval=1,
    )  # fmt: skip
    assert _prefetch_depth(args, SimpleNamespace(updates_per_rollout=1)) == (1, age)


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("updates", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_run_reaches_the_bound_and_never_exceeds_it(depth, updates, interval):
    windows, iterations = updates
    limit = most_stale(depth, updates=windows * iterations, interval=interval)
    run = SmallRun(ScriptedEngine(), depth=depth, windows=windows, iterations=iterations, interval=interval)
    try:
        run.train(31 * windows * iterations)
    finally:
        run.close()
    ages = [step.staleness["off_policy/max"] for step in run.steps]
    assert max(ages) == oldest_possible(depth, windows * iterations, interval) <= limit
    assert all(step.staleness["off_policy/mean"] <= step.staleness["off_policy/max"] for step in run.steps)


@pytest.mark.parametrize(("depth", "updates", "interval"), [(0, 1, 5), (1, 1, 1), (2, 1, 1), (1, 2, 5), (3, 2, 3)])
def test_the_bound_is_tight(depth, updates, interval):
    assert oldest_possible(depth, updates, interval) == most_stale(depth, updates=updates, interval=interval)


def oldest_possible(depth, updates, interval):
    """The oldest token of a long run, counted out.

    Asked for at the start of a batch with the weights of the last publication, trained on `depth` batches later. With
    rounds on their way weights change at the start of a batch only, otherwise after every step.
    """
    oldest, last = 0, 0
    for step in range(0, 400 * updates, updates):
        if depth == 0:
            for done in range(step - updates + 1, step + 1):
                last = done if done - last >= interval else last
        elif step - last >= interval:
            last = step
        oldest = max(oldest, step - last + depth * updates + updates - 1)
    return oldest
