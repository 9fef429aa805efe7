"""LoRA+ (arXiv:2402.12354): matrices B move by their own rate, in the groups that PEFT's own optimizer has."""

import pytest
import torch
from policies import lora
from torch import nn

from swift.models.policy import load_policy
from swift.models.rates import Rates

RATIO = 16.0


def groups_of(optimizer, policy):
    """Rate -> names of the parameters that have it."""
    names = {parameter: name for name, parameter in policy.named_parameters()}
    return {group["lr"]: {names[one] for one in group["params"]} for group in optimizer.param_groups if group["params"]}


@pytest.fixture
def adapted(nano_folders):
    args = lora(nano_folders["qwen2"], loraplus_lr_ratio=RATIO)
    return load_policy(args), args


def test_groups_are_those_of_peft(adapted):
    from peft.optimizers import create_loraplus_optimizer

    policy, args = adapted
    theirs = create_loraplus_optimizer(policy, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=RATIO)
    ours = torch.optim.AdamW([one for one in policy.parameters() if one.requires_grad], lr=1e-3)
    Rates.of(args).give(ours, policy)
    assert groups_of(ours, policy) == groups_of(theirs, policy) and len(ours.param_groups) == 2


def test_matrices_b_move_by_their_rate(adapted):
    policy, args = adapted
    before = {name: one.detach().clone() for name, one in policy.named_parameters() if one.requires_grad}
    optimizer = torch.optim.SGD([one for one in policy.parameters() if one.requires_grad], lr=0.5)
    Rates.of(args).give(optimizer, policy)
    for one in policy.parameters():
        one.grad = torch.ones_like(one) if one.requires_grad else None
    optimizer.step()
    now = dict(policy.named_parameters())
    moved = {name: (old - now[name]).unique() for name, old in before.items()}
    assert len(moved) > 4
    for name, steps in moved.items():
        torch.testing.assert_close(steps, torch.full_like(steps, 0.5 * (RATIO if ".lora_B." in name else 1.0)))


def test_the_settings_of_groups_and_their_order_stay(adapted):
    policy, args = adapted
    trained = [(name, one) for name, one in policy.named_parameters() if one.requires_grad]
    parts = [{"params": [one], "weight_decay": i / 8} for i, (_, one) in enumerate(trained[:3])]
    optimizer = torch.optim.AdamW(parts, lr=1.0)
    Rates.of(args).give(optimizer, policy)
    found = [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    wanted = [(i / 8, RATIO if ".lora_B." in name else 1.0) for i, (name, _) in enumerate(trained[:3])]
    assert sorted(found, key=lambda pair: pair[1]) == found and sorted(found) == sorted(wanted)


def test_without_settings_nothing_changes():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    groups = list(optimizer.param_groups)
    Rates().give(optimizer, layer)
    assert optimizer.param_groups == groups


def test_the_plan_says_it(adapted):
    policy, args = adapted
    assert Rates.of(args).lines(policy, args) == ["learning rate of LoRA's matrices B: 16 times that of A"]
