import math

import pytest
import torch
from grouped_rewards import group_advantages
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.rl.advantages import STD_EPSILON, compute_advantages, reward_matrix, total_rewards

GROUP_OF_FOUR_TWICE = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def close(actual, expected, digits=6):
    assert [round(value, digits) + 0.0 for value in actual.tolist()] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "scale", "first", "others"),
    [
        ("grpo", None, 1.499700, -0.499900),
        ("grpo", "group", 1.499700, -0.499900),
        ("grpo", "batch", 1.448858, -0.482953),
        ("grpo", "population", 1.732051, -0.577350),
        ("grpo", "none", 0.75, -0.25),
        ("rloo", None, 1.0, -0.333333),
        ("reinforce_plus_plus", None, 2.290588, -0.763529),
    ],
)
def test_one_success_in_four_beside_a_group_of_successes(estimator, scale, first, others):
    rewards_PG = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]])
    advantages_PG = group_advantages(rewards_PG, estimator=estimator, scale=scale)
    close(advantages_PG[0], [first, others, others, others])
    assert advantages_PG[1].tolist() == [0.0] * 4


def test_a_function_that_does_not_apply_is_left_out_of_the_sum_and_a_row_without_any_is_excluded():
    values_SK = reward_matrix([(1, None), (0, 2), (None, None), (0, 0)])
    weights_K = torch.tensor([1.0, 0.5])
    assert total_rewards(values_SK, weights_K).tolist() == pytest.approx([1, 1, math.nan, 0], nan_ok=True)
    result = compute_advantages(values_SK, torch.zeros(4, dtype=torch.long), weights_K=weights_K)
    close(result.advantages_S, [0.577250, 0.577250, 0.0, -1.154501])
    assert result.rewards_S.isnan().tolist() == [False, False, True, False]


def test_without_reward_functions_all_rewards_and_advantages_are_0():
    result = compute_advantages(reward_matrix([[], [], []]), torch.tensor([0, 0, 1]))
    assert result.rewards_S.tolist() == result.advantages_S.tolist() == [0.0] * 3
    assert not result.informative_P.any()


def test_gdpo_of_two_functions():
    values_SK = torch.tensor([(1, 0), (0, 0), (1, 0.5), (0, 0.5), (1, 1), (1, 0), (1, 0), (1, 1)])
    result = compute_advantages(values_SK, GROUP_OF_FOUR_TWICE, scale="gdpo")
    expected = [0.000132, -1.527346, 1.527346, -0.000132, 0.763739, -0.763739, -0.763739, 0.763739]
    close(result.advantages_S, expected)
    assert result.informative_P.tolist() == [True, True]


def test_gdpo_learns_from_a_group_whose_sums_are_equal():
    values_SK = torch.tensor([(1.0, 0.0), (0.0, 1.0)])
    index_S = torch.tensor([0, 0])
    assert not compute_advantages(values_SK, index_S).informative_P.item()
    assert compute_advantages(values_SK, index_S, scale="gdpo").informative_P.item()
    weights_K = torch.tensor([0.0, 0.0])
    assert not compute_advantages(values_SK, index_S, scale="gdpo", weights_K=weights_K).informative_P.item()


@pytest.mark.parametrize("scale", ["group", "batch", "none", "gdpo"])
def test_equal_fp32_rewards_teach_exactly_nothing(scale):
    rewards_S = torch.tensor([0.3] * 6 + [0.0, 1.0], dtype=torch.float32)
    rewards_S[:6] += torch.tensor([0, 1, -1, 0, 1, 0]) * 3e-8  # what fp32 makes of equal sums
    index_S = torch.tensor([0] * 6 + [1, 1])
    result = compute_advantages(rewards_S.unsqueeze(1), index_S, scale=scale)
    assert result.advantages_S[:6].tolist() == [0.0] * 6
    assert result.informative_P.tolist() == [False, True]


def test_the_spread_of_a_group_is_measured_against_its_largest_reward():
    assert group_advantages(torch.tensor([[1e7, 1e7 + 1]], dtype=torch.float64)).tolist() == [[0.0, 0.0]]
    assert group_advantages(torch.tensor([[1e5, 1e5 + 1]], dtype=torch.float64))[0, 1] > 0.7


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_the_only_scored_sample_of_a_group_learns_nothing(estimator):
    rewards_PG = torch.tensor([[3.0, math.nan], [1.0, 0.0]])
    advantages_PG = group_advantages(rewards_PG, estimator=estimator)
    assert advantages_PG[0].tolist() == [0.0, 0.0]
    assert advantages_PG[1, 0] > 0 > advantages_PG[1, 1]


def test_an_excluded_sample_is_out_of_every_mean_and_standard_deviation():
    values_SK = torch.tensor([[1.0], [0.0], [2.0], [1000.0]])
    excluded_S = torch.tensor([False, False, False, True])
    for scale in ("group", "batch", "none", "gdpo"):
        with_fault = compute_advantages(values_SK, torch.zeros(4, dtype=torch.long), excluded_S=excluded_S, scale=scale)
        without = compute_advantages(values_SK[:3], torch.zeros(3, dtype=torch.long), scale=scale)
        assert with_fault.advantages_S.tolist() == [*without.advantages_S.tolist(), 0.0]
        assert math.isnan(with_fault.rewards_S[3])


