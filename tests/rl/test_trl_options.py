"""Every loss with every option beside TRL's own methods, run here and now: loss and gradient to 1e-10 in float64.

The release is the one that requirements/base.txt pins. Where the product differs from TRL on purpose, a test says by
exactly how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from padded_windows import make_window
from trl_oracle import get_off_policy_mask, make_config, run_advantages, run_correction, run_loss
from trl_oracle import loss_stub as trl_trainer
from whole_objective import Options, run_ours

from swift.rl.advantages import compute_advantages
from swift.rl.correction import sampler_correction, sampler_mismatch
from swift.rl.entropy import AdaptiveEntropy
from swift.rl.global_batch import count_batch
from swift.rl.losses import LossConfig, losses
from swift.rl.losses.sapo import SAPOParameters
from swift.rl.segments import Segments

EXACT = {"rtol": 0, "atol": 1e-10}
SURROGATES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
COUNTS_FILTERED = ("grpo", "sapo", "luspo")
"""TRL's means over sequences count those without a trained token."""

CLIPS = ({"epsilon": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.4}, {"epsilon": 0.1, "epsilon_high": 0.2, "delta": 1.3})
CAPS = ({"epsilon_high": 1.1}, {"epsilon_high": 5.0})
GATES = ({}, {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0})
SHAPES = {**dict.fromkeys(SURROGATES, CLIPS), "cispo": CAPS, "sapo": GATES, "vespo": ({},)}
KLS = (
    {"beta": 0.0},
    {"beta": 0.1, "use_bias_correction_kl": False},
    {"beta": 0.1, "use_bias_correction_kl": True},
)
BOUNDS = ({"clip_max": 1.5}, {"clip_max": 1.3, "clip_min": 0.7})
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CORRECTIONS = (None, *({"mode": mode, **bounds} for mode, bounds in product(MODES, BOUNDS)))
LEVELS = ("token", "sequence")
DELTA = 0.1
"""Of the off-policy sequence mask."""
OURS = {
    "use_bias_correction_kl": "kl_bias_correction",
    "sapo_temperature_pos": "tau_pos",
    "sapo_temperature_neg": "tau_neg",
}


@dataclass(frozen=True)
class Case:
    """One combination: fields of TRL's configuration, and what else its trainer is given."""

    settings: dict
    correction: dict | None = None
    delta: float | None = None
    quantile: float = 1.0
    entropy_coef: float = 0.0
    with_old: bool = True

    @property
    def uses_the_ratio_of_the_sequence_in_the_kl(self) -> bool:
        return bool(
            self.settings["importance_sampling_level"] == "sequence" and self.settings.get("use_bias_correction_kl")
        )


def settings_of(name, level="token", shape=None, kl=KLS[1]):
    """Fields of TRL's configuration; the loss's first shape by default."""
    return {
        "loss_type": name,
        "importance_sampling_level": level,
        **(SHAPES[name][0] if shape is None else shape),
        **kl,
    }


def assert_is_trls(ours, theirs, factor=1.0):
    assert ours.loss == pytest.approx(theirs.loss * factor, rel=0, abs=1e-10)
    torch.testing.assert_close(ours.gradient, theirs.gradient * factor, **EXACT)


def trl_correction(window, correction):
    names = {name.replace("clip", "vllm_importance_sampling_clip"): value for name, value in correction.items()}
    mode = names.pop("mode")
    return run_correction(window, {"vllm_importance_sampling_mode": mode, **names})


def ours_correction(correction, **changes):
    return {
        "mode": correction["mode"],
        "threshold": correction["clip_max"],
        "lower": correction.get("clip_min", 0.0),
        "sequence_ratio": "sum",
        **changes,
    }


def loss_config(settings, **changes):
    named = {OURS.get(name, name): value for name, value in {**settings, **changes}.items()}
    gate = {name: named.pop(name) for name in ("tau_pos", "tau_neg") if name in named}
    return LossConfig(**named, parameters=SAPOParameters(**gate) if gate else None)


