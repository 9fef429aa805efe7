"""Stochastic rounding: right on average, the same on all ranks and after a resume, and nearer to float32 masters."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from grpo_parts import make_trainer, policy_of
from test_optimizers import OPTIMIZERS, Allocations, small, steps, tiny_step

from swift.trainers.arguments import OPTIMIZER_PACKAGES
from swift.trainers.optimizers.master_weights import keep_master_weights
from swift.trainers.optimizers.stochastic_rounding import (
    STEPS,
    StochasticRounding,
    generator_of,
    round_stochastically,
)

HALF = torch.bfloat16
CPU = torch.device("cpu")
BUILT_IN = {name: make for name, make in OPTIMIZERS.items() if name != "of a plugin"}


def rounded(values, name="0"):
    exact = values.clone()
    round_stochastically(exact, generator_of(name, CPU))
    return exact


@pytest.mark.parametrize("share", [0.0, 1 / 256, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("start", [1.0, -1.0, 3e-5, -0.02])
def test_a_number_becomes_a_neighbour_with_the_probability_of_its_share(start, share):
    below = torch.tensor(start, dtype=HALF)
    above = torch.nextafter(below, torch.tensor(10.0 * start, dtype=HALF))
    value = below.double() + share * (above.double() - below.double())
    found = rounded(value.float().expand(100_000))
    assert set(found.tolist()) <= {below.item(), above.item()}
    up = (found == above.float()).double().mean().item()
    assert up == pytest.approx(share, abs=4 * (share * (1 - share) / 100_000) ** 0.5 + 1e-4)


def test_numbers_of_bfloat16_stay_and_so_does_what_is_none():
    values = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(values), values)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(rounded(odd).view(torch.int32), odd.view(torch.int32))
    gpu_nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(gpu_nan).isnan().all(), "all bits of a GPU's NaN are ones"


def test_random_bits_differ_by_seed_step_and_place_only():
    values = torch.full((1000,), 1.001)
    names = [f"{seed} {step} {place}" for seed in (0, 1) for step in (1, 2) for place in (0, 1)]
    found = [rounded(values, name) for name in names]
    assert all(torch.equal(one, rounded(values, name)) for one, name in zip(found, names, strict=True))
    assert all(not torch.equal(found[i], found[j]) for i in range(8) for j in range(i))


def rounding(optimizer, seed=0):
    keep_master_weights(optimizer, rounding=StochasticRounding(seed))
    return optimizer


@pytest.mark.parametrize("make", BUILT_IN.values(), ids=BUILT_IN)
def test_the_mean_over_seeds_is_the_update_of_float32(make):
    """Of updates a hundred times smaller than the distance of bfloat16's neighbours."""
    value, size = 1.0, 200_000
    whole = torch.nn.Parameter(torch.full((size,), value))
    weight = torch.nn.Parameter(whole.detach().to(HALF))
    plain, ours = (make([{"params": [one], "weight_decay": 0.0}]) for one in (whole, weight))
    for optimizer in (plain, ours):
        for group in optimizer.param_groups:
            group["lr"] = 8e-5
    rounding(ours)
    for _ in range(3):
        whole.grad, weight.grad = torch.ones_like(whole), torch.ones_like(weight)
        plain.step()
        ours.step()
    expected = float((whole.detach().double() - value).mean())
    assert 0 < -expected < 1e-3 and weight.dtype == HALF
    assert float((weight.detach().double() - value).mean()) == pytest.approx(expected, rel=0.03)


def test_the_optimizer_computes_in_float32_and_keeps_no_master():
    weights, optimizer = small(torch.optim.AdamW, dtype=HALF)
    rounding(optimizer)
    steps(weights, optimizer, 3)
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert [one.numel() for one in held] == [0, 0]
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("make", BUILT_IN.values(), ids=BUILT_IN)
def test_a_saved_state_goes_on_exactly(make, tmp_path):
    weights, optimizer = small(make, dtype=HALF)
    rounding(optimizer)
    steps(weights, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saved = deepcopy(weights)
    steps(weights, optimizer, 5, seed=9)
    again, resumed = small(make, dtype=HALF, seed=2)
    rounding(resumed)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for ours, then in zip(again, saved, strict=True):
        ours.data.copy_(then)
    steps(again, resumed, 5, seed=9)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, weights, strict=True))


def test_a_step_takes_12_bytes_a_parameter():
    weights = [torch.nn.Parameter(torch.ones(1000, dtype=HALF)) for _ in range(20)]
    with Allocations(weights) as allocations:
        optimizer = rounding(torch.optim.AdamW(weights, lr=1e-3))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert 12 * 20_000 <= allocations.peak < 13.2 * 20_000  # one master at a time, with its gradient or random bits


def test_an_optimizer_that_may_step_all_at_once_is_refused():
    with pytest.raises(AssertionError, match="at once"):
        rounding(torch.optim.RMSprop([torch.nn.Parameter(torch.ones(2, dtype=HALF))]))


def test_small_updates_add_up_without_masters():
    weight, optimizer = tiny_step()
    weight.data = weight.data.repeat(1000)
    rounding(optimizer)
    start = weight.clone()
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float((start - weight).detach().float().mean()) == pytest.approx(1e-3, rel=0.1)


def trained(folder, how, num_steps=60):
    """All weights [N] before and after steps on the same rows, and the loss there."""
    model = policy_of(folder, dtype=HALF)
    weights = list(model.parameters())
    start = torch.cat([one.detach().double().flatten() for one in weights])
    optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    if how != "plain":
        keep_master_weights(optimizer, rounding=StochasticRounding(0) if how == "rounded" else None)
    rows = torch.randint(3, 250, (8, 24), generator=torch.Generator().manual_seed(1))
    for _ in range(num_steps):
        logits = model(input_ids=rows).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.detach().double().flatten() for one in weights]) - start, float(loss)


def test_weights_follow_those_with_masters_and_plain_bfloat16_stands_still(nano_folders):
    folder = nano_folders["qwen2"]
    (mastered, loss), (rounded, near), (plain, far) = (trained(folder, how) for how in ("masters", "rounded", "plain"))
    assert (rounded - mastered).norm() < 0.4 * mastered.norm() < 0.5 * (plain - mastered).norm()
    assert float(rounded @ mastered / mastered.square().sum()) == pytest.approx(1.0, abs=0.05)
    assert abs(near - loss) < 0.1 * abs(far - loss)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd", "adafactor", "adamw_8bit", "adamw_torch_8bit"])
def test_a_trainer_steps_without_masters(nano_folders, tmp_path, optim):
    pytest.importorskip(OPTIMIZER_PACKAGES.get(optim, "torch"))
    folder = nano_folders["qwen2"]
    before = {name: one.detach().clone() for name, one in policy_of(folder, dtype=HALF).named_parameters()}
    trainer = make_trainer(folder, tmp_path, model=policy_of(folder, dtype=HALF), optim=optim, stochastic_rounding=True)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(one.dtype == HALF for one in after.values())
    assert any(not torch.equal(one, before[name]) for name, one in after.items())
    groups = trainer.optimizer.param_groups
    assert all(one.numel() == 0 for group in groups for one in group["params"]) and groups[0][STEPS] == 2
