"""Values and gradients of TRL 1.16's own methods, recorded by make_trl_fixtures.py, float64, to 1e-10.

Where the product differs from TRL on purpose, a test of its own says by how much.
"""

import json
from pathlib import Path

import pytest
import torch
from rl_windows import Sample, run_window

from swift.rl.advantages import compute_advantages, reward_matrix
from swift.rl.kl import k3
from swift.rl.losses import LossConfig, losses

FIXTURES = Path(__file__).parent / "fixtures"
WINDOWS = json.loads((FIXTURES / "trl_losses.json").read_text())["windows"]
ADVANTAGES = json.loads((FIXTURES / "trl_advantages.json").read_text())
FILTERED = 2  # the window that holds a sequence without a trained token
COUNTS_FILTERED_SEQUENCES = ("grpo", "sapo", "luspo")


def label(case):
    settings = dict(case["settings"], weights=case["weights"])
    return "-".join(f"{value}" for value in settings.values())


def differs_by_design(case, window):
    level = case["settings"].get("importance_sampling_level", "token")
    corrected = case["settings"].get("use_bias_correction_kl", False)
    filtered = window == FILTERED and case["settings"]["loss_type"] in COUNTS_FILTERED_SEQUENCES
    return (corrected and level == "sequence") or filtered


def cases(*, different):
    return [
        pytest.param(window, case, id=f"{window}-{label(case)}")
        for window, content in enumerate(WINDOWS)
        for case in content["cases"]
        if differs_by_design(case, window) == different
    ]


def config_of(case, **changes):
    settings = {"importance_sampling_level": "token", **case["settings"]}
    settings["kl_bias_correction"] = settings.pop("use_bias_correction_kl", False)
    return LossConfig(**{**settings, **changes})


def samples_of(window, weights):
    rows = zip(window["policy"], window["old"], window["ref"], window["mask"], window["advantages"], strict=True)
    samples = []
    for index, (policy, old, ref, mask, advantage) in enumerate(rows):
        weight = None if weights is None else window[weights][index]
        if isinstance(weight, float):
            weight = [weight] * len(policy)
        samples.append(Sample(policy, advantage, old=old, ref=ref, mask=mask, sampler_weight=weight))
    return samples


def run(window, case, **changes):
    content = WINDOWS[window]
    size = content["micro_batch_size"]
    return run_window(
        samples_of(content, case["weights"]),
        config_of(case, **changes),
        cut=[list(range(start, start + size)) for start in range(0, len(content["policy"]), size)],
        nominal_size=size,
        max_completion_length=content["max_completion_length"],
        per_sequence_weight=case["weights"] == "sequence_weights",
    )


def flat(rows):
    return [value for row in rows for value in row]


@pytest.mark.parametrize(("window", "case"), cases(different=False))
def test_loss_and_gradient_equal_those_of_trl(window, case):
    result = run(window, case)
    assert result.loss == pytest.approx(case["loss"], rel=0, abs=1e-10)
    assert result.flat == pytest.approx(flat(case["gradient"]), rel=0, abs=1e-10)


def test_the_fixtures_cover_every_loss_but_gspo_which_trl_spells_grpo_with_a_sequence_ratio():
    recorded = {case["settings"]["loss_type"] for window in WINDOWS for case in window["cases"]}
    assert recorded == set(losses) - {"gspo"}
    for case in WINDOWS[0]["cases"]:
        settings = case["settings"]
        if settings["loss_type"] == "grpo" and settings.get("importance_sampling_level") == "sequence":
            gspo = run(0, case, loss_type="gspo", importance_sampling_level=None)
            assert gspo.flat == run(0, case).flat


def test_the_fixtures_reach_every_branch_of_the_clip():
    metrics = [case["metrics"] for window in WINDOWS for case in window["cases"]]
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert any(max(recorded.get(name, [0])) > 0.2 for recorded in metrics)


# TRL averages what a sequence ratio shows over sequences, the product over trained tokens
TOKEN_LEVEL_CASES = [
    param
    for param in cases(different=False)
    if param.values[1]["settings"].get("importance_sampling_level", "token") == "token"
]


@pytest.mark.parametrize(("window", "case"), TOKEN_LEVEL_CASES)
def test_clip_ratios_and_kl_of_each_micro_batch_equal_those_of_trl(window, case):
    outputs = run(window, case).outputs
    for name, recorded in case["metrics"].items():
        pairs = [output.means[name].tolist() for output in outputs]
        digits = 1e-10 if name == "kl" else 1e-7  # TRL counts clipped tokens in fp32
        assert [total / count for total, count in pairs] == pytest.approx(recorded, rel=0, abs=digits)


