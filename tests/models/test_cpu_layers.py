"""Attention and MLP in training on a CPU: outputs and gradients are those of transformers' own layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from swift.models import cpu_layers, cpu_linear, cpu_training
from swift.models.cpu_layers import gated_mlp, joint_product, rotated, use_fast_layers
from swift.models.cpu_norms import use_fast_norms
from swift.models.cpu_training import use_fast_products
from swift.rollout.engines.plain_decoder import obstacle

needs_onednn = pytest.mark.skipif(not cpu_linear.available(), reason="no oneDNN for this processor")

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


def decoder(family, **more):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        family,
        **{**shape, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50, "sliding_window": None, **more},
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():  # biases and norms are no constants
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def gradients(model, ids):
    output = model(input_ids=ids, use_cache=False).logits
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return output.detach(), found


def agree(model, exact, ids):
    """Outputs and gradients of a model in float32 are those of another in float64."""
    (output, found), (expected, wanted) = gradients(model, ids), gradients(exact, ids)
    near(output, expected, 1e-6)
    assert set(found) == set(wanted)
    for name, one in found.items():
        assert one.is_contiguous()
        near(one, wanted[name], 2e-6)


def near(one, other, bound):
    one, other = one.detach().double(), other.detach().double()
    assert float((one - other).norm()) <= bound * float(other.norm())


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("frozen", ["", "embed_tokens", "up_proj", "gate_proj", "k_proj", "v_proj.bias", "mlp"])
@pytest.mark.parametrize("convolved", [cpu_training.WIDEST_CONVOLVED, 0])  # as narrow layers, as wide ones
def test_a_decoder_with_fast_layers_has_the_outputs_and_gradients_of_its_own(family, frozen, convolved, monkeypatch):
    monkeypatch.setattr(cpu_training, "WIDEST_CONVOLVED", convolved)
    model = decoder(family)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not frozen or frozen not in name)
    exact = copy.deepcopy(model).double()
    use_fast_products(model)
    use_fast_norms(model)
    assert use_fast_layers(model) == 4
    assert use_fast_layers(model) == 0
    ids = torch.arange(2 * 40).view(2, 40) % 50
    agree(model, exact, ids)


@needs_onednn
def test_the_short_way_is_taken_and_left(monkeypatch):
    model, used = decoder("qwen2"), []
    for name in ("gated_mlp", "joint_product"):
        own = getattr(cpu_layers, name)
        monkeypatch.setattr(cpu_layers, name, lambda *given, own=own, name=name: used.append(name) or own(*given))
    assert use_fast_layers(model) == 4
    used.clear()
    ids = torch.arange(80).view(1, 80) % 50
    model(input_ids=ids)
    assert sorted(used) == ["gated_mlp"] * 2 + ["joint_product"] * 2
    used.clear()
    model(input_ids=ids[:, :5])  # too few rows
    copy.deepcopy(model).double()(input_ids=ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids)
    assert not used


@needs_onednn
def test_who_looks_into_a_layer_sees_what_passes():
    model = decoder("qwen2")
    use_fast_layers(model)
    seen = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *given: seen.append("up"))
    model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda *given: seen.append("key"))
    model(input_ids=torch.arange(80).view(1, 80) % 50)
    assert seen == ["up", "key"]


@needs_onednn
def test_layers_with_an_adapter_and_unknown_ones_keep_their_forward():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(decoder("qwen2"), LoraConfig(target_modules=["q_proj"], r=2))
    assert use_fast_layers(adapted) == 2  # the MLPs
    gelu = decoder("llama", hidden_act="gelu")
    assert use_fast_layers(gelu) == 2  # attention
    biased = decoder("llama", mlp_bias=True, attention_bias=True)
    assert use_fast_layers(biased) == 2
    assert use_fast_layers(nn.Sequential(nn.Linear(64, 64))) == 0
    for dtype in (torch.bfloat16, torch.float64):
        assert use_fast_layers(decoder("qwen2").to(dtype)) == 0
    assert use_fast_layers(decoder("qwen2", head_dim=8)) == 2  # keys of 16 are too narrow


@needs_onednn
def test_the_cache_of_transformers_goes_on_from_fast_layers():
    model = decoder("qwen3").eval()
    own = copy.deepcopy(model)
    use_fast_layers(model)
    ids = torch.arange(80).view(1, 80) % 50
    with torch.no_grad():
        torch.testing.assert_close(
            model.generate(ids, max_new_tokens=5, do_sample=False), own.generate(ids, max_new_tokens=5, do_sample=False)
        )
    assert obstacle(model) == obstacle(own)


@needs_onednn
def test_a_copy_of_a_model_computes_with_its_own_weights():
    model = decoder("llama")
    use_fast_layers(model)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.model.layers[0].mlp.down_proj.weight)
    states = torch.randn(1, 100, 64)
    assert other.model.layers[0].mlp(states).abs().max() == 0
    assert model.model.layers[0].mlp(states).abs().max() > 0


@needs_onednn
def test_gradients_of_the_parts():
    torch.manual_seed(1)
    x = torch.randn(70, 48, requires_grad=True)
    weights = [torch.randn(64, 48, requires_grad=True), torch.randn(64, 48, requires_grad=True)]
    down = torch.randn(48, 64, requires_grad=True)
    expected = (nn.functional.silu(x @ weights[0].T) * (x @ weights[1].T)) @ down.T
    _same(gated_mlp(x, *weights, down), expected, [x, *weights, down])
    biases = [torch.randn(64, requires_grad=True), torch.randn(32, requires_grad=True)]
    weights[1] = torch.randn(32, 48, requires_grad=True)
    first, second = joint_product(x, weights, biases)
    expected = [nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    _same(torch.cat((first, second), 1), torch.cat(expected, 1), [x, *weights, *biases])
    angles = torch.randn(70, 24).repeat(1, 2)
    signed = torch.cat((-angles[:, :24].sin(), angles[:, 24:].sin()), 1)
    half = torch.cat((-x[:, 24:], x[:, :24]), 1)
    _same(rotated(x, angles.cos(), signed), x * angles.cos() + half * angles.sin(), [x])


def _same(found, expected, given):
    near(found, expected, 1e-6)
    pull = torch.linspace(-1, 1, found.numel()).view(found.shape)
    pairs = zip(torch.autograd.grad(found, given, pull), torch.autograd.grad(expected, given, pull), strict=True)
    for one, other in pairs:
        near(one, other, 2e-6)