def test_a_batch_of_excluded_samples_gives_zeros():
    values_SK = torch.full((4, 2), math.nan)
    for scale in ("group", "batch", "none", "gdpo"):
        result = compute_advantages(values_SK, torch.tensor([0, 0, 1, 1]), scale=scale)
        assert result.advantages_S.tolist() == [0.0] * 4
        assert result.rewards_S.isnan().all() and result.std_P.tolist() == [0.0, 0.0]


def test_a_kl_penalty_lowers_the_reward_before_the_group_is_centred():
    values_SK = torch.tensor([[1.0], [1.0]])
    result = compute_advantages(
        values_SK, torch.tensor([0, 0]), estimator="rloo", kl_penalty_S=torch.tensor([0.5, 0.0])
    )
    assert result.rewards_S.tolist() == [0.5, 1.0]
    assert result.advantages_S.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "gae"}, "gae: unknown"),
        ({"scale": "std"}, "std: unknown"),
        ({"scale": "gdpo", "estimator": "rloo"}, "needs advantage_estimator grpo"),
        ({"scale": "gdpo", "kl_penalty_S": torch.zeros(2)}, "kl_in_reward false"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(torch.zeros(2, 1), torch.tensor([0, 0]), **settings)


@st.composite
def batches(draw):
    """Rewards in quarters (exact in float64) of up to four groups of unequal size, some excluded."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    index = [group for group, size in enumerate(sizes) for _ in range(size)]
    quarters = st.one_of(st.none(), st.integers(-8, 8).map(lambda value: value / 4))
    values = draw(st.lists(st.tuples(quarters, quarters), min_size=len(index), max_size=len(index)))
    return reward_matrix(values), torch.tensor(index)


SETTINGS = st.sampled_from(
    [
        ("grpo", "group"),
        ("grpo", "batch"),
        ("grpo", "none"),
        ("grpo", "gdpo"),
        ("rloo", "none"),
        ("reinforce_plus_plus", "batch"),
    ]
)


@settings(deadline=None)
@given(batches(), SETTINGS, st.integers(-40, 40))
def test_adding_a_constant_to_a_reward_function_of_a_group_changes_nothing(batch, settings, quarters):
    values_SK, index_S = batch
    values_SK = values_SK[:, :1] if settings[1] != "gdpo" else values_SK
    estimator, scale = settings
    if (estimator, scale) == ("grpo", "batch"):  # its standard deviation spans the groups: shift all of them
        shift_S = torch.full(index_S.shape, quarters / 4, dtype=torch.float64)
    else:
        shift_S = torch.where(index_S == 0, quarters / 4, 0.0).double()
    before = compute_advantages(values_SK, index_S, estimator=estimator, scale=scale)
    after = compute_advantages(values_SK + shift_S.unsqueeze(1), index_S, estimator=estimator, scale=scale)
    torch.testing.assert_close(after.advantages_S, before.advantages_S, rtol=0, atol=1e-10)


@settings(deadline=None)
@given(batches(), SETTINGS, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(batch, settings, random):
    values_SK, index_S = batch
    order = list(range(len(index_S)))
    random.shuffle(order)
    estimator, scale = settings
    expected = compute_advantages(values_SK, index_S, estimator=estimator, scale=scale)
    actual = compute_advantages(values_SK[order], index_S[order], estimator=estimator, scale=scale)
    torch.testing.assert_close(actual.advantages_S, expected.advantages_S[order], rtol=0, atol=1e-10)


@settings(deadline=None)
@given(batches(), SETTINGS)
def test_advantages_are_finite_and_each_group_of_a_group_baseline_sums_to_zero(batch, settings):
    values_SK, index_S = batch
    estimator, scale = settings
    result = compute_advantages(values_SK, index_S, estimator=estimator, scale=scale)
    assert result.advantages_S.isfinite().all()
    if scale != "gdpo":
        sums_P = torch.zeros(len(result.std_P), dtype=torch.float64).index_add(0, index_S, result.advantages_S)
        assert sums_P.abs().max() < 1e-9


@st.composite
def rewards(draw):
    """[P, G] in eighths, exact in float64."""
    size, groups = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    eighths = draw(st.lists(st.integers(-16, 16), min_size=size * groups, max_size=size * groups))
    return torch.tensor(eighths, dtype=torch.float64).view(groups, size) / 8


@settings(deadline=None)
@given(rewards())
def test_rloo_is_the_distance_to_the_mean_of_the_others_and_the_centred_reward_stretched(rewards_PG):
    size = rewards_PG.shape[1]
    rloo = group_advantages(rewards_PG, estimator="rloo")
    centred = group_advantages(rewards_PG, scale="none")
    torch.testing.assert_close(rloo, centred * size / (size - 1), rtol=0, atol=1e-12)
    others = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (size - 1)
    torch.testing.assert_close(rloo, rewards_PG - others, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(rewards(), st.sampled_from(["group", "batch"]))
def test_scaled_advantages_do_not_know_the_unit_of_the_reward(rewards_PG, scale):
    """Exactly so but for the epsilon beside the standard deviation, whose share is known."""
    plain, doubled = group_advantages(rewards_PG, scale=scale), group_advantages(2 * rewards_PG, scale=scale)
    std = rewards_PG.std(1, keepdim=True) if scale == "group" else rewards_PG.std()
    torch.testing.assert_close(doubled * (2 * std + STD_EPSILON), 2 * plain * (std + STD_EPSILON), rtol=0, atol=1e-10)
