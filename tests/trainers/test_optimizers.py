"""Optimizers: 16-bit weights learn through float32 masters, adamw_cpu is adamw on the host, and all resume exactly."""

from __future__ import annotations

import functools
import weakref
from copy import deepcopy
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from grpo_parts import make_trainer, policy_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Adafactor

from swift.trainers.arguments import OPTIMIZER_PACKAGES, Optimizer
from swift.trainers.optimizers import master_weights
from swift.trainers.optimizers.adamw_cpu import CPUAdamW
from swift.trainers.optimizers.choice import is_registered, set_own_optimizer
from swift.trainers.optimizers.master_weights import keep_master_weights
from swift.trainers.token_budget import expected_bytes

HALF, WHOLE = torch.bfloat16, torch.float32


def trained(folder, output_dir, optim, *, dtype=WHOLE, lora=None, steps=5):
    """Weights and optimizer after real GRPO steps with a schedule and clipping."""
    model = policy_of(folder, dtype=dtype, lora=lora)
    trainer = make_trainer(
        folder, output_dir, model=model, max_steps=steps, warmup_steps=2, lr_scheduler_type="cosine",
        max_grad_norm=0.05, weight_decay=0.1, adam_beta2=0.95, logging_steps=1, learning_rate=1e-2,
    )  # fmt: skip
    if is_registered(optim):
        set_own_optimizer(trainer, SimpleNamespace(optim=optim))
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}, trainer.optimizer, norms


@pytest.mark.parametrize(("dtype", "lora"), [(WHOLE, None), (HALF, None), (WHOLE, {"r": 4})])
def test_on_a_cpu_the_numbers_are_those_of_adamw(nano_folders, tmp_path, dtype, lora):
    folder = nano_folders["qwen2"]
    expected, plain, norms = trained(folder, tmp_path / "a", "adamw_torch_fused", dtype=dtype, lora=lora)
    weights, optimizer, same_norms = trained(folder, tmp_path / "b", "adamw_cpu", dtype=dtype, lora=lora)
    assert isinstance(optimizer.optimizer, CPUAdamW) and not isinstance(plain.optimizer, CPUAdamW)
    assert min(norms) > 0.05, "every step was clipped"
    assert same_norms == norms
    before = dict(policy_of(folder, dtype=dtype, lora=lora).named_parameters())
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def small(make, *, dtype=WHOLE, seed=1):
    torch.manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in ((7, 5), (64,))]
    return weights, make([{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}])


def steps(weights, optimizer, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()
        optimizer.zero_grad()
        for weight in weights:
            weight.grad = None


@pytest.fixture
def everything_is_elsewhere(monkeypatch):
    """As on an accelerator: every weight has its master, whatever its precision."""
    monkeypatch.setattr(master_weights, "_needs_master", lambda weight, on: on is not None)


@pytest.mark.usefixtures("everything_is_elsewhere")
def test_masters_of_float32_weights_change_no_bit():
    weights, optimizer = small(CPUAdamW)
    assert all(group["fused"] for group in optimizer.param_groups)
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert all(ours is not weight for ours, weight in zip(held, weights, strict=True))
    expected, plain = small(functools.partial(torch.optim.AdamW, fused=True))
    steps(weights, optimizer, 5)
    steps(expected, plain, 5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected, strict=True))


def cpu_adamw(groups, fused=True):
    optimizer = CPUAdamW(groups)
    for group in optimizer.param_groups:
        group["fused"] = fused
    return optimizer


def adamw(groups):
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    keep_master_weights(optimizer)
    return optimizer


def adafactor(groups):
    from transformers import Adafactor

    optimizer = Adafactor(groups, lr=1e-4, scale_parameter=False, relative_step=False)
    keep_master_weights(optimizer)
    return optimizer


@pytest.mark.usefixtures("everything_is_elsewhere")
@pytest.mark.parametrize("dtype", [WHOLE, HALF, torch.float16])
@pytest.mark.parametrize("make", [cpu_adamw, functools.partial(cpu_adamw, fused=None), adamw, adafactor])
def test_a_saved_state_goes_on_exactly(tmp_path, dtype, make):
    weights, optimizer = small(make, dtype=dtype)
    steps(weights, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saved = deepcopy(weights)
    steps(weights, optimizer, 40, seed=9)
    assert all(not torch.equal(now, then) for now, then in zip(weights, saved, strict=True))
    again, resumed = small(make, dtype=dtype, seed=2)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for ours, then in zip(again, saved, strict=True):
        ours.data.copy_(then)
    steps(again, resumed, 40, seed=9)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, weights, strict=True))


@pytest.mark.usefixtures("everything_is_elsewhere")
def test_weights_that_are_loaded_before_the_first_step_reach_their_masters():
    weights, optimizer = small(CPUAdamW)
    expected, plain = small(torch.optim.AdamW)
    for one in (*weights, *expected):
        one.data.fill_(3.0)
    steps(weights, optimizer, 2)
    steps(expected, plain, 2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_with_an_accelerator_the_state_stays_on_the_host():
    weights = [torch.nn.Parameter(torch.randn(64, device="cuda", dtype=HALF))]
    optimizer = CPUAdamW(weights, lr=0.1)
    before = weights[0].detach().clone()
    steps([], optimizer, 1)
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert not torch.equal(weights[0], before) and weights[0].device.type == "cuda"
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    assert {value.device.type for value in tensors} == {"cpu"}


@pytest.mark.parametrize("optim", [name for name in get_args(Optimizer) if not is_registered(name)])
def test_every_optimizer_that_is_offered_trains_a_policy(optim, make, nano_folders):
    pytest.importorskip(OPTIMIZER_PACKAGES.get(optim, "torch"))
    trainer = make(optim=optim, learning_rate=0.1, model=policy_of(nano_folders["qwen2"], dtype=HALF))
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())


