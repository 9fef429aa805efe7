import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from padded_windows import make_window, window_of
from whole_objective import means, run_window

from swift.rl.kl import k3, sequence_k1
from swift.rl.losses import LossConfig, losses
from swift.rl.objective import policy_loss
from swift.rl.segments import Segments

PAIR = window_of(
    policy=[[-0.5, -1.0, -1.5], [-0.2, -2.0]],
    old=[[-1.0, -1.0, -1.3], [-0.6, -1.4]],
    ref=[[-0.4, -1.1, -1.5], [0.0, -2.0]],
    advantages=[1.0, -1.0],
)
KL_ONLY = replace(PAIR, advantages=torch.zeros(2, dtype=torch.float64))
CORRECTION = {"mode": "token_truncate", "threshold": 100.0}
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def configured(name, **fields):
    fields.setdefault("epsilon_high", 1.2 if name == "cispo" else 0.28)
    return LossConfig(loss_type=name, **fields)


@st.composite
def windows(draw):
    """Up to six sequences, some without a trained token, and a cut of them into micro-batches in any order."""
    size = draw(st.integers(2, 6))
    window = make_window(draw(st.integers(0, 2**31)), draw(st.lists(st.integers(0, size - 1))), sequences=size)
    assume(any(window.trained))
    order = draw(st.permutations(range(size)))
    cuts = draw(st.lists(st.integers(1, size), max_size=4).map(lambda cut: sorted({0, *cut, size})))
    return window, [order[start:end] for start, end in pairwise(cuts)]


@settings(deadline=None)
@given(windows(), st.sampled_from(sorted(losses)), st.sampled_from(["token", "sequence", "sequence_token"]))
def test_any_cut_of_the_window_gives_the_same_loss_and_gradient(drawn, name, level):
    window, cut = drawn
    config = configured(name, importance_sampling_level=level, beta=0.04, kl_bias_correction=True)
    options = {"nominal": 2, "correction": CORRECTION, "quantile": 0.7}
    whole, pieces = run_window(window, config, **options), run_window(window, config, cut=cut, **options)
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(pieces.gradient, whole.gradient, **EXACT)
    assert means(pieces.outputs) == pytest.approx(means(whole.outputs), rel=1e-12, abs=1e-12)


@settings(deadline=None)
@given(windows(), st.sampled_from(sorted(losses)))
def test_a_masked_token_has_no_gradient_and_no_influence(drawn, name):
    window, _ = drawn
    config, masked = configured(name, beta=0.04), window.mask == 0
    result = run_window(window, config, nominal=2)
    poisoned = replace(window, **{name: getattr(window, name).masked_fill(masked, math.nan) for name in ("old", "ref")})
    found = run_window(poisoned, config, nominal=2)
    assert torch.equal(found.gradient, result.gradient) and found.loss == result.loss
    assert not result.gradient[masked].any()


@settings(deadline=None)
@given(windows(), st.sampled_from(sorted(losses)), st.sampled_from([None, CORRECTION]))
def test_fp32_agrees_with_float64(drawn, name, correction):
    window, _ = drawn
    # off the clip's edges: a ratio that rounds to the other side of an edge has another gradient
    config = configured(name, epsilon=0.9, epsilon_high=9.0)
    exact, narrow = (run_window(one, config, nominal=2, correction=correction) for one in (window, window.single()))
    torch.testing.assert_close(narrow.gradient.double(), exact.gradient, rtol=2e-5, atol=2e-6)


