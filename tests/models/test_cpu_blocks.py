"""Decoder layers in training on a CPU: outputs and gradients are those of transformers' own layers."""

from __future__ import annotations

import copy

import pytest
import torch

from swift.models import cpu_blocks
from swift.models.cpu_blocks import normed_heads, plus_mlp, plus_product, use_fast_blocks
from swift.models.cpu_layers import angles, use_fast_layers
from swift.models.cpu_norms import use_fast_norms
from swift.models.cpu_training import use_fast_products
from swift.models.forward import TokenSequence, choose_attention, pack, packed_logits
from swift.rollout.engines.plain_decoder import obstacle
from tests.models.test_cpu_layers import FAMILIES, agree, decoder, gradients, near, needs_onednn

MANY = torch.arange(2 * 256).view(2, 256) % 50
"""Rows enough for norms that are part of products."""


def hastened(model):
    use_fast_products(model)
    use_fast_norms(model)
    use_fast_layers(model)
    return use_fast_blocks(model)


def called(monkeypatch):
    """Which of the parts are used from now on."""
    used = []
    for name in ("normed_heads", "plus_product", "plus_mlp"):
        own = getattr(cpu_blocks, name)
        monkeypatch.setattr(cpu_blocks, name, lambda *given, own=own, name=name: used.append(name) or own(*given))
    return used


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [40, 256])
@pytest.mark.parametrize("frozen", ["", "embed_tokens", "layernorm", "up_proj", "gate_proj", "k_proj", "bias", "mlp"])
def test_a_decoder_with_fast_blocks_has_the_outputs_and_gradients_of_its_own(family, rows, frozen):
    model = decoder(family)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not frozen or frozen not in name)
    exact = copy.deepcopy(model).double()
    assert hastened(model) == 2
    assert use_fast_blocks(model) == 0
    agree(model, exact, MANY[:, :rows])


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
def test_which_way_is_taken(bias, monkeypatch):
    model = decoder("llama", attention_bias=bias)
    assert hastened(model) == 2
    used = called(monkeypatch)
    model(input_ids=MANY)
    assert used == ["normed_heads", "plus_product", "plus_mlp"] * 2
    used.clear()
    model(input_ids=MANY[:1])  # too few rows for the MLP's weights
    assert used == ["normed_heads", "plus_product"] * 2
    used.clear()
    model(input_ids=MANY[:, :20])
    model(input_ids=MANY[:, :40])
    assert used == ["plus_product"] * 2
    used.clear()
    copy.deepcopy(model).double()(input_ids=MANY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=MANY)
    assert not used


@needs_onednn
@pytest.mark.parametrize("part", ["mlp", "self_attn", "input_layernorm", "mlp.down_proj"])
def test_who_looks_into_a_layer_sees_what_passes(part):
    model = decoder("qwen2")
    hastened(model)
    seen = []
    model.model.layers[0].get_submodule(part).register_forward_hook(lambda *given: seen.append(part))
    model(input_ids=MANY)
    assert seen == [part]


@needs_onednn
def test_layers_without_fast_parts_keep_their_forward():
    from peft import LoraConfig, get_peft_model

    model = decoder("qwen2")
    assert use_fast_blocks(model) == 0
    use_fast_layers(model)
    assert use_fast_blocks(model) == 0, "norms are missing"
    assert hastened(get_peft_model(decoder("qwen2"), LoraConfig(target_modules=["q_proj"], r=2))) == 0
    assert hastened(decoder("llama", hidden_act="gelu")) == 0
    assert hastened(decoder("qwen2").to(torch.bfloat16)) == 0


@needs_onednn
def test_a_layer_that_computes_something_else_is_found_out(monkeypatch):
    model = decoder("qwen2")
    own = type(model.model.layers[0]).forward
    monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda self, x, **given: own(self, x, **given) * 1.01)
    assert hastened(model) == 0