FILTERED_CASES = [
    param
    for param in cases(different=True)
    if param.values[0] == FILTERED
    and not (
        param.values[1]["settings"].get("use_bias_correction_kl")
        and param.values[1]["settings"].get("importance_sampling_level") == "sequence"
    )
]


@pytest.mark.parametrize(("window", "case"), FILTERED_CASES)
def test_a_filtered_sequence_is_not_counted_where_trl_counts_it(window, case):
    mask = WINDOWS[window]["mask"]
    trained, everything = sum(any(row) for row in mask), len(mask)
    assert (trained, everything) == (5, 6)
    result = run(window, case)
    assert result.loss == pytest.approx(case["loss"] * everything / trained, rel=0, abs=1e-10)
    expected = [value * everything / trained for value in flat(case["gradient"])]
    assert result.flat == pytest.approx(expected, rel=0, abs=1e-10)


CORRECTED_CASES = [
    param
    for param in cases(different=True)
    if param.values[1]["settings"].get("use_bias_correction_kl") and param.values[0] != FILTERED
]


@pytest.mark.parametrize(("window", "case"), CORRECTED_CASES)
def test_the_corrected_kl_takes_the_token_ratio_where_trl_takes_that_of_the_level(window, case):
    """With TRL's sequence ratio in place of the token ratio the difference vanishes."""
    plain, ours = run(window, case, beta=0.0), run(window, case)
    content, beta = WINDOWS[window], case["settings"]["beta"]
    weights = normaliser_weights(content, case["settings"]["loss_type"])
    trl_kl = ours_kl = 0.0
    for index, mask in enumerate(content["mask"]):
        policy, old, ref = (
            torch.tensor(content[name][index], dtype=torch.float64) for name in ("policy", "old", "ref")
        )
        mask_T = torch.tensor(mask).double()
        log_ratio_T = (policy - old) * mask_T
        sequence_ratio = torch.exp(log_ratio_T.sum() / mask_T.sum())
        estimate_T = k3(policy, ref) * mask_T * weights[index]
        trl_kl += (estimate_T * sequence_ratio).sum().item()
        ours_kl += (estimate_T * log_ratio_T.exp()).sum().item()
    assert ours.loss - plain.loss == pytest.approx(beta * ours_kl, rel=0, abs=1e-12)
    assert case["loss"] - plain.loss == pytest.approx(beta * trl_kl, rel=0, abs=1e-12)
    assert abs(trl_kl - ours_kl) > 1e-4


def normaliser_weights(content, loss_type):
    """Weight of a token of each sequence, written out loss by loss."""
    lengths = [sum(mask) for mask in content["mask"]]
    size, count, tokens = content["micro_batch_size"], len(lengths), sum(lengths)
    nominal = [sum(lengths[i - i % size : i - i % size + size]) for i in range(count)]
    return {
        "dapo": [1 / tokens] * count,
        "cispo": [1 / tokens] * count,
        "grpo": [1 / (count * length) for length in lengths],
        "sapo": [1 / (count * length) for length in lengths],
        "luspo": [1 / count] * count,
        "dr_grpo": [1 / (count * content["max_completion_length"])] * count,
        "bnpo": [1 / (count / size * total) for total in nominal],
    }[loss_type]


@pytest.mark.parametrize("case", ADVANTAGES["cases"], ids=lambda case: "-".join(case["settings"].values()))
def test_advantages_equal_those_of_trl(case):
    values_SK = reward_matrix(case["rewards"])
    aggregation = case["settings"]["multi_objective_aggregation"]
    result = compute_advantages(
        values_SK,
        torch.arange(len(values_SK)) // ADVANTAGES["group_size"],
        weights_K=torch.tensor(case["weights"], dtype=torch.float64),
        scale="gdpo" if aggregation == "normalize_then_sum" else case["settings"]["scale_rewards"],
    )
    assert result.advantages_S.tolist() == pytest.approx(case["advantages"], rel=0, abs=1e-10)


def test_the_recorded_advantages_hold_missing_and_excluded_rewards():
    rows = [row for case in ADVANTAGES["cases"] for row in case["rewards"]]
    assert any(None in row and any(value is not None for value in row) for row in rows)
    assert any(all(value is None for value in row) for row in rows)
