import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.rollout.dynamic_sampling import GroupFilter, updated_rate


def play(batch, informative, order=min):
    """Launch what is due and score one group at a time; `order` picks which of those in flight ends next."""
    flying, launched = set(), 0
    while not batch.complete:
        for _ in range(batch.due()):
            batch.launch(launched)
            flying.add(launched)
            launched += 1
        index = order(sorted(flying))
        flying.remove(index)
        batch.scored(index, informative=informative(index))
    return batch.selection()


def pattern(*flags):
    return lambda index: bool(flags[index])


def test_replacements_are_launched_until_four_groups_teach():
    batch = GroupFilter(quota=4)
    outcome = play(batch, pattern(1, 0, 1, 0, 0, 1, 1, 1))
    assert (outcome.trained, outcome.carried, batch.launched) == ((0, 2, 5, 6), (), 7)
    assert outcome.dropped == (1, 3, 4)


def test_launching_ahead_trains_the_same_groups_and_carries_the_surplus():
    batch = GroupFilter(quota=4, rate=0.5)
    assert batch.due() == 12, "8 and 1.5 deviations, but at most three times the quota"
    outcome = play(batch, pattern(1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1))
    assert (outcome.trained, outcome.carried, batch.launched) == ((0, 2, 5, 6), (7, 11), 12)


def test_more_is_launched_than_is_needed_on_average():
    assert GroupFilter(quota=16, rate=0.5).due() == 41  # 32 and 1.5 standard deviations of 5.66
    assert GroupFilter(quota=16, rate=1.0).due() == 16
    assert GroupFilter(quota=16, carried=16, rate=0.5).due() == 0
    assert GroupFilter(quota=16, rate=0.5, max_resample_times=1).due() == 32, "never beyond the budget"


def test_a_spent_budget_is_filled_with_groups_without_signal_in_launch_order():
    batch = GroupFilter(quota=4, max_resample_times=3)
    outcome = play(batch, lambda index: False, order=max)
    assert (batch.launched, outcome.filled, outcome.trained) == (16, (0, 1, 2, 3), ())
    assert batch.budget_exhausted and len(outcome.dropped) == 12


def test_carried_groups_count_towards_the_quota_and_not_towards_the_budget():
    batch = GroupFilter(quota=4, carried=3, max_resample_times=0)
    outcome = play(batch, lambda index: index == 3)
    assert batch.launched == 4 and outcome.trained == (3,)


def test_without_resampling_the_last_group_is_still_tested():
    outcome = play(GroupFilter(quota=2, max_resample_times=0), pattern(1, 0))
    assert (outcome.trained, outcome.filled) == ((0,), (1,))


def test_the_rate_follows_the_informative_share_within_its_bounds():
    rate = updated_rate(1.0, 0, 10)
    assert rate == pytest.approx(0.8) and updated_rate(rate, 0, 0) == rate
    for _ in range(20):
        rate = updated_rate(rate, 0, 10)
    assert GroupFilter(quota=16, rate=rate).due() == GroupFilter(quota=16, rate=0.5).due()


batches = st.tuples(
    st.integers(1, 12), st.integers(0, 12), st.integers(0, 4), st.floats(0.3, 1.0), st.randoms(use_true_random=False)
)


@given(batches, st.lists(st.booleans(), min_size=80, max_size=80))
def test_the_outcome_does_not_depend_on_the_order_of_completion(batch, flags):
    quota, carried, times, rate, random = batch
    settings = {"quota": quota, "carried": min(carried, quota), "max_resample_times": times, "rate": rate}
    reference = GroupFilter(**settings)
    expected = play(reference, lambda index: flags[index])
    shuffled = GroupFilter(**settings)
    assert play(shuffled, lambda index: flags[index], order=random.choice) == expected
    assert shuffled.launched == reference.launched


@given(batches, st.lists(st.booleans(), min_size=80, max_size=80))
def test_every_launch_ends_once_and_bounds_hold(settings, flags):
    quota, carried, times, rate, random = settings
    carried = min(carried, quota)
    batch = GroupFilter(quota=quota, carried=carried, max_resample_times=times, rate=rate)
    outcome = play(batch, lambda index: flags[index], order=random.choice)
    parts = [*outcome.trained, *outcome.filled, *outcome.carried, *outcome.dropped]
    assert sorted(parts) == list(range(batch.launched))
    assert batch.launched <= quota * (1 + times)
    assert len(outcome.carried) <= quota + 2 * quota**0.5
    assert all(flags[index] for index in (*outcome.trained, *outcome.carried))
    assert not any(flags[index] for index in (*outcome.filled, *outcome.dropped))
    assert max(outcome.trained, default=-1) < min(outcome.carried, default=80)
    assert carried + len(outcome.trained) + len(outcome.filled) == quota