@needs_onednn
def test_attention_is_told_what_it_is_told_without(monkeypatch):
    from transformers import AttentionInterface

    told = []

    def listens(module, query, key, value, attention_mask, **kwargs):
        told.append({name: value for name, value in kwargs.items() if name != "position_embeddings"})
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("listens", listens)
    model = decoder("qwen2")
    model.config._attn_implementation = "listens"
    model(input_ids=MANY)
    own = told.copy()
    told.clear()
    assert hastened(model) == 2
    model(input_ids=MANY)
    assert [set(one) for one in told] == [set(one) for one in own]
    assert all(torch.equal(one["position_ids"], other["position_ids"]) for one, other in zip(told, own, strict=True))


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_stream_with_shared_prompts(family):
    model = decoder(family)
    choose_attention(model)
    exact = copy.deepcopy(model).double()
    assert hastened(model) == 2
    sequences = [
        TokenSequence(list(range(10 + group, 40)), [(7 * group + 3 * sample + t) % 50 for t in range(20 + sample)])
        for group in range(6)
        for sample in range(4)
    ]
    results = []
    for one in (model, exact):
        logits = packed_logits(one, pack(sequences))
        (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)).sum().backward()
        results.append((logits.detach(), {name: weight.grad for name, weight in one.named_parameters()}))
    (output, found), (expected, wanted) = results
    near(output, expected, 1e-6)
    for name, one in found.items():
        near(one, wanted[name], 2e-6)


@needs_onednn
def test_caches_checkpoints_and_sampling_go_on_as_before():
    model = decoder("qwen2").eval()
    own = copy.deepcopy(model)
    hastened(model)
    ids = MANY[:1]
    with torch.no_grad():
        torch.testing.assert_close(
            model.generate(ids, max_new_tokens=5, do_sample=False), own.generate(ids, max_new_tokens=5, do_sample=False)
        )
    assert obstacle(model) == obstacle(own)
    plain = gradients(model.train(), ids)[1]
    plain = {name: one.clone() for name, one in plain.items()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    for name, one in gradients(model, ids)[1].items():
        assert torch.equal(one, plain[name])


@needs_onednn
def test_gradients_of_the_parts():
    torch.manual_seed(1)

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    x, norm = leaf(1, 70, 48), leaf(48)
    normed = norm * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    gate, up, down = leaf(64, 48), leaf(64, 48), leaf(48, 64)
    expected = x + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    _same(plus_mlp, [x, norm, 1e-3, gate, up, down], expected)
    states, weight, bias = leaf(1, 70, 64), leaf(48, 64), leaf(48)
    _same(plus_product, [x, states, weight, bias], x + states @ weight.T + bias)

    turns = torch.randn(1, 70, 8, dtype=torch.float64).repeat(1, 1, 2)
    weights, biases = [leaf(64, 48), leaf(32, 48), leaf(32, 48)], [leaf(64), leaf(32), leaf(32)]

    def rotated(states):
        half = torch.cat((-states[..., 8:], states[..., :8]), -1)
        return states * turns.cos()[:, :, None] + half * turns.sin()[:, :, None]

    parts = [(normed @ w.T + b).view(1, 70, -1, 16) for w, b in zip(weights, biases, strict=True)]
    expected = torch.cat([rotated(parts[0]), rotated(parts[1]), parts[2]], 2)

    def heads(x, norm, *parameters):
        positions = angles((turns.cos().float(), turns.sin().float()))
        found = normed_heads(x, norm, 1e-3, *positions, list(parameters[:3]), list(parameters[3:]))
        return torch.cat([part.transpose(1, 2) for part in found], 2)

    _same(heads, [x, norm, *weights, *biases], expected)


def _same(function, given, expected):
    """In float32 what it is in float64."""
    single = [one.detach().float().requires_grad_() if isinstance(one, torch.Tensor) else one for one in given]
    found = function(*single)
    near(found, expected, 1e-6)
    pull = torch.linspace(-1, 1, found.numel()).view(found.shape)
    leaves = [one for one in single if isinstance(one, torch.Tensor)]
    exact = [one for one in given if isinstance(one, torch.Tensor)]
    wanted = torch.autograd.grad(expected, exact, pull.double(), retain_graph=True)
    for one, other in zip(torch.autograd.grad(found, leaves, pull), wanted, strict=True):
        near(one, other, 2e-6)
