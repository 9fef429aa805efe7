"""The window that can be followed by hand: five tokens, two sequences, one with A = 1 and one with A = -1."""

from dataclasses import replace

import pytest
import torch
from padded_windows import window_of
from whole_objective import means, run_window

from swift.rl.global_batch import count_batch
from swift.rl.kl import teacher_advantages
from swift.rl.losses import LossConfig, losses
from swift.rl.objective import policy_loss
from swift.rl.segments import Segments

TOY = window_of(
    policy=[[-0.5, -1, -1.5], [-0.2, -2]],
    old=[[-1, -1, -1.3], [-0.6, -1.4]],
    ref=[[-0.4, -1.1, -1.5], [0.0, -2.0]],
    advantages=[1.0, -1.0],
)
ETA = torch.tensor([[0.2, -0.3, 1.0], [0.5, -1.2, 0.0]], dtype=torch.float64)
WEIGHTED = replace(TOY, sampler=TOY.old - ETA)
TRUNCATED = {"mode": "token_truncate", "threshold": 2.0}

CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
DAPO_GRADIENT = [0, -0.2, -0.163746, 0.298365, 0]
GSPO_GRADIENT = [-0.184195] * 3 + [0.226209] * 2
ROWS = {
    "dapo": (TOY, {"loss_type": "dapo"}, -0.161381, DAPO_GRADIENT),
    "bnpo": (TOY, {"loss_type": "bnpo"}, -0.161381, DAPO_GRADIENT),
    "grpo": (TOY, {"loss_type": "grpo"}, 0.056501, [0, -0.166667, -0.136455, 0.372956, 0]),
    "dr_grpo": (TOY, {"loss_type": "dr_grpo"}, -0.050432, [0, -0.0625, -0.051171, 0.093239, 0]),
    "gspo": (TOY, {"loss_type": "gspo"}, -0.100167, GSPO_GRADIENT),
    "grpo with one ratio per sequence": (
        TOY,
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        -0.100167,
        GSPO_GRADIENT,
    ),
    "gspo with a token gradient": (
        TOY,
        {"loss_type": "gspo", "importance_sampling_level": "sequence_token"},
        -0.100167,
        GSPO_GRADIENT,
    ),
    "luspo": (TOY, {"loss_type": "luspo"}, -0.752919, [-0.552585] * 3 + [0.452419] * 2),
    "cispo": (
        TOY,
        {"loss_type": "cispo", "epsilon_high": 5.0},
        0.331294,
        [-0.329744, -0.2, -0.163746, 0.298365, 0.109762],
    ),
    "sapo": (TOY, {"loss_type": "sapo"}, -0.112411, [-0.247790, -0.166667, -0.135340, 0.349156, 0.129784]),
    "vespo": (TOY, {"loss_type": "vespo"}, 0.035743, [-0.127580] * 3 + [0.157725] * 2),
    "dapo with delta": (TOY, {"delta": 1.4}, -0.179746, [0, -0.2, -0.163746, 0, 0]),
    "dapo with KL": (TOY, {"beta": 0.1}, -0.160753, [-0.002103, -0.198097, -0.163746, 0.293937, 0]),
    "dapo with bias-corrected KL": (
        TOY,
        {"beta": 0.1, "kl_bias_correction": True},
        -0.160475,
        [-0.003297, -0.198, -0.163746, 0.292398, 0],
    ),
    # K = .45, -.1, -.2 | .1, -.6 with a half-life of one token
    "fipo": (
        TOY,
        {"loss_type": "fipo", "parameters": losses["fipo"].parameters(fipo_decay_rate=1.0, fipo_clip_high_only=False)},
        -0.164487,
        [0, -0.180967, -0.134064, 0.329744, 0],
    ),
    "fipo without bounds but for unsafe tokens": (
        TOY,
        {
            "loss_type": "fipo",
            "parameters": losses["fipo"].parameters(fipo_decay_rate=1.0, fipo_clip_range=0, fipo_safety_threshold=1.2),
        },
        -0.330345,
        [0, -0.180967, -0.134064, 0.298365, 0],
    ),
    "fipo whose later tokens all lose": (
        TOY,
        {"loss_type": "fipo", "delta": 1.4, "parameters": losses["fipo"].parameters(fipo_decay_rate=1.0)},
        -0.179746,
        [0, -0.2, -0.163746, 0, 0],
    ),
    "dapo with a sampler correction": (WEIGHTED, {}, -0.248223, [0, -0.148164, -0.327492, 0.491921, 0]),
    "vespo with a sampler correction": (
        WEIGHTED,
        {"loss_type": "vespo"},
        -0.049676,
        [-0.015740] * 3 + [0.044044] * 2,
    ),
}


