"""EBFT's rewards, advantages, loss and whitening, by hand and by enumeration."""

import itertools

import pytest
import torch
from torch import tensor

from swift.rl.energy import (
    cfm_loss,
    energies,
    energy_advantages,
    energy_rewards,
    group_whitening,
    pooled_whitening,
    whiten,
)

PHI = tensor([[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]], dtype=torch.float64)
STAR = tensor([[1.0, 0.0]], dtype=torch.float64)


def advantages(phi, star, estimator="rloo", alpha=1.0, beta=1.0):
    a, d = energy_rewards(phi, star)
    return energy_advantages(a, d, alignment_coef=alpha, diversity_coef=beta, estimator=estimator)


def close(found, wanted, tolerance=1e-12):
    torch.testing.assert_close(found, tensor(wanted, dtype=found.dtype), rtol=0, atol=tolerance)


def test_three_samples_by_hand():
    a, d = energy_rewards(PHI, STAR)
    close(a, [[2, 0, 1.2]])
    close(d, [[0.6, 0.8, 1.4]])
    close(a - d, [[1.4, -0.8, -0.2]])
    close(advantages(PHI, STAR), [[2.4, -1.2, -1.2]])
    close(advantages(PHI, STAR, "reinforce"), [[1.4, -0.8, -0.2]])
    close(a - d - ((a - d).sum() - (a - d)) / 2, [[1.9, -1.4, -0.5]])  # a plain leave-one-out mean: another gradient
    close(cfm_loss(PHI, STAR, a, d), [0.4])
    plug_in = (PHI.mean(dim=1) - STAR).square().sum(dim=1)
    close(plug_in, [0.577778], 1e-6)


def test_two_samples_have_no_baseline_of_diversity():
    a, d = energy_rewards(PHI[:, :2], STAR)
    close(a, [[2, 0]])
    close(d, [[0, 0]])
    close(advantages(PHI[:, :2], STAR), [[2, -2]])


def test_one_sample_is_rewarded_for_its_alignment_alone():
    close(advantages(PHI[:, 2:], STAR, alpha=0.5), [[0.6]])
    close(advantages(PHI[:, 2:], STAR, "group_norm"), [[0.0]])
    assert energy_rewards(PHI[:, 2:], STAR)[1].tolist() == [[0.0]]


def test_group_norm_divides_by_the_deviation_of_the_group():
    rewards = tensor([[1.4, -0.8, -0.2]], dtype=torch.float64)
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(advantages(PHI, STAR, "group_norm"), wanted)


@pytest.mark.parametrize("size", [3, 4, 7])
def test_advantages_of_three_and_more_add_up_to_nothing(size):
    phi = torch.randn(5, size, 4, dtype=torch.float64)
    total = advantages(phi, torch.randn(5, 4, dtype=torch.float64), alpha=0.7, beta=1.9).sum(dim=1)
    close(total, [0.0] * 5)


def small_policy():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, generator=generator, dtype=torch.float64)
    phi = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return logits, phi, torch.randn(3, generator=generator, dtype=torch.float64)


def expected_gradient(logits, phi, star, size, estimator):
    """The gradient of the estimator, in expectation over all draws of `size` of the 4 outcomes."""
    theta = logits.clone().requires_grad_()
    lp = theta.log_softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for draw in itertools.product(range(4), repeat=size):
        probability = lp[list(draw)].sum().exp().detach()
        total = (
            total + probability * (advantages(phi[list(draw)][None], star[None], estimator)[0] * lp[list(draw)]).mean()
        )
    return torch.autograd.grad(total, theta)[0]


def gradients_of_cfm(logits, phi, star):
    """Of -CFM."""
    theta = logits.clone().requires_grad_()
    mean = theta.softmax(0) @ phi
    return torch.autograd.grad(2 * mean @ star - mean.square().sum(), theta)[0]


