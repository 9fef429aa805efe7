import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.rl.correction import (
    effective_sample_size,
    mismatch_statistics,
    off_policy_sequence_mask,
    sampler_correction,
    sampler_mismatch,
)
from swift.rl.entropy import entropy_bonus, top_entropy_threshold
from swift.rl.segments import Segments

ETA_T = torch.tensor([0.2, -0.3, 1.0, 0.5, -1.2], dtype=torch.float64)
SEGMENTS = Segments(torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1]), 2)
RATIOS = [1.221403, 0.740818, 2.718282, 1.648721, 0.301194]
MEAN_Q, SUM_Q = [1.349859, 0.704688], [2.459603, 0.496585]


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("none", {}, [1.0] * 5),
        ("token_truncate", {}, [*RATIOS[:2], 2.0, *RATIOS[3:]]),
        ("token_mask", {}, [*RATIOS[:2], 0.0, *RATIOS[3:]]),
        ("token_mask", {"lower": 0.5}, [*RATIOS[:2], 0.0, RATIOS[3], 0.0]),
        ("sequence_truncate", {"sequence_ratio": "sum"}, [2.0] * 3 + [SUM_Q[1]] * 2),
        ("sequence_mask", {"sequence_ratio": "sum"}, [0.0] * 3 + [SUM_Q[1]] * 2),
        ("sequence_truncate", {}, [MEAN_Q[0]] * 3 + [MEAN_Q[1]] * 2),
        ("sequence_mask", {}, RATIOS),
        ("sequence_mask", {"lower": 0.8}, [*RATIOS[:3], 0.0, 0.0]),
    ],
)
def test_the_weight_of_each_token(mode, options, expected):
    weights_T = sampler_correction(ETA_T, SEGMENTS, mode=mode, **options).weights_T
    assert [round(value, 6) for value in weights_T.tolist()] == expected


def test_statistics_are_those_of_the_unclamped_ratios():
    means, extremes = mismatch_statistics(ETA_T, torch.zeros(5), SEGMENTS.mask_T, threshold=2.0)
    reduced = {name: (pair[0] / pair[1]).item() for name, pair in means.items()}
    assert round(reduced["mismatch/ratio_mean"], 6) == 1.326084
    assert round(reduced["mismatch/k3"], 6) == 0.286084
    assert reduced["mismatch/clipped_frac"] == 0.2
    ess = effective_sample_size(*means["mismatch/ratio_mean"].tolist(), float(means["mismatch/ratio_squared"][0]))
    assert round(ess, 6) == 0.718417
    assert extremes["mismatch/ratio_max"].item() == pytest.approx(math.e)


def test_statistics_of_no_token_are_empty():
    means, extremes = mismatch_statistics(ETA_T, torch.zeros(5), torch.zeros(5), threshold=2.0)
    assert means["mismatch/ratio_mean"].tolist() == [0.0, 0.0]
    assert {name.rpartition("_")[2]: float(value) for name, value in extremes.items()} == {
        "min": math.inf, "max": -math.inf,
    }  # fmt: skip
    assert effective_sample_size(0.0, 0.0, 0.0) == 0.0


def test_a_token_without_a_sampler_logprob_is_not_corrected():
    sampler_T = torch.tensor([-1.0, float("nan"), float("nan"), -1.0])
    eta_T = sampler_mismatch(torch.tensor([-0.5, -0.5, -0.5, 60.0]), sampler_T, torch.tensor([1, 1, 0, 1]))
    assert eta_T.tolist() == [0.5, 0.0, 0.0, 20.0]


@pytest.mark.parametrize(("delta", "expected"), [(0.4, [1, 1, 1, 0, 0]), (0.5, [1, 1, 1, 1, 1])])
def test_a_sequence_that_drifted_is_masked_when_its_advantage_is_negative(delta, expected):
    policy_T = torch.tensor([-1.0] * 5, dtype=torch.float64)
    sampler_T = policy_T + torch.tensor([-0.4, -0.6, -0.2, 0.4, 0.5], dtype=torch.float64)
    advantages_T = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    keep_T = off_policy_sequence_mask(advantages_T, policy_T, sampler_T, SEGMENTS, delta=delta)
    assert keep_T.tolist() == expected
    one_missing_T = sampler_T.index_fill(0, torch.tensor([4]), float("nan"))
    keep_T = off_policy_sequence_mask(advantages_T, policy_T, one_missing_T, SEGMENTS, delta=0.3)
    assert keep_T.tolist() == [1] * 5  # the mean is .4 / 2: an unscored token is no evidence of drift


@pytest.mark.parametrize(("quantile", "kept"), [(0.5, [0, 1, 1, 1, 0]), (0.2, [0, 1, 0, 0, 0]), (1.0, [1, 1, 1, 1, 1])])
def test_the_share_of_tokens_with_the_highest_entropy(quantile, kept):
    entropies = torch.tensor([0.1, 0.9, 0.4, 0.7, 0.2])
    assert (entropies >= top_entropy_threshold(entropies, quantile)).long().tolist() == kept


def test_the_entropy_bonus_is_a_mean_over_the_global_batch_for_every_cut():
    entropy_T = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    mask_T, keep_T = torch.tensor([1, 1, 0, 1]), torch.tensor([1, 0, 1, 1])
    parts = [
        entropy_bonus(entropy_T[part], mask_T[part], keep_T=keep_T[part], coefficient=0.5, num_tokens=2)
        for part in (slice(0, 1), slice(1, 4))
    ]
    total = sum(parts)
    assert total.item() == -0.5 * (1 + 4) / 2
    total.backward()
    assert entropy_T.grad.tolist() == [-0.25, 0.0, 0.0, -0.25]


@st.composite
def streams(draw):
    """Log-ratios of up to three sequences, some tokens of them not trained, and their packing."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    eta = draw(st.lists(st.floats(-3, 3, width=32), min_size=sum(lengths), max_size=sum(lengths)))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    index = [number for number, length in enumerate(lengths) for _ in range(length)]
    mask_T = torch.tensor(mask)
    return torch.tensor(eta, dtype=torch.float64) * mask_T, Segments(mask_T, torch.tensor(index), len(lengths))


@settings(deadline=None)
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


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 64), min_size=1, max_size=40), st.integers(1, 999))
def test_the_kept_tokens_are_those_above_the_interpolated_quantile(sixteenths, thousandths):
    """What TRL computes, `torch.quantile`; where the quantile falls on a token itself, that token is kept."""
    entropies, quantile = torch.tensor(sixteenths, dtype=torch.float64) / 16, thousandths / 1000
    rank = (1 - quantile) * (len(entropies) - 1)
    kept = entropies >= top_entropy_threshold(entropies, quantile)
    if abs(rank - round(rank)) > 1e-6:
        assert torch.equal(kept, entropies >= torch.quantile(entropies, 1 - quantile))
    else:
        assert torch.equal(kept, entropies >= entropies.sort().values[round(rank)])
    assert kept.sum() >= math.floor(quantile * (len(entropies) - 1) + 1e-9) + 1
