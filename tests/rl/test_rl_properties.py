"""What holds for any rewards, log-probs and entropies; the numbers themselves are in the other files."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from grouped_rewards import group_advantages
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from padded_windows import make_window
from whole_objective import Options, run_ours

from swift.rl.advantages import STD_EPSILON
from swift.rl.correction import (
    effective_sample_size,
    mismatch_statistics,
    off_policy_sequence_mask,
    sampler_correction,
    sequence_mismatch,
)
from swift.rl.entropy import top_entropy_threshold
from swift.rl.global_batch import count_batch
from swift.rl.losses import Level, LossConfig, losses
from swift.rl.losses.surrogate import clipped_surrogate
from swift.rl.objective import importance_ratio
from swift.rl.segments import Segments

FEW = settings(deadline=None, max_examples=40)


def numbers(low, high):
    return st.floats(low, high, allow_nan=False, width=32)


def rows_of(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def rewards(draw):
    """[P, G] in eighths, exact in float64."""
    size, groups = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    eighths = draw(st.lists(st.integers(-16, 16), min_size=size * groups, max_size=size * groups))
    return rows_of(eighths).view(groups, size) / 8


@st.composite
def streams(draw):
    """Log-ratios of up to three sequences, some tokens of them not trained, and their packing."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    eta = draw(st.lists(numbers(-3, 3), min_size=sum(lengths), max_size=sum(lengths)))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    index = [number for number, length in enumerate(lengths) for _ in range(length)]
    mask_T = torch.tensor(mask)
    return rows_of(eta) * mask_T, Segments(mask_T, torch.tensor(index), len(lengths))


# --- advantages --------------------------------------------------------------------------------------------------


@FEW
@given(rewards())
def test_rloo_is_the_distance_to_the_mean_of_the_others_and_the_centred_reward_stretched(rewards_PG):
    size = rewards_PG.shape[1]
    rloo = group_advantages(rewards_PG, estimator="rloo")
    centred = group_advantages(rewards_PG, scale="none")
    torch.testing.assert_close(rloo, centred * size / (size - 1), rtol=0, atol=1e-12)
    others = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (size - 1)
    torch.testing.assert_close(rloo, rewards_PG - others, rtol=0, atol=1e-12)


@FEW
@given(rewards(), st.sampled_from(["group", "batch"]))
def test_scaled_advantages_do_not_know_the_unit_of_the_reward(rewards_PG, scale):
    """Exactly so but for the epsilon beside the standard deviation, whose share is known."""
    plain, doubled = group_advantages(rewards_PG, scale=scale), group_advantages(2 * rewards_PG, scale=scale)
    std = rewards_PG.std(1, keepdim=True) if scale == "group" else rewards_PG.std()
    torch.testing.assert_close(doubled * (2 * std + STD_EPSILON), 2 * plain * (std + STD_EPSILON), rtol=0, atol=1e-10)


# --- the correction ----------------------------------------------------------------------------------------------


@FEW
@given(streams(), numbers(1, 5), numbers(0, 1), st.sampled_from(["mean", "sum"]))
def test_truncated_weights_lie_within_the_bounds_and_masked_ones_there_or_at_zero(stream, upper, lower, ratio):
    eta_T, segments = stream

    def weights(mode):
        bounds = {"threshold": upper, "lower": lower, "sequence_ratio": ratio}
        return sampler_correction(eta_T, segments, mode=mode, **bounds)

    for level in ("token", "sequence"):
        truncated = weights(f"{level}_truncate").weights_T
        assert ((truncated >= lower) & (truncated <= upper)).all()
        masked = weights(f"{level}_mask").weights_T
        if level == "sequence":
            ratio_S = sequence_mismatch(eta_T, segments, ratio)
            inside = ((ratio_S >= lower) & (ratio_S <= upper))[segments.index_T]
            unclipped = eta_T.exp() if ratio == "mean" else ratio_S[segments.index_T]
        else:
            unclipped = eta_T.exp()
            inside = (unclipped >= lower) & (unclipped <= upper)
        assert torch.equal(masked, torch.where(inside, unclipped, 0.0)), "0, with no floor afterwards"
        if level == "token" or ratio == "sum":
            assert torch.equal(masked[inside], truncated[inside])


