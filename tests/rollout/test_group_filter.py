import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.rollout.dynamic_sampling import GroupFilter, InformativeRate


def play(admission, informative, order=min):
    """Launch what is due and judge one group at a time; `order` picks which of those in flight ends next."""
    flying, launched = set(), 0
    while not admission.complete:
        for _ in range(admission.due()):
            admission.launch(launched)
            flying.add(launched)
            launched += 1
        index = order(sorted(flying))
        flying.remove(index)
        admission.judge(index, informative=informative(index))
    return admission.selection()


def pattern(*flags):
    return lambda index: bool(flags[index])


def test_replacements_are_launched_until_four_groups_teach():
    admission = GroupFilter(quota=4)
    outcome = play(admission, pattern(1, 0, 1, 0, 0, 1, 1, 1))
    assert (outcome.trained, outcome.carried, admission.launched) == ((0, 2, 5, 6), (), 7)
    assert outcome.dropped == (1, 3, 4)


def test_launching_ahead_trains_the_same_groups_and_carries_the_surplus():
    admission = GroupFilter(quota=4, rate=0.5, margin=0)
    assert admission.due() == 8
    outcome = play(admission, pattern(1, 0, 1, 0, 0, 1, 1, 1))
    assert (outcome.trained, outcome.carried, admission.launched) == ((0, 2, 5, 6), (7,), 8)


def test_more_is_launched_than_is_needed_on_average():
    assert GroupFilter(quota=16, rate=0.5).due() == 41  # 32 and 1.5 standard deviations of 5.66
    assert GroupFilter(quota=16, rate=1.0).due() == 16
    assert GroupFilter(quota=16, carried=16, rate=0.5).due() == 0
    assert GroupFilter(quota=16, rate=0.5, max_resample_times=1).due() == 32, "never beyond the budget"


def test_a_spent_budget_is_filled_with_groups_without_signal_in_launch_order():
    admission = GroupFilter(quota=4, max_resample_times=3)
    outcome = play(admission, lambda index: False, order=max)
    assert (admission.launched, outcome.filled, outcome.trained) == (16, (0, 1, 2, 3), ())
    assert admission.budget_exhausted and len(outcome.dropped) == 12


def test_carried_groups_count_towards_the_quota_and_not_towards_the_budget():
    admission = GroupFilter(quota=4, carried=3, max_resample_times=0)
    outcome = play(admission, lambda index: index == 3)
    assert admission.launched == 4 and outcome.trained == (3,)


def test_a_batch_of_carried_groups_launches_nothing():
    admission = GroupFilter(quota=4, carried=4)
    assert admission.complete and admission.selection().trained == ()


def test_without_resampling_the_last_group_is_still_tested():
    outcome = play(GroupFilter(quota=2, max_resample_times=0), pattern(1, 0))
    assert (outcome.trained, outcome.filled) == ((0,), (1,))


@pytest.mark.parametrize("carried", [-1, 5])
def test_more_carried_groups_than_the_quota_are_a_defect(carried):
    with pytest.raises(ValueError, match="carried"):
        GroupFilter(quota=4, carried=carried)


def test_judging_twice_or_launching_twice_is_a_defect():
    admission = GroupFilter(quota=2)
    admission.launch(0)
    with pytest.raises(ValueError, match="twice"):
        admission.launch(0)
    admission.judge(0, informative=True)
    with pytest.raises(ValueError, match="in flight"):
        admission.judge(0, informative=True)
    with pytest.raises(ValueError, match="not ended"):
        admission.selection()


def test_the_rate_follows_the_informative_share_within_its_bounds():
    rate = InformativeRate()
    assert rate.clipped == 1.0
    rate = rate.updated(0, 10)
    assert rate.value == pytest.approx(0.8)
    for _ in range(20):
        rate = rate.updated(0, 10)
    assert rate.clipped == 0.5 and rate.updated(0, 0) == rate


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
def test_every_launch_ends_once_and_bounds_hold(batch, flags):
    quota, carried, times, rate, random = batch
    carried = min(carried, quota)
    admission = GroupFilter(quota=quota, carried=carried, max_resample_times=times, rate=rate)
    outcome = play(admission, lambda index: flags[index], order=random.choice)
    parts = [*outcome.trained, *outcome.filled, *outcome.carried, *outcome.dropped]
    assert sorted(parts) == list(range(admission.launched))
    assert admission.launched <= quota * (1 + times)
    assert len(outcome.carried) <= quota + 2 * quota**0.5
    assert all(flags[index] for index in (*outcome.trained, *outcome.carried))
    assert not any(flags[index] for index in (*outcome.filled, *outcome.dropped))
    assert max(outcome.trained, default=-1) < min(outcome.carried, default=80)
    assert carried + len(outcome.trained) + len(outcome.filled) == quota
