"""Linear layers in training on a CPU: the products of oneDNN are those of PyTorch, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from swift.models import cpu_linear, cpu_training
from swift.models.cpu_training import filled_length, product, use_fast_products

needs_onednn = pytest.mark.skipif(not cpu_linear.available(), reason="no oneDNN for this processor")


def with_gradients(multiply, given):
    output = multiply(*given)
    weights = torch.linspace(0, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    wanted = [one for one in given if one is not None and one.requires_grad]
    return [output, *torch.autograd.grad(output, wanted, weights)]


@needs_onednn
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (1, 2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(130, 48), (132, 48), (2, 65, 48), (1, 1, 48)])
def test_products_and_gradients_are_those_of_pytorch(shape, bias, frozen):
    torch.manual_seed(0)
    given = [torch.randn(shape), torch.randn(40, 48), torch.randn(40) if bias else None]
    for number, one in enumerate(given):
        if one is not None and number not in frozen:
            one.requires_grad_()
    exact = [None if one is None else one.detach().double().requires_grad_(one.requires_grad) for one in given]
    expected = with_gradients(nn.functional.linear, exact)
    found = with_gradients(product, given)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).detach().norm()) <= 1e-6 * float(other.detach().norm())


@needs_onednn
def test_states_and_gradients_may_have_gaps():
    wide, weight = torch.randn(100, 96).requires_grad_(), torch.randn(40, 48).requires_grad_()
    found = torch.autograd.grad(product(wide[:, :48], weight).sum(), (wide, weight))  # the gradient is one number
    expected = torch.autograd.grad((wide[:, :48] @ weight.T).sum(), (wide, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_layers_of_float32_on_the_cpu_are_changed_and_nothing_else(monkeypatch):
    used = []
    monkeypatch.setattr(cpu_training, "product", lambda *given: used.append(1) or product(*given))
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    states = torch.randn(100, 64)
    before = model(states)
    assert use_fast_products(model) == 1  # the other is too narrow
    assert use_fast_products(model) == 0
    torch.testing.assert_close(model(states), before, rtol=1e-5, atol=1e-6)
    assert len(used) == 1
    model(states[:4])  # too few rows
    copy.deepcopy(model).double()(states.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(states)
    assert len(used) == 1


@needs_onednn
def test_a_copy_of_a_model_multiplies_with_its_own_weights():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    use_fast_products(model)
    other = copy.deepcopy(model)
    nn.init.zeros_(other[0].weight)
    states = torch.randn(100, 64)
    assert other(states).abs().max() == 0
    assert model(states).abs().max() > 0


@needs_onednn
def test_base_and_adapter_layers_of_lora_train_as_before(nano_folder):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def gradients(fast):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(nano_folder)
        model = get_peft_model(base, LoraConfig(r=32, target_modules="all-linear", init_lora_weights=False))
        if fast:
            assert use_fast_products(model) > 0
        model(input_ids=torch.arange(100)[None], use_cache=False).logits.log_softmax(-1)[..., 0].sum().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.requires_grad}

    expected = gradients(False)
    for name, gradient in gradients(True).items():
        assert float((gradient - expected[name]).norm()) <= 1e-5 * float(expected[name].norm()), name


def test_streams_have_few_lengths_and_little_filling():
    assert [filled_length(n) for n in range(256)] == list(range(256))
    for octave in range(9, 15):
        lengths = {filled_length(n) for n in range(2**octave + 1, 2 ** (octave + 1) + 1)}
        assert len(lengths) <= 32
    for num_tokens in range(256, 40000, 37):
        assert 0 <= filled_length(num_tokens) - num_tokens <= max(63, num_tokens / 32)
