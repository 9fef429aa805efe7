"""Gradients of embedding and output layer that are added to `.grad` in place are those of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swift.models.direct_gradients import accumulate_directly
from swift.models.forward import TokenSequence, choose_attention, pack
from swift.models.scoring import prepare_scoring, score_tokens
from swift.rl.linear_logprobs import linear_logprobs

BATCHES = ([TokenSequence([1, 2, 3], [4, 5, 6, 1]), TokenSequence([1, 2, 3], [7])], [TokenSequence([9, 4], [4, 4, 8])])


def gradients(folder, *, direct, padding_idx=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = padding_idx
    choose_attention(model)
    assert prepare_scoring(model) is None
    changed = accumulate_directly(model) if direct else None
    for batch in BATCHES:  # two passes: the second finds gradients
        logprobs, _ = score_tokens(model, pack(batch))
        (logprobs * torch.linspace(-1, 2, logprobs.numel())).sum().backward()
    return {name: one.grad for name, one in model.named_parameters()}, changed


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert float((gradient - expected[name]).norm()) <= 1e-6 * float(expected[name].norm()), name


@pytest.mark.parametrize("arch", ["qwen2", "llama"])  # tied and untied
@pytest.mark.parametrize("padding_idx", [None, 4])
def test_gradients_are_those_of_autograd(arch, padding_idx, nano_folders):
    expected, _ = gradients(nano_folders[arch], direct=False, padding_idx=padding_idx)
    found, changed = gradients(nano_folders[arch], direct=True, padding_idx=padding_idx)
    assert changed == ["embedding", "output layer"]
    assert_equal(found, expected)


@pytest.mark.parametrize("keep_bytes", [0, None])
@pytest.mark.parametrize("block", [(3, 4), (3, 100), (50, 4), (50, 100)])
def test_the_output_layer_adds_whatever_the_blocks(block, keep_bytes):
    def passes(add):
        torch.manual_seed(0)
        weight, hidden = torch.randn(13, 5, dtype=torch.float64), torch.randn(2, 10, 5, dtype=torch.float64)
        weight.requires_grad_()
        for rows in hidden:
            rows = rows.clone().requires_grad_()
            options = {"block": block, "keep_bytes": keep_bytes, "add_to": weight if add else None}
            logprobs, _ = linear_logprobs(rows, weight, torch.arange(10), **options)
            (logprobs * torch.arange(10)).sum().backward()
            yield rows.grad
        yield weight.grad

    for one, other in zip(passes(True), passes(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_nothing_of_the_size_of_the_tables_is_made_beside_their_gradient(nano_folders, monkeypatch):
    """A hook of autograd would see a gradient on its way to the parameter."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(nano_folders["qwen2"])
    choose_attention(model)
    prepare_scoring(model)
    accumulate_directly(model)
    weight, seen = model.lm_head.weight, []
    weight.register_hook(seen.append)
    score_tokens(model, pack(BATCHES[0]))[0].sum().backward()
    assert weight.grad.abs().sum() > 0
    place = weight.grad.data_ptr()
    score_tokens(model, pack(BATCHES[1]))[0].sum().backward()
    assert weight.grad.data_ptr() == place
    assert set(seen) <= {None}


def test_tables_that_do_not_learn_or_are_narrow_are_left_to_autograd(nano_folders):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(nano_folders["llama"])
    choose_attention(model)
    prepare_scoring(model)
    accumulate_directly(model)
    model.lm_head.weight.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(False)
    score_tokens(model, pack(BATCHES[0]))[0].sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad is None
    assert accumulate_directly(AutoModelForCausalLM.from_pretrained(nano_folders["llama"]).bfloat16()) == []


def test_an_embedding_that_does_more_than_look_up_is_left_alone(nano_folders):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(nano_folders["qwen2"])
    model.get_input_embeddings().max_norm = 1.0
    assert accumulate_directly(model) == []  # nor does its head score itself
    model.set_input_embeddings(nn.Embedding(300, 32, sparse=True))
    assert accumulate_directly(model) == []