def trl_of(window, case, **run):
    """TRL's outcome. Without old log-probs its correction takes a forward pass for what the policy's are anyway."""
    weights = None
    if case.correction is not None:
        on_policy = window if case.with_old else replace(window, old=window.policy)
        weights = trl_correction(on_policy, case.correction)
    return run_loss(
        window,
        case.settings,
        weights=weights,
        with_old=case.with_old,
        with_sampler=case.correction is not None,
        off_policy_mask_threshold=case.delta,
        top_entropy_quantile=case.quantile,
        entropy_coef=case.entropy_coef,
        **run,
    )


@cache
def kl_runs(window, name, with_old, batch):
    """TRL with the corrected KL of the token ratio, and without KL; nothing masks or weighs the KL term."""
    kl = KLS[-1]
    assert kl["use_bias_correction_kl"]
    settings = {"loss_type": name, "importance_sampling_level": "token"}
    cases = [Case({**settings, **kl}, with_old=with_old), Case({**settings, "beta": 0.0}, with_old=with_old)]
    return [trl_of(window, case, batch=batch) for case in cases]


def expected_of(window, case, **run):
    """TRL's outcome, moved by what is different on purpose (shown one by one below)."""
    outcome = trl_of(window, case, **run)
    loss, gradient = outcome.loss, outcome.gradient
    if case.uses_the_ratio_of_the_sequence_in_the_kl:  # TRL's own KL at token level in place of it
        plain = trl_of(window, replace(case, settings={**case.settings, "beta": 0.0}), **run)
        with_kl, without_kl = kl_runs(window, case.settings["loss_type"], case.with_old, run.get("batch", 3))
        loss = plain.loss + with_kl.loss - without_kl.loss
        gradient = plain.gradient + with_kl.gradient - without_kl.gradient
    if case.settings["loss_type"] in COUNTS_FILTERED:
        bonus = (outcome.entropy_gradient * window.entropies).sum().item()  # has a mean of its own
        factor = len(window) / sum(count > 0 for count in window.trained)
        loss, gradient = (loss - bonus) * factor + bonus, gradient * factor
    return loss, gradient, outcome.entropy_gradient


def options_of(case, **changes):
    options = Options(
        loss_config(case.settings),
        with_old=case.with_old,
        with_sampler=case.correction is not None,
        correction=None if case.correction is None else ours_correction(case.correction),
        sequence_mask_delta=case.delta,
        quantile=case.quantile,
        entropy_coefficient=case.entropy_coef,
    )
    return replace(options, **changes)


def assert_equal(window, case, **run):
    loss, gradient, entropy_gradient = expected_of(window, case, **run)
    ours = run_ours(window, options_of(case), batch=run.get("batch", 3))
    assert ours.loss == pytest.approx(loss, rel=0, abs=1e-10), case
    torch.testing.assert_close(ours.gradient, gradient, **EXACT, msg=lambda text: f"{case}: {text}")
    torch.testing.assert_close(ours.entropy_gradient, entropy_gradient, **EXACT, msg=lambda text: f"{case}: {text}")


WINDOW = make_window(26, [], unscored=True)
WITHOUT_TOOLS = replace(WINDOW, tool_mask=torch.ones_like(WINDOW.tool_mask))
FILTERED = make_window(4, [3], unscored=True)
WINDOWS = {"tool calls": WINDOW, "completions only": WITHOUT_TOOLS, "a filtered sequence": FILTERED}
LOSS_AND_LEVEL = [pytest.param(name, level, id=f"{name}-{level}") for name, level in product(SHAPES, LEVELS)]


def test_every_loss_is_compared():
    assert {*SHAPES, "gspo", "fipo"} == set(losses)  # TRL has no FIPO
    gspo, spelled = (LossConfig(loss_type=name, importance_sampling_level=level) for name, level in GSPO)
    ours = [run_ours(WINDOW, Options(config)) for config in (gspo, spelled)]
    assert ours[0].loss == ours[1].loss and torch.equal(ours[0].gradient, ours[1].gradient)


GSPO = (("gspo", None), ("grpo", "sequence"))
"""TRL has GSPO under the second name only."""