@pytest.mark.parametrize("estimator", ["rloo", "reinforce"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_expected_gradient_is_exactly_that_of_the_feature_matching_loss(size, estimator):
    logits, phi, star = small_policy()
    found = expected_gradient(logits, phi, star, size, estimator)
    torch.testing.assert_close(found, gradients_of_cfm(logits, phi, star), rtol=0, atol=1e-12)


def test_the_loss_is_unbiased():
    logits, phi, star = small_policy()
    policy = logits.softmax(0)
    for size in (2, 3):
        draws = list(itertools.product(range(4), repeat=size))
        weights = torch.stack([policy[list(draw)].prod() for draw in draws])
        groups = torch.stack([phi[list(draw)] for draw in draws]), star.expand(len(draws), -1)
        losses = cfm_loss(*groups, *energy_rewards(*groups))
        torch.testing.assert_close((weights * losses).sum(), (policy @ phi - star).square().sum())


def test_metrics_are_cosines_and_means():
    found = energies(PHI, STAR, alignment_coef=1.0, diversity_coef=1.0).metrics
    assert found.pop("ebft/rank_deficient_frac") == 0
    wanted = {"alignment": 1.6 / 3, "diversity": 1.4 / 3, "reward": 0.4 / 3, "effective_reward": 1.8 / 3}
    wanted |= {"cfm_loss": 0.4, "advantages_std": tensor([2.4, -1.2, -1.2]).std().item()}
    assert found == pytest.approx({f"ebft/{name}": value for name, value in wanted.items()}, abs=1e-6)


def test_group_whitening_leaves_near_duplicates_alone():
    rows = tensor([[[1.0, 0, 0], [1, 0, 0], [0, 1, 0]]])
    phi, _, deficient = whiten(rows, tensor([[1.0, 0, 0]]), "group")
    assert deficient == 1.0
    # unit length after the projection: each row of the gram matrix is scaled by the roots of its diagonal
    close(phi[0] @ phi[0].T, [[1, 1, 0], [1, 1, 0], [0, 0, 1]], 1e-6)


@pytest.mark.parametrize(
    ("rows", "gram", "d"),
    [
        ([[1.0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], [0.5, 0.5, 0]),
        ([[1.0, 0, 0], [0.6, 0.8, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]], [0, 0, 0]),
    ],
)
def test_the_gram_matrix_of_whitened_groups_is_a_projector(rows, gram, d):
    phi, _ = group_whitening(tensor([rows]))
    close(phi[0] @ phi[0].T, gram, 1e-6)
    close(energy_rewards(phi, phi[:, 0])[1], [d], 1e-6)


def test_whitened_groups_have_no_diversity_and_keep_the_direction_of_the_reference():
    rows, star = tensor([[[1.0, 0, 0], [0.6, 0.8, 0], [0, 0, 1]]]), tensor([[2.0, 0, 0]])
    phi, reference, deficient = whiten(rows, star, "group")
    a, d = energy_rewards(phi, reference)
    assert deficient == 0.0
    close(d, [[0.0, 0, 0]], 1e-6)
    close(a / 2, [[0.948683, 0.316228, 0.0]], 1e-6)


def test_pooled_whitening_is_the_root_of_the_shrunk_covariance():
    star = tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    sigma = tensor([[0.662, 0.216], [0.216, 0.338]], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(sigma)
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    basis = torch.eye(2, dtype=torch.float64)
    phi, reference, _ = whiten(basis[None], star[:1], "pooled", pooled_whitening(star, 0.1))
    torch.testing.assert_close(phi[0], torch.nn.functional.normalize(basis @ root, dim=-1))
    torch.testing.assert_close(reference, torch.nn.functional.normalize(star[:1] @ root, dim=-1))
    close((phi[0, 0] * phi[0, 1]).sum(), -0.456632, 1e-6)


def test_pooled_whitening_of_fewer_references_than_dimensions():
    generator = torch.Generator().manual_seed(0)
    star = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    sigma = 0.9 / 3 * star.T @ star + 0.1 * star.square().sum() / 24 * torch.eye(8, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(sigma)
    others = torch.randn(3, 2, 8, generator=generator, dtype=torch.float64)
    wanted = torch.nn.functional.normalize(others @ (vectors @ torch.diag(values.rsqrt()) @ vectors.T), dim=-1)
    torch.testing.assert_close(whiten(others, star, "pooled", pooled_whitening(star, 0.1))[0], wanted)