def printed(values):
    """Rounded to the six digits of the table; -0.0 becomes 0.0."""
    return [round(value, 6) + 0.0 for value in values]


@pytest.mark.parametrize("row", ROWS)
def test_loss_and_gradient_whole_by_micro_batches_and_by_ranks(row):
    window, settings, loss, gradient = ROWS[row]
    config = LossConfig(**{**CLIP, **settings})
    options = {"correction": TRUNCATED if window is WEIGHTED else None}
    whole = run_window(window, config, **options)
    assert printed([whole.loss]) == [loss] and printed(window.real(whole.gradient)) == gradient
    if row == "bnpo":  # a nominal micro-batch is what its loss is made of
        return
    cut = run_window(window, config, cut=[[1], [0]], **options)
    assert printed([cut.loss]) == [loss] and printed(window.real(cut.gradient)) == gradient
    counts = count_batch(window.trained)
    ranks = [run_window(window.rows(slice(i, i + 1)), config, counts=counts, **options) for i in range(2)]
    assert printed([sum(rank.loss for rank in ranks)]) == [loss]
    assert printed(window.real(torch.cat([rank.gradient for rank in ranks]))) == gradient


def test_bnpo_depends_on_its_nominal_micro_batch_and_not_on_the_physical_one():
    config = LossConfig(loss_type="bnpo", **CLIP)
    nominal = run_window(TOY, config, nominal=1)
    assert nominal.loss == pytest.approx(0.056501, abs=1e-6)  # two batches of one sequence: grpo's mean
    torch.testing.assert_close(run_window(TOY, config, nominal=1, cut=[[0], [1]]).gradient, nominal.gradient)
    torch.testing.assert_close(run_window(TOY, config, cut=[[0], [1]]).gradient, run_window(TOY, config).gradient)


def test_phi_of_vespo():
    result = run_window(TOY, LossConfig(loss_type="vespo"), cut=[[0], [1]])
    phi = [means([output])["vespo/phi_mean"] for output in result.outputs]
    assert printed(phi) == [0.637898, 0.788627]


def test_without_old_logprobs_the_ratio_is_one_and_carries_the_gradient():
    for name in losses:
        config = LossConfig(loss_type=name, epsilon_high=5.0 if name == "cispo" else None)
        on_policy = run_window(TOY, config, with_old=False)
        same = run_window(replace(TOY, old=TOY.policy), config)
        assert torch.equal(on_policy.gradient, same.gradient)
        assert on_policy.loss == same.loss
        assert (on_policy.gradient[0] < 0).all() and (on_policy.gradient[1, :2] > 0).all()


def test_on_policy_every_loss_has_the_gradient_of_reinforce():
    """At r = 1 nothing is clipped: d loss / d lp = -A weight, with the weights of the normaliser."""
    expected = {
        "dapo": [-1 / 5, 1 / 5],
        "bnpo": [-1 / 5, 1 / 5],
        "cispo": [-1 / 5, 1 / 5],
        "vespo": [-1 / 5, 1 / 5],
        "fipo": [-1 / 5, 1 / 5],
        "grpo": [-1 / 6, 1 / 4],
        "gspo": [-1 / 6, 1 / 4],
        "sapo": [-1 / 6, 1 / 4],
        "dr_grpo": [-1 / 16, 1 / 16],
        "luspo": [-1 / 2, 1 / 2],
    }
    assert set(expected) == set(losses)
    for name, (first, second) in expected.items():
        config = LossConfig(loss_type=name, epsilon_high=5.0 if name == "cispo" else None)
        result = run_window(TOY, config, with_old=False)
        assert TOY.real(result.gradient) == pytest.approx([first] * 3 + [second] * 2, abs=1e-12)


def test_a_teacher_corrects_the_advantage_of_each_trained_token():
    """Two trained tokens and one that is not: 1 + 2 (-.5 + 1) = 2, and -1 + 2 (-1 + 1.5) = 0."""
    policy_T = torch.tensor([-1.0, -1.0, -1.5], requires_grad=True)
    mask_T = torch.tensor([True, False, True])
    given_T, teacher_T = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([-0.5, torch.nan, -1.0])
    advantages_T = teacher_advantages(given_T, teacher_T, policy_T.detach(), mask_T, coefficient=2.0)
    assert advantages_T.tolist() == [2.0, 1.0, 0.0]
    output = policy_loss(
        policy_T,
        config=LossConfig(loss_type="dapo"),
        advantages_T=advantages_T,
        segments=Segments(mask_T, torch.tensor([0, 0, 1]), 2),
        token_weights_T=mask_T / 2,
    )
    output.loss.backward()
    assert output.loss.item() == -1.0
    assert policy_T.grad.tolist() == [-1.0, 0.0, 0.0]
