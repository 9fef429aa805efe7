"""Norms in training on a CPU: the short way gives what the layers of transformers give, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from swift.models import cpu_norms
from swift.models.cpu_norms import rms_norm, use_fast_norms


def norm(width=16, kind=Qwen2RMSNorm, eps=1e-6):
    torch.manual_seed(0)
    layer = kind(width, eps=eps)
    nn.init.normal_(layer.weight, mean=1.0)
    return layer


def with_gradients(compute, states, weight):
    wanted = [one for one in (states, weight) if one.requires_grad]
    output = compute(states, weight)
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output, *torch.autograd.grad(output, wanted, weights)]


@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("shape", [(1, 7, 16), (1, 7, 3, 16), (5, 16), (1, 0, 16)])
def test_outputs_and_gradients_are_those_of_the_layer(shape, eps, frozen):
    layer = norm(eps=eps).double()
    states = torch.randn(shape, dtype=torch.float64)
    weight = layer.weight.detach().clone()
    for number, one in enumerate((states, weight)):
        one.requires_grad_(number != frozen)

    def plain(states, weight):
        return weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps))

    found = with_gradients(lambda states, weight: rms_norm(states, weight, eps), states, weight)
    for one, other in zip(found, with_gradients(plain, states, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_row_of_zeros_has_finite_gradients():
    layer = norm()
    states = torch.zeros(2, 16, requires_grad=True)
    expected = torch.autograd.grad(layer(states).sum(), (states, layer.weight))
    assert use_fast_norms(layer) == 1
    for one, other in zip(torch.autograd.grad(layer(states).sum(), (states, layer.weight)), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_norms_that_a_trial_agrees_with_are_changed_and_nothing_else(monkeypatch):
    used = []
    monkeypatch.setattr(cpu_norms, "rms_norm", lambda *given: used.append(1) or rms_norm(*given))
    other_formula, layer_norm, patched, empty = norm(kind=GemmaRMSNorm), nn.LayerNorm(16), norm(), norm(width=0)
    patched.forward = lambda states: states
    layers = [norm(), norm(kind=LlamaRMSNorm), other_formula, layer_norm, patched, norm().bfloat16(), empty]
    model = nn.ModuleList(layers)
    before = [layer(torch.ones(1, 16)) for layer in layers[:4]]
    assert use_fast_norms(model) == 2
    assert use_fast_norms(model) == 0
    used.clear()
    for layer, expected in zip(layers[:4], before, strict=True):
        torch.testing.assert_close(layer(torch.ones(1, 16)), expected)
    assert len(used) == 2
    copy.deepcopy(layers[0]).double()(torch.ones(1, 16, dtype=torch.float64))
    layers[0](torch.ones(1, 16, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layers[0](torch.ones(1, 16))
    assert len(used) == 2


def test_a_copy_of_a_norm_has_its_own_weight():
    layer = norm()
    use_fast_norms(layer)
    other = copy.deepcopy(layer)
    nn.init.zeros_(other.weight)
    assert other(torch.ones(1, 16)).abs().max() == 0
    assert layer(torch.ones(1, 16)).abs().max() > 0