@pytest.mark.parametrize(("name", "level"), LOSS_AND_LEVEL)
def test_clips_kl_corrections_masks_and_old_logprobs_in_every_combination(name, level):
    for shape, kl, correction, delta in product(SHAPES[name], KLS, CORRECTIONS, (None, DELTA)):
        settings = settings_of(name, level, shape, kl)
        assert_equal(WINDOW, Case(settings, correction, delta))
    for kl, correction in product(KLS, CORRECTIONS):
        settings = settings_of(name, level, kl=kl)
        assert_equal(WINDOW, Case(settings, correction, DELTA, with_old=False))


@pytest.mark.parametrize(("name", "level"), LOSS_AND_LEVEL)
def test_data_masks_and_the_top_entropy_mask_in_every_combination(name, level):
    corrections = (None, {"mode": "token_mask", "clip_max": 2.0})
    for window, quantile, kl, correction in product(WINDOWS.values(), (1.0, 0.5, 0.2), KLS, corrections):
        settings = settings_of(name, level, SHAPES[name][-1], kl)
        assert_equal(window, Case(settings, correction, DELTA, quantile))


@pytest.mark.parametrize(("name", "level"), LOSS_AND_LEVEL)
def test_the_entropy_bonus_beside_everything_else(name, level):
    for window, quantile, kl in product(WINDOWS.values(), (1.0, 0.4), KLS):
        settings = settings_of(name, level, kl=kl)
        case = Case(settings, {"mode": "sequence_mask", "clip_max": 2.0}, DELTA, quantile, entropy_coef=0.07)
        assert_equal(window, case, batch=len(window))
        assert run_ours(window, options_of(case), batch=len(window)).entropy_gradient.any()


def test_the_compared_windows_reach_every_branch():
    """An option that changes nothing in them would be compared with nothing."""

    def gradient(shape=CLIPS[1], **fields):
        settings = settings_of("dapo", shape=shape, kl=KLS[0])
        return trl_of(WINDOW, Case(settings, **fields)).gradient

    base = gradient()
    for bounds in CORRECTIONS[1:]:
        weights = trl_correction(WINDOW, bounds)
        outside = (weights == 0) | (weights == bounds["clip_max"]) | (weights == bounds.get("clip_min"))
        inside = ~outside & (weights != 1)
        assert outside.any() and inside.any(), bounds
    masked = get_off_policy_mask(WINDOW.advantages[:, None], WINDOW.policy, WINDOW.sampler, WINDOW.mask, DELTA)
    assert set(masked.flatten().tolist()) == {0.0, 1.0} and (WINDOW.advantages > 0).any()
    drift = (WINDOW.sampler - WINDOW.policy).nan_to_num(nan=0.0) * WINDOW.mask
    lost = WINDOW.advantages < 0
    assert ((drift.sum(1) > DELTA) & lost & masked.squeeze(1).bool()).any(), "the mean and the sum of a drift differ"
    assert not torch.equal(gradient(delta=DELTA), base)
    assert not torch.equal(gradient(quantile=0.5), base)
    for shape in (CLIPS[0], CLIPS[2]):
        assert not torch.equal(gradient(shape), base)
    assert (WINDOW.sampler[WINDOW.mask.bool()]).isnan().any()
    assert not WINDOW.tool_mask.all() and FILTERED.trained.count(0) == 1


@pytest.mark.parametrize("name", SHAPES)
def test_metrics_of_a_micro_batch(name):
    settings = settings_of(name)
    theirs = run_loss(WINDOW, settings).metrics
    ours = run_ours(WINDOW, Options(loss_config(settings))).metrics
    same = ["kl", *(f"clip_ratio/{kind}_mean" for kind in ("low", "high", "region"))]
    compared = [name for name in same if name in theirs]
    assert len(compared) == (4 if name in SURROGATES else 1)
    for metric in compared:
        digits = 1e-10 if metric == "kl" else 1e-7  # TRL counts clipped tokens in fp32
        assert ours[metric] == pytest.approx(theirs[metric], rel=0, abs=digits)