def test_forward_masks_act_on_the_policy_term_and_leave_the_kl_and_the_normaliser():
    config = LossConfig(beta=0.1)
    first_alone = replace(PAIR, entropies=torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    kept, plain, kl_only = (
        run_window(first_alone, config, quantile=0.5),
        run_window(PAIR, config),
        run_window(KL_ONLY, config),
    )
    assert torch.equal(kept.gradient[0], plain.gradient[0])
    assert torch.equal(kept.gradient[1], kl_only.gradient[1]) and kl_only.gradient[1].any()


def test_a_sampler_weight_of_zero_leaves_the_kl():
    config = LossConfig(beta=0.1)
    nothing = run_window(PAIR, config, correction={"mode": "token_mask", "threshold": 1e-9})
    assert torch.equal(nothing.gradient, run_window(KL_ONLY, config).gradient)


def test_the_metrics_of_the_clip():
    result = run_window(PAIR, LossConfig(epsilon_high=0.28))
    metrics = means(result.outputs)
    # r = e^.5, 1, e^-.2 | e^.4, e^-.6: the first is cut off above, the last below
    assert metrics["clip_ratio/high_mean"] == 0.2
    assert metrics["clip_ratio/low_mean"] == 0.2
    assert metrics["clip_ratio/region_mean"] == 0.4
    ratios = torch.tensor([0.5, 0.0, -0.2, 0.4, -0.6], dtype=torch.float64).exp()
    assert metrics["ratio/mean"] == pytest.approx(ratios.mean().item())
    assert result.outputs[0].extremes["ratio/max"].item() == pytest.approx(ratios.max().item())
    assert "kl" not in metrics
    with_kl = means(run_window(PAIR, LossConfig(beta=0.1)).outputs)
    assert with_kl["kl"] == pytest.approx((0.005171 + 0.004837 + 0.021403) / 5, abs=1e-6)


def loss_of(policy_T, mask, **more):
    """The loss of one sequence with advantage 1, every trained token of weight 1."""
    mask_T = torch.tensor(mask, dtype=torch.bool)
    segments = Segments(mask_T, torch.zeros(len(mask), dtype=torch.long), int(len(mask) > 0))
    given = {"config": LossConfig(), "advantages_T": torch.ones(len(mask)), "token_weights_T": mask_T.float(), **more}
    return policy_loss(policy_T, segments=segments, **given)


def test_entropy_is_observed_but_does_not_enter_the_loss():
    policy_T = torch.tensor([-1.0, -2.0, -3.0])
    with_entropy = loss_of(policy_T, [1, 1, 0], entropy_T=torch.tensor([0.5, 1.5, 9.0]))
    assert with_entropy.means["entropy"].tolist() == [2.0, 2.0]
    assert with_entropy.loss == loss_of(policy_T, [1, 1, 0]).loss


def test_a_micro_batch_without_a_trained_token_adds_nothing():
    window = make_window(0, [2], sequences=3)
    for name in losses:
        result = run_window(window, configured(name, beta=0.1), cut=[[0, 1], [2]])
        assert result.outputs[1].loss.item() == 0.0
        assert not result.gradient[2].any()
        assert result.outputs[1].means["ratio/mean"].tolist() == [0.0, 0.0]


def test_the_kl_to_the_sampler_knows_only_what_the_sampler_told():
    """k3 of lp_s - lp = .1 is .005171, with the gradient 1 - e^.1; unknown and masked tokens have none."""
    policy_T = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    output = loss_of(
        policy_T,
        [1, 1, 0],
        config=LossConfig(rollout_kl_coef=0.5),
        advantages_T=torch.zeros(3),
        sampler_logprobs_T=torch.tensor([-0.9, math.nan, math.nan]),
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.5 * 0.005171, abs=1e-6)
    assert policy_T.grad.tolist() == pytest.approx([0.5 * (1 - math.exp(0.1)), 0.0, 0.0], abs=1e-6)
    assert output.means["rollout_kl"].tolist() == pytest.approx([0.005171, 2.0], abs=1e-6)


@settings(deadline=None)
@given(st.floats(-1000, 1000))
def test_k3_is_finite_never_negative_and_zero_only_without_difference(difference):
    value = k3(torch.tensor([-30.0], dtype=torch.float64), torch.tensor([-30.0 + difference], dtype=torch.float64))
    assert value.isfinite().all() and value.item() >= 0
    if abs(difference) > 1e-3:
        assert value.item() > 0


LOGPROBS = st.floats(-200, 0)


def kl_loss(policy, reference, old, *, kind, exact=False, dtype=torch.float64):
    """Value and gradient of the KL term of one token, or of the formula itself."""
    policy_T = torch.tensor([policy], dtype=dtype, requires_grad=True)
    ref_T, old_T = (torch.tensor([one], dtype=dtype) for one in (reference, old))
    if exact:
        difference_T = ref_T - policy_T
        value = difference_T.exp() - difference_T - 1
        value = (value * (policy_T - old_T).exp() if kind == "bias_corrected" else value).sum()
    else:
        rollout = kind == "rollout"
        config = LossConfig(
            kl_bias_correction=kind == "bias_corrected", **{"rollout_kl_coef" if rollout else "beta": 1}
        )
        value = loss_of(
            policy_T,
            [1],
            config=config,
            advantages_T=torch.zeros(1),
            old_logprobs_T=old_T,
            **{"sampler_logprobs_T" if rollout else "ref_logprobs_T": ref_T},
        ).loss
    value.backward()
    return value.item(), policy_T.grad.item()


@settings(deadline=None)
@given(LOGPROBS, LOGPROBS, LOGPROBS, st.sampled_from(["plain", "bias_corrected", "rollout"]))
def test_the_kl_of_any_logprobs_is_that_of_the_formula_up_to_20_nats_and_grows_beyond(policy, reference, old, kind):
    difference, ratio_bound = reference - policy, 60  # e^60 times the KL of 200 nats is a float32
    assume(policy - old < ratio_bound)  # an overflow is not hidden
    value, gradient = kl_loss(policy, reference, old, kind=kind)
    single = kl_loss(policy, reference, old, kind=kind, dtype=torch.float32)
    assert math.isfinite(value) and math.isfinite(gradient) and value >= 0
    assert all(map(math.isfinite, single)) and single[1] == pytest.approx(gradient, rel=1e-3, abs=1e-4)
    if difference <= 20:
        scale = math.exp(min(policy - old, ratio_bound)) * math.exp(difference) if kind == "bias_corrected" else 1
        expected = kl_loss(policy, reference, old, kind=kind, exact=True)
        assert (value, gradient) == pytest.approx(expected, rel=1e-7, abs=1e-7 + 1e-12 * scale)
        return
    assert gradient < 0 or (kind == "bias_corrected" and policy - old < -700)  # towards the reference
    nearer, nearer_gradient = kl_loss(policy + (difference - 20) / 2, reference, old, kind="plain")
    if kind != "bias_corrected":
        assert value > nearer and gradient <= nearer_gradient
    else:
        assert gradient == pytest.approx(-difference * math.exp(policy - old), rel=1e-9)


def test_the_kl_pulls_back_a_token_that_is_far_above_the_reference():
    """At lp_r - lp = -25 the gradient of k3 is 1 - e^-25."""
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    k3(policy, policy.detach() - 25).sum().backward()
    assert policy.grad.tolist() == pytest.approx([1 - math.exp(-25)], rel=1e-15)


def test_k1_of_a_sequence_sums_the_trained_tokens_only():
    segments = Segments(torch.tensor([True, True, False]), torch.tensor([0, 0, 1]), 2)
    values = sequence_k1(torch.tensor([-1.0, -2.0, math.nan]), torch.tensor([-1.5, -1.0, 0.0]), segments)
    assert values.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epsilon_high": 0.28, "delta": 1.28}, "above 1 \\+ epsilon_high"),
        ({"loss_type": "sapo", "delta": 1.5}, "no clip that it could bound"),
        ({"loss_type": "cispo"}, "the cap on the ratio itself"),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "the cap on the ratio itself"),
        ({"loss_type": "ppo"}, "loss_type: ppo: unknown; valid: bnpo, cispo"),
    ],
)
def test_settings_without_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)


def test_kl_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="needs the log-probs of the reference"):
        loss_of(torch.tensor([-1.0]), [1], config=LossConfig(beta=0.1))


def test_an_empty_micro_batch_is_legal():
    output = loss_of(torch.zeros(0, requires_grad=True), [])
    output.loss.backward()
    assert output.loss.item() == 0.0 and output.extremes["ratio/max"].item() == 0.0