def test_muon_updates_matrices_and_adamw_everything_else(make, nano_folders, tmp_path):
    trainer = make(learning_rate=0.02, model=policy_of(nano_folders["qwen2"]))
    set_own_optimizer(trainer, SimpleNamespace(optim="muon"))
    optimizer = trainer.create_optimizer()
    muon, _ = optimizer._parts
    names = {id(one): name for name, one in trainer.model.named_parameters()}
    of_muon = {names[id(one)] for group in muon.param_groups for one in group["params"]}
    assert "model.layers.0.mlp.up_proj.weight" in of_muon
    assert not any("embed" in name or "lm_head" in name or "norm" in name or "bias" in name for name in of_muon)
    weights = dict(trainer.model.named_parameters())
    for weight in weights.values():
        weight.grad = torch.randn_like(weight)
    chosen = {True: "model.layers.0.mlp.up_proj.weight", False: "model.norm.weight"}
    copies = {kind: torch.nn.Parameter(weights[name].detach().clone()) for kind, name in chosen.items()}
    for kind, copy in copies.items():
        copy.grad = weights[chosen[kind]].grad.clone()
        group = next(g for g in optimizer.param_groups if any(one is weights[chosen[kind]] for one in g["params"]))
        rate = {"lr": 0.02, "weight_decay": group["weight_decay"]}
        own = (
            torch.optim.Muon([copy], adjust_lr_fn="match_rms_adamw", **rate)
            if kind
            else torch.optim.AdamW([copy], betas=group["betas"], eps=group["eps"], **rate)
        )
        own.step()
    state = deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    optimizer.step()
    assert all(torch.equal(copies[kind], weights[name]) for kind, name in chosen.items())
    assert len(optimizer.state_dict()["state"]) == len(weights)
    before = dict(policy_of(nano_folders["qwen2"], dtype=HALF).named_parameters())
    after, _, _ = trained(nano_folders["qwen2"], tmp_path, "muon", dtype=HALF, steps=2)
    assert all(not torch.equal(after[name], before[name]) for name in chosen.values())


def tiny_step(dtype=HALF):
    weight = torch.nn.Parameter(torch.full((4,), 0.02, dtype=dtype))
    return weight, torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.0)


def test_small_updates_of_bfloat16_weights_add_up():
    plain, mastered = tiny_step(), tiny_step()
    keep_master_weights(mastered[1])
    start = plain[0].clone()
    for weight, optimizer in (plain, mastered):
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert torch.equal(plain[0], start)  # every single update is below half a step of bfloat16
    assert (start - mastered[0]).float().mean().item() == pytest.approx(1e-3, rel=0.1)


class Allocations(TorchDispatchMode):
    """The most bytes that `tensors` and those made under it take at once."""

    def __init__(self, tensors):
        super().__init__()
        self.peak, self.made = 0, [weakref.ref(one) for one in tensors]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(one) for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        alive = [one for made in self.made if (one := made()) is not None]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
        self.peak = max(self.peak, sum(storages.values()))
        return result


@pytest.mark.parametrize("fused", [True, None])
def test_the_first_step_takes_16_bytes_a_parameter(fused):
    weights = [torch.nn.Parameter(torch.ones(1000, dtype=HALF)) for _ in range(20)]
    with Allocations(weights) as allocations:
        optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=fused)
        keep_master_weights(optimizer)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert 16 * 20_000 <= allocations.peak < 16.7 * 20_000  # one of 20 weights at a time
    before = 2 * 20_000 + 4 * 20_000  # weights and masters
    assert allocations.peak == pytest.approx(before + expected_bytes(weights, has_state=False), rel=0.03)


OPTIMIZERS = {
    "adamw, fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adafactor": functools.partial(Adafactor, lr=1e-2, scale_parameter=False, relative_step=False),
    "of a plugin": type("Other", (torch.optim.RMSprop,), {}),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_masters_take_the_steps_of_float32_weights(make):
    weights, optimizer = small(make, dtype=HALF)
    whole = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    plain = make([{"params": [one], "weight_decay": decay} for one, decay in zip(whole, (0.1, 0.0), strict=True)])
    assert keep_master_weights(optimizer) == 2
    for step in range(5):
        for weight, one in zip(weights, whole, strict=True):
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).to(HALF)
            one.grad = weight.grad.float()
        optimizer.step()
        plain.step()
        assert all(torch.equal(weight, one.to(HALF)) for weight, one in zip(weights, whole, strict=True))
    assert all(torch.equal(ours, one) for ours, one in zip(optimizer.state, whole, strict=True))


def test_a_weight_without_gradient_stays_and_float32_weights_have_no_master():
    weight, optimizer = tiny_step()
    keep_master_weights(optimizer)
    before = weight.clone()
    optimizer.step()
    assert torch.equal(weight, before)
    weight, optimizer = tiny_step(WHOLE)
    assert keep_master_weights(optimizer) == 0
    assert optimizer.param_groups[0]["params"][0] is weight