@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_make_the_gradient_of_one_window(name):
    window = make_window(5, [], sequences=8)
    halves = [window.rows(slice(0, 4)), window.rows(slice(4, 8))]
    settings = settings_of(name)
    theirs = [
        run_loss(half, settings, batch=2, num_processes=2, num_items=float(sum(window.trained))) for half in halves
    ]
    counts = count_batch(window.trained, 2)
    options = Options(loss_config(settings))
    cuts = zip(halves, (4, 1), strict=True)  # the ranks cut their parts differently
    ours = [run_ours(half, options, batch=batch, nominal=2, counts=counts) for half, batch in cuts]
    # a rank of TRL back-propagates twice our share, and the ranks' gradients are averaged
    assert sum(one.loss for one in ours) == pytest.approx(sum(one.loss for one in theirs) / 2, rel=0, abs=1e-10)
    averaged = torch.cat([one.gradient / 2 for one in theirs])
    torch.testing.assert_close(torch.cat([one.gradient for one in ours]), averaged, **EXACT)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_sequence_ratio_with_token_gradients_has_the_loss_of_the_sequence_ratio(name):
    """TRL knows two levels; the third has the value of `sequence`, and its gradient where all tokens weigh the same."""
    settings = settings_of(name, "sequence", CLIPS[1], KLS[0])
    theirs = run_loss(WINDOW, settings)
    ours = run_ours(WINDOW, Options(loss_config(settings, importance_sampling_level="sequence_token")))
    assert_is_trls(ours, theirs)
    with pytest.raises(ValueError, match="Unknown importance sampling level"):
        run_loss(WINDOW, {**settings, "importance_sampling_level": "sequence_token"})


# --- what is different on purpose, one by one --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dapo", "cispo", "vespo"])
def test_difference_tokens_are_those_of_the_window_where_trl_takes_the_average_of_its_generation_batch(name):
    first, second = make_window(0, []), make_window(1, [])
    tokens, others = sum(first.trained), sum(second.trained)
    assert tokens != others
    settings = settings_of(name)
    theirs = run_loss(first, settings, num_items=float(tokens + others), steps_per_generation=4)  # two windows of two
    ours = run_ours(first, Options(loss_config(settings)))
    assert_is_trls(ours, theirs, (tokens + others) / 2 / tokens)


@pytest.mark.parametrize("name", COUNTS_FILTERED)
def test_difference_a_filtered_sequence_is_not_counted_in_a_mean_over_sequences(name):
    settings = settings_of(name)
    theirs, ours = run_loss(FILTERED, settings), run_ours(FILTERED, Options(loss_config(settings)))
    assert_is_trls(ours, theirs, 6 / 5)


def test_difference_cispo_without_its_cap_is_refused_where_trl_takes_a_fifth():
    window = replace(WINDOW, completion_mask=torch.ones_like(WINDOW.completion_mask), tool_mask=WITHOUT_TOOLS.tool_mask)
    theirs = run_loss(window, {"loss_type": "cispo", "beta": 0.0})
    # every ratio is above .2, so TRL shrinks each token's REINFORCE gradient to a fifth of it
    expected = (-0.2 * window.advantages / sum(window.trained)).unsqueeze(1).expand_as(theirs.gradient)
    torch.testing.assert_close(theirs.gradient, expected, **EXACT)
    with pytest.raises(ValueError, match="the cap on the ratio itself"):
        run_ours(window, Options(LossConfig(loss_type="cispo")))


@pytest.mark.parametrize("name", SHAPES)
def test_difference_the_corrected_kl_takes_the_token_ratio_at_every_level(name):
    """The gap is beta times the difference of the two ratios times k3, weighted like the loss."""
    settings = settings_of(name, "sequence", kl=KLS[2])
    theirs, ours = run_loss(WINDOW, settings), run_ours(WINDOW, Options(loss_config(settings)))
    mask = WINDOW.mask.double()
    log_ratio = (WINDOW.policy - WINDOW.old) * mask
    difference = WINDOW.ref - WINDOW.policy
    estimate = difference.exp() - difference - 1
    length = mask.sum(1, keepdim=True)
    gap = (log_ratio.exp() - (log_ratio.sum(1, keepdim=True) / length).exp()) * estimate * mask
    nominal = length.view(2, 3).sum(1).repeat_interleave(3).unsqueeze(1)
    weights = {
        "luspo": 1 / 6,
        "grpo": 1 / 6 / length,
        "sapo": 1 / 6 / length,
        "bnpo": 1 / 2 / nominal,
        "dr_grpo": 1 / 48,
    }
    expected = settings["beta"] * (weights.get(name, 1 / length.sum()) * gap).sum().item()
    assert abs(expected) > 1e-6
    assert ours.loss - theirs.loss == pytest.approx(expected, rel=0, abs=1e-12)


