"""Weights in 16 bits learn: their updates add up in float32 and survive a checkpoint."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from swift.trainers.optimizers.master_weights import keep_master_weights


def make(dtype=torch.bfloat16):
    weight = torch.nn.Parameter(torch.full((4,), 0.02, dtype=dtype))
    return weight, torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.0)


def steps(weight, optimizer, count):
    for _ in range(count):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.grad = None


def test_small_updates_of_bfloat16_weights_add_up():
    plain, mastered = make(), make()
    keep_master_weights(mastered[1])
    start = plain[0].clone()
    for weight, optimizer in (plain, mastered):
        steps(weight, optimizer, 100)
    assert torch.equal(plain[0], start)  # every single update is below half a step of bfloat16
    assert (start - mastered[0]).float().mean().item() == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loaded_optimizer_goes_on_exactly(dtype):
    weight, optimizer = make(dtype)
    keep_master_weights(optimizer)
    steps(weight, optimizer, 3)
    saved = deepcopy(optimizer.state_dict()), weight.detach().clone()
    again, resumed = make(dtype)
    keep_master_weights(resumed)
    resumed.load_state_dict(saved[0])
    again.data.copy_(saved[1])
    steps(weight, optimizer, 40)
    steps(again, resumed, 40)
    assert torch.equal(weight, again)


def test_a_weight_without_gradient_stays():
    weight, optimizer = make()
    keep_master_weights(optimizer)
    before = weight.clone()
    optimizer.step()
    assert torch.equal(weight, before)


def test_float32_weights_are_left_alone():
    weight, optimizer = make(torch.float32)
    assert keep_master_weights(optimizer) == 0
    assert optimizer.param_groups[0]["params"][0] is weight