@FEW
@given(streams(), st.sampled_from(["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]))
def test_the_logarithm_of_a_sequence_is_that_of_its_weights(stream, mode):
    eta_T, segments = stream
    for ratio in ("sum", "mean"):
        found = sampler_correction(eta_T, segments, mode=mode, threshold=2.0, sequence_ratio=ratio)
        log_T = found.weights_T.log().clamp(math.log(1e-8), 20)
        one_weight = mode == "sequence_truncate" or (mode, ratio) == ("sequence_mask", "sum")
        for number in range(segments.num):
            own = segments.index_T == number
            expected = log_T[own][0] if one_weight else (log_T * segments.mask_T)[own].sum()
            assert found.log_weight_S[number].item() == pytest.approx(expected.item(), abs=1e-12)


@FEW
@given(streams())
def test_the_effective_sample_size_is_a_share_and_whole_for_equal_weights(stream):
    eta_T, segments = stream
    assume(segments.mask_T.any())

    def share(values_T):
        means, _ = mismatch_statistics(values_T, torch.zeros_like(values_T), segments.mask_T, threshold=2.0)
        return effective_sample_size(*means["mismatch/ratio_mean"].tolist(), float(means["mismatch/ratio_squared"][0]))

    assert 1 / segments.mask_T.sum() - 1e-12 <= share(eta_T) <= 1 + 1e-12
    assert share(torch.full_like(eta_T, 0.7)) == pytest.approx(1.0)


@FEW
@given(streams(), st.lists(numbers(-1, 1), min_size=3, max_size=3), numbers(-2, 2), numbers(0, 2))
def test_a_sequence_mask_never_masks_a_gain_and_masks_less_with_a_wider_bound(stream, advantages, delta, more):
    eta_T, segments = stream
    advantages_T = rows_of(advantages)[segments.index_T]
    policy_T = torch.full_like(eta_T, -2.0)

    def kept(bound):
        return off_policy_sequence_mask(advantages_T, policy_T, policy_T + eta_T, segments, delta=bound)

    assert (kept(delta)[advantages_T >= 0] == 1).all()
    assert (kept(delta + more) >= kept(delta)).all()
    for number in range(segments.num):
        assert kept(delta)[segments.index_T == number].unique().numel() == 1


# --- the objective -----------------------------------------------------------------------------------------------


@FEW
@given(streams())
def test_the_third_level_has_the_value_of_the_second(stream):
    log_ratio_T, segments = stream
    token, sequence, sequence_token = (importance_ratio(log_ratio_T, segments, level) for level in get_args(Level))
    torch.testing.assert_close(sequence_token, sequence, rtol=1e-12, atol=0)
    alone = Segments(segments.mask_T, torch.arange(len(token)), len(token))
    torch.testing.assert_close(importance_ratio(log_ratio_T, alone, "sequence"), token, rtol=1e-12, atol=0)


@FEW
@given(
    st.lists(st.tuples(numbers(0, 9), numbers(-3, 3)), min_size=1), numbers(0, 0.875), numbers(0, 2), numbers(0.125, 3)
)
def test_the_clip_is_pessimistic_and_the_second_cap_bounds_losses_of_negative_advantage(pairs, low, high, above):
    ratio_T, advantages_T = rows_of(pairs).unbind(1)
    clipped = clipped_surrogate(ratio_T, advantages_T, epsilon=low, epsilon_high=high)
    assert (clipped >= -ratio_T * advantages_T).all()
    delta = 1 + high + above
    capped = clipped_surrogate(ratio_T, advantages_T, epsilon=low, epsilon_high=high, delta=delta)
    gain = advantages_T >= 0
    assert torch.equal(capped[gain], clipped[gain])
    assert (capped <= clipped).all() and (capped <= delta * advantages_T.abs() + 1e-12).all()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**20),
    st.lists(st.integers(0, 7), max_size=3),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from(sorted(losses)),
)
def test_ranks_that_share_their_counts_make_the_gradient_of_the_whole_window(seed, filtered, split, batch, name):
    window = make_window(seed, filtered, sequences=8)
    assume(any(window.trained))
    nominal = 1 if name == "bnpo" else 8  # of a rank: only sequences of one rank can share one
    options = Options(LossConfig(loss_type=name, beta=0.05, epsilon_high=1.3 if name == "cispo" else 0.28))
    parts = [window.rows(slice(0, split)), window.rows(slice(split, 8))]
    counts = count_batch(window.trained, nominal)
    ranks = [run_ours(part, options, batch=batch, nominal=nominal, counts=counts) for part in parts]
    whole = run_ours(window, options, batch=8, nominal=nominal)
    torch.testing.assert_close(torch.cat([rank.gradient for rank in ranks]), whole.gradient, rtol=0, atol=1e-12)
    assert sum(rank.loss for rank in ranks) == pytest.approx(whole.loss, rel=0, abs=1e-12)


# --- entropy -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 64), min_size=1, max_size=40), st.integers(1, 999))
def test_the_kept_tokens_are_those_above_the_interpolated_quantile(sixteenths, thousandths):
    """What TRL computes, `torch.quantile`; where the quantile falls on a token itself, that token is kept."""
    entropies, quantile = rows_of(sixteenths) / 16, thousandths / 1000
    rank = (1 - quantile) * (len(entropies) - 1)
    kept = entropies >= top_entropy_threshold(entropies, quantile)
    if abs(rank - round(rank)) > 1e-6:
        assert torch.equal(kept, entropies >= torch.quantile(entropies, 1 - quantile))
    else:
        assert torch.equal(kept, entropies >= entropies.sort().values[round(rank)])
    assert kept.sum() >= math.floor(quantile * (len(entropies) - 1) + 1e-9) + 1