def test_difference_the_entropy_threshold_is_that_of_the_window_and_not_of_each_micro_batch():
    case = Case(settings_of("dapo", shape=CLIPS[1], kl=KLS[0]), quantile=0.5)
    ours = run_ours(WINDOW, options_of(case))
    by_micro_batch = trl_of(WINDOW, case, quantile_of_window=False)
    assert not torch.equal(ours.gradient.bool(), by_micro_batch.gradient.bool())
    tokens = sum(WINDOW.trained)
    for rows in (slice(0, 3), slice(3, 6)):  # TRL's numbers are those of each half as a window of its own
        half = WINDOW.rows(rows)
        alone = run_ours(half, options_of(case)).gradient * sum(half.trained) / tokens
        torch.testing.assert_close(by_micro_batch.gradient[rows], alone, **EXACT)


def test_difference_the_entropy_bonus_is_the_mean_of_the_window_and_not_of_micro_batch_means():
    case = Case(
        settings_of("dapo", shape=CLIPS[1], kl=KLS[0]),
        entropy_coef=0.1,
        quantile=0.3,
    )
    theirs, ours = trl_of(WINDOW, case), run_ours(WINDOW, options_of(case))
    torch.testing.assert_close(ours.gradient, theirs.gradient, **EXACT)
    acting = ours.entropy_gradient != 0
    counts = acting.view(2, -1).sum(1).tolist()
    assert counts[0] != counts[1]
    assert ours.entropy_gradient[acting].tolist() == pytest.approx([-0.1 / sum(counts)] * sum(counts), rel=0, abs=1e-15)
    for half, count in zip(theirs.entropy_gradient.view(2, -1), counts, strict=True):
        assert half[half != 0].tolist() == pytest.approx([-0.1 / count / 2] * count, rel=0, abs=1e-15)


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_difference_the_default_ratio_of_a_sequence_is_the_mean_where_trl_takes_the_sum(mode):
    """q of the mean is TRL's to the power of 1 / T_i; a sequence that is kept then weighs token by token."""
    theirs = trl_correction(WINDOW, {"mode": mode, "clip_max": 1e9}).squeeze(1)
    mask = WINDOW.mask
    index = torch.arange(6).repeat_interleave(6)
    segments = Segments(mask.flatten().bool(), index, 6)
    eta_T = sampler_mismatch(WINDOW.old.flatten(), WINDOW.sampler.flatten(), mask.flatten())
    ours = {
        ratio: sampler_correction(eta_T, segments, mode=mode, threshold=1e9, sequence_ratio=ratio).weights_T.view(6, 6)
        for ratio in ("sum", "mean")
    }
    torch.testing.assert_close(ours["sum"][:, 0], theirs, **EXACT)
    lengths = torch.tensor(WINDOW.trained, dtype=torch.float64)
    if mode == "sequence_truncate":
        torch.testing.assert_close(ours["mean"], (theirs ** (1 / lengths)).unsqueeze(1).expand(6, 6), **EXACT)
    else:
        by_token = trl_correction(WINDOW, {"mode": "token_mask", "clip_max": 1e9})
        real = WINDOW.completion_mask.bool()
        torch.testing.assert_close(ours["mean"][real], by_token[real], **EXACT)


def test_difference_logarithms_are_bounded_by_twenty():
    """A gap of 25 nats: k3 is its tangent at 20, and the correction stays finite; capped weights do not change."""
    far = replace(WINDOW, ref=WINDOW.policy + 25, sampler=WINDOW.old - 25)
    case = Case({**settings_of("dapo"), "beta": 1.0}, {"mode": "token_truncate", "clip_max": 2.0})
    theirs, ours = trl_of(far, case), run_ours(far, options_of(case))
    tangent = math.exp(20) - 20 + 5 * math.expm1(20)
    assert theirs.loss - ours.loss == pytest.approx((math.exp(25) - 25) - tangent, rel=1e-12)
    wide = Options(
        loss_config({**case.settings, "beta": 0.0}), correction={"mode": "token_truncate", "threshold": 1e12}
    )
    trl_wide = trl_of(far, Case({**case.settings, "beta": 0.0}, {"mode": "token_truncate", "clip_max": 1e12}))
    assert trl_wide.loss / run_ours(far, wide).loss == pytest.approx(math.exp(5), rel=1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_difference_an_unscored_sample_is_excluded_where_trl_counts_its_tokens(name):
    """Rewards of None everywhere: both give A = 0; TRL counts the sample's tokens and the sample all the same."""
    rewards = torch.tensor([[1.0], [0.0], [torch.nan], [0.5], [0.5], [0.0]], dtype=torch.float64)
    theirs = run_advantages(rewards, torch.ones(1, dtype=torch.float64), {}, group_size=6)
    ours = compute_advantages(rewards, torch.zeros(6, dtype=torch.long))
    torch.testing.assert_close(theirs["advantages"], ours.advantages_S, **EXACT)
    assert theirs["num_items_in_batch"] == 12  # two tokens each, the unscored sample's too
    window = replace(WITHOUT_TOOLS, advantages=ours.advantages_S)
    excluded = replace(window, tool_mask=window.tool_mask * ours.rewards_S.isfinite().long().unsqueeze(1))
    settings = settings_of(name, kl=KLS[0])
    counted = run_loss(window, settings, batch=6)
    without = run_ours(excluded, Options(loss_config(settings)), batch=6)
    everything, trained = sum(window.trained), sum(excluded.trained)
    factor = {"dr_grpo": 1.0, **dict.fromkeys(COUNTS_FILTERED, 6 / 5)}.get(name, everything / trained)
    torch.testing.assert_close(without.gradient, counted.gradient * factor, **EXACT)


def test_the_adaptive_entropy_coefficient_is_that_of_trl():
    settings = {
        "loss_type": "dapo",
        "beta": 0.0,
        "use_adaptive_entropy": True,
        "entropy_target": 0.8,
        "entropy_coef_delta": 0.03,
        "entropy_coef_max": 0.05,
    }
    trl_side = trl_trainer(make_config(settings, batch=6, accumulation=1))
    controller = AdaptiveEntropy(target=0.8, step=0.03, maximum=0.05)
    applied = []
    for scale in (0.2, 0.5, 3.0, 0.2, 0.2, 0.2, 3.0, 3.0, 3.0, 0.2):
        window = replace(WINDOW, entropies=WINDOW.entropies * scale)
        theirs = run_loss(window, settings, batch=6, stub=trl_side)
        coefficient = -theirs.entropy_gradient.sum().item()
        assert coefficient == pytest.approx(controller.applied, rel=0, abs=1e-12)
        mean = window.entropies[window.mask.bool()].mean().item()
        controller = controller.updated(mean)
        assert controller.coefficient == pytest.approx(trl_side.entropy_coef, rel=0, abs=1e-12)
        applied.append(round(coefficient, 6))
    assert set(applied) == {0.0, 0.03, 0.05}


@pytest.mark.parametrize("seed", range(6))
def test_advantages_of_ragged_missing_and_equal_rewards(seed):
    """Quarters in groups of three: ties, equal groups and functions that do not apply all occur."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 3, (12, 2), generator=generator).double() / 4
    rewards[torch.rand(12, 2, generator=generator, dtype=torch.float64) < 0.2] = torch.nan
    rewards[:3] = 0.5  # TRL gives exactly 0 here too
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    index = torch.arange(12) // 3
    for scale in ("group", "batch", "none", "gdpo"):
        settings = (
            {"multi_objective_aggregation": "normalize_then_sum"} if scale == "gdpo" else {"scale_rewards": scale}
        )
        theirs = run_advantages(rewards, weights, settings, group_size=3)["advantages"]
        ours = compute_advantages(rewards, index, weights_K=weights, scale=scale)
        compared = ours.informative_P[index] if scale == "gdpo" else slice(None)
        torch.testing.assert_close(ours.advantages_S[compared], theirs[compared], **EXACT)
